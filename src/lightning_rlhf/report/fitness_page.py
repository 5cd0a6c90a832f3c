"""Fitness report of a reward: report.md and its figures for people, fitness.json for programs."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lightning_rlhf.core.errors import counted, percent
from lightning_rlhf.data.problems import Problems
from lightning_rlhf.models.checkpoint import PAGE, Verdict
from lightning_rlhf.report.checks import (
    CHECKS,
    MIN_COUNT,
    MIN_PROBES,
    PAIR_CHECKS,
    Finding,
    about_pairs,
    find,
    find_in_pairs,
    fitness_metrics,
    for_ppo,
    judgement,
)
from lightning_rlhf.report.curves import BLUE, GREEN, PURPLE
from lightning_rlhf.report.estimates import Distribution, Interval, number_text
from lightning_rlhf.report.figures import DPI, LEGEND, MARGIN, STYLE, head, mark_outside, view
from lightning_rlhf.report.fitness import Fitness, ProbeResult
from lightning_rlhf.report.run_page import TEMPLATES
from lightning_rlhf.report.tables import plain, spread, table
from lightning_rlhf.rewards.format_check import PROBES

NUMBERS, PICTURES = "fitness.json", "report"
CHARACTERS = 200
"""Maximum length of a text that is shown as an example, in characters."""


@dataclass(frozen=True, kw_only=True)
class FitnessReport:
    """Measurements of a reward, what they come to, and the files in which they are written."""

    title: str
    """Name of what was measured, as plain text."""
    fitness: Fitness
    probes: Sequence[ProbeResult]
    """Results of the probes; may be empty."""
    problems: Problems | None
    """Problems of the preference data; None if they were not examined."""
    sampled_from: str
    """Phrase that says which prompts the SFT model answered."""
    scale: str
    """Sentence that says how the scores relate to what PPO maximises."""

    @cached_property
    def findings(self) -> Sequence[Finding]:
        return find(self.fitness, self.probes)

    @cached_property
    def in_pairs(self) -> Sequence[Finding]:
        return () if self.problems is None else find_in_pairs(self.problems)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the measurements by metric."""
        return fitness_metrics(self.fitness, self.probes, self.findings)

    @property
    def words(self) -> list[str]:
        """Return the verdict on the reward and, if they were examined, on the pairs, each in two
        sentences."""
        pairs = [] if self.problems is None else [about_pairs(self.in_pairs)]
        return [judgement(self.findings).words, *pairs]

    def write(self, folder: Path) -> dict[str, Path]:
        """Write report.md, fitness.json and the figures, in `report/`, into an existing folder.

        Returns the file of each figure by caption.
        """
        pictures = draw_fitness(folder / PICTURES, self.title, self.fitness)
        links = (f"![{x}]({file.relative_to(folder).as_posix()})" for x, file in pictures.items())
        words, problems = self.words, self.problems
        text = (TEMPLATES / "fitness.md").read_text(encoding="utf-8").format(
            title=plain(self.title, CHARACTERS),
            conclusions="\n\n".join(f"**{plain(some, 10 * CHARACTERS)}**" for some in words),
            advice=for_ppo(self.findings, self.in_pairs),
            sampled_from=self.sampled_from,
            scale=self.scale,
            numbers="\n\n".join(_numbers(self.fitness)),
            pictures="\n\n".join(links),
            checks=_checks((*self.findings, *self.in_pairs)),
            thresholds="\n".join(f"- **{check.name}**, {check.threshold:g}: {check.reason}."
                                 for check in (*CHECKS, *PAIR_CHECKS)),
            probes=_probes(self.probes) if self.probes else "None was scored.",
            data="Not looked through." if problems is None else "\n".join(_data(problems)),
            min_count=MIN_COUNT,
            min_probes=MIN_PROBES,
        )  # fmt: skip
        (folder / PAGE).write_text(text, encoding="utf-8")
        measured = asdict(self.fitness)
        del measured["pairs"], measured["samples"]
        content = {
            "metrics": self.metrics,
            "fitness": measured,
            "findings": [asdict(finding) for finding in (*self.findings, *self.in_pairs)],
            "probes": [asdict(probe) | {"wins": probe.lead > 0} for probe in self.probes],
            "problems": None if problems is None else asdict(problems),
            "judgement": asdict(judgement(self.findings)),
            "title": self.title,
            "verdict": words[0],
            "about_pairs": None if problems is None else words[1],
        }
        numbers = json.dumps(content, indent=1, allow_nan=False) + "\n"
        (folder / NUMBERS).write_text(numbers, encoding="utf-8")
        return pictures


def read_judgement(folder: Path) -> Verdict | None:
    """Return the verdict of the report that `write_fitness` left in `folder`; None without one."""
    numbers = folder / NUMBERS
    if not numbers.is_file():
        return None
    return Verdict(**json.loads(numbers.read_text(encoding="utf-8"))["judgement"])


def _numbers(fitness: Fitness) -> Iterator[str]:
    """Yield the paragraph and the tables of the section of numbers."""
    length, calibration, accuracy = fitness.length, fitness.calibration, fitness.accuracy
    pairs, prompts, samples, ties = (
        counted(number, what)
        for number, what in (
            (len(fitness.pairs), "held-out pair"), (fitness.prompts, "prompt"),
            (len(fitness.samples), "SFT sample"), (fitness.ties, "tie"),
        )
    )  # fmt: skip
    yield f"Measured on {pairs} of {prompts} and {samples}; {ties}."
    groups = [
        ("Accuracy", accuracy),
        *((f"Accuracy, {group.label}", group) for group in length.groups),
        *((f"Accuracy, score difference {group.label}", group) for group in fitness.by_difference),
        *((f"Accuracy, given margin {group.label}", group) for group in fitness.by_margin),
    ]
    rows: list[tuple[str, float | None, *tuple[Interval | None, ...]]] = [
        (f"{name} ({counted(group.pairs, 'pair')})", group.accuracy, group.interval)
        for name, group in groups
    ]
    rows += [
        ("Accuracy of always taking the longer response", length.longer_is_right),
        ("Length gap", length.gap, length.gap_interval),
    ]
    if calibration is not None:
        rows += [
            ("Log-loss, nats a pair", calibration.log_loss),
            ("ECE", calibration.ece),
            ("ECE of a calibrated model, by chance", calibration.ece_of_calibrated),
            ("Overconfidence", calibration.overconfidence, calibration.overconfidence_interval),
        ]
    cells = [
        (name, number_text(value),
         "".join("-" if x is None else f"{x[0]:z.3f} to {x[1]:z.3f}" for x in interval))
        for name, value, *interval in rows  # a number that never has an interval has none here
    ]  # fmt: skip
    yield table(("", "value", "95% interval"), cells, right=(1, 2))
    if accuracy.accuracy == 1 and fitness.prompts > 1:
        most = min(1.0, 3 / fitness.prompts)
        yield (
            "Every pair is ranked right, so that a bootstrap has nothing to vary; by the rule of "
            f"three up to {percent(most)} of such pairs may still be ranked wrong (95%)."
        )
    correlations = [
        (name, f"{found.points:,}",
         *("undefined" if r is None else f"{r:+z.3f}" for r in (found.pearson, found.spearman)))
        for name, found in (
            ("Score with length, responses of the pairs", length.responses),
            ("Differences of score and length, within pairs", length.pairs),
            ("Score with length, SFT samples", length.samples),
        )
    ]  # fmt: skip
    yield table(("Correlation", "points", "Pearson", "Spearman"), correlations, right=(1, 2, 3))
    moments = [
        (name, f"{found.count:,}",
         *map(number_text, (found.mean, found.std, found.lowest, found.median, found.highest)))
        for name, _, found in kinds_of(fitness)
    ]  # fmt: skip
    heading = ("Score", "responses", "mean", "std", "lowest", "median", "highest")
    yield table(heading, moments, right=range(1, 7))


def kinds_of(fitness: Fitness) -> list[tuple[str, str, Distribution]]:
    """Return the kinds of responses that were scored, each with its colour and distribution."""
    found = [("chosen", GREEN, fitness.chosen), ("rejected", PURPLE, fitness.rejected)]
    return found + ([] if fitness.sampled is None else [("SFT samples", BLUE, fitness.sampled)])


def _checks(findings: Sequence[Finding]) -> str:
    rows = (
        (f.subject, f"**{f.outcome}**" if f.outcome == "flag" else f.outcome,
         number_text(f.value), f"{f.check.threshold:g}", plain(f.words, 10 * CHARACTERS))
        for f in findings
    )  # fmt: skip
    return table(("check", "outcome", "measured", "threshold", "in words"), rows, right=(2, 3))


def _probes(probes: Sequence[ProbeResult]) -> str:
    heading = ("probe", "prompts", "mean", "median", "median of chosen", "median of rejected",
               "beats chosen")  # fmt: skip
    rows, examples = [], []
    for p in probes:
        name, middle, shown = p.kind.replace("_", " "), number_text(p.median), p.example
        rows.append((
            f"{name}: {PROBES[p.kind]}", f"{p.prompts:,}", number_text(p.mean),
            f"**{middle}**" if p.lead > 0 else middle, number_text(p.chosen_median),
            number_text(p.rejected_median), percent(p.beats_chosen, 0),
        ))  # fmt: skip
        examples.append((
            name, plain(shown.pair.prompt, CHARACTERS), plain(shown.response, CHARACTERS),
            number_text(shown.score), number_text(shown.pair.chosen_score),
        ))  # fmt: skip
    shown_heading = ("probe", "prompt", "response", "score", "score of chosen")
    return (
        f"{table(heading, rows, right=range(1, 7))}\n\nOne example of each, the one whose score is "
        f"nearest to the median:\n\n{table(shown_heading, examples, right=(3, 4))}"
    )


def _data(problems: Problems) -> Iterator[str]:
    for problem in problems.counted:
        yield f"- {problem.line}"
        yield from (f"  - {plain(example, CHARACTERS)}" for example in problem.examples)
    yield f"- {problems.length.line}"


WIDTH_IN, HEIGHT_IN = 7.2, 4.0
MOST_POINTS = 1500
"""Maximum number of points of each kind in the scatter plot, spread evenly over the data."""


def draw_fitness(folder: Path, title: str, fitness: Fitness) -> dict[str, Path]:
    """Draw every figure into `folder`; return caption -> file.

    title: heading of each figure, which says what was measured.
    """
    pictures = {
        "Scores of chosen and rejected responses and of SFT samples": ("rewards.png", _rewards),
        "Score against length": ("length.png", _length),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in pictures.values():
        with mpl.rc_context({**STYLE, "axes.axisbelow": True}):
            figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
            draw(figure.subplots(), fitness)
            head(figure, title)
            figure.savefig(folder / name, dpi=DPI)
    return {what: folder / name for what, (name, _) in pictures.items()}


def _rewards(axes: Axes, fitness: Fitness) -> None:
    kinds = kinds_of(fitness)[::-1]
    for label, color, found in kinds:
        shares, name = np.array(found.histogram) / found.count, f"{label} ({found.count:,})"
        axes.stairs(shares, fitness.edges, color=color, fill=True, alpha=0.15)
        axes.stairs(shares, fitness.edges, color=color, linewidth=1.6, label=name)
    low, high = fitness.edges[0], fitness.edges[-1]
    margin = MARGIN * (high - low)
    limits = low - margin, high + margin
    axes.set_xlim(*limits)
    for row, (_, color, found) in enumerate(kinds, start=1):
        height = 0.06 * row * axes.get_ylim()[1]
        extremes = np.array([(found.lowest, height), (found.highest, height)])
        mark_outside(axes, extremes, limits, None, color)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set(xlabel="score", ylabel="share of responses")
    axes.set_ylim(bottom=0)
    axes.legend(handlelength=1.4, ncols=3, **LEGEND)


def _length(axes: Axes, fitness: Fitness) -> None:
    pairs, samples = fitness.pairs, fitness.samples
    kinds = [
        ("SFT samples", BLUE, "^", [(tokens, score) for score, tokens in samples]),
        ("rejected", PURPLE, "s", [(p.rejected_tokens, p.rejected_score) for p in pairs]),
        ("chosen", GREEN, "o", [(p.chosen_tokens, p.chosen_score) for p in pairs]),
    ]
    x, y = (view(values) for values in zip(*(xy for *_, some in kinds for xy in some), strict=True))
    axes.set(xlabel="tokens of the response", ylabel="score")
    if x is not None:
        axes.set_xlim(*x)
    if y is not None:
        axes.set_ylim(*y)
    for label, color, marker, points in kinds:
        if points:
            shown = spread(points, MOST_POINTS)
            alpha = min(0.8, max(0.2, 8 / math.sqrt(len(shown))))
            tokens, scores = zip(*shown, strict=True)
            axes.scatter(tokens, scores, s=16, marker=marker, color=color, alpha=alpha,
                         linewidths=0)  # fmt: skip
            axes.plot([], [], marker, color=color, markersize=5, label=label)  # opaque legend
            mark_outside(axes, np.array(points, dtype=float), x, y, color)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.legend(handletextpad=0.1, ncols=3, **LEGEND)
