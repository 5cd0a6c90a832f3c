"""Fitness report of a reward: report.md and its figures for people, fitness.json for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib as mpl
import numpy as np
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


def write_fitness(
    folder: Path,
    *,
    title: str,
    fitness: Fitness,
    probes: Sequence[ProbeResult],
    problems: Problems | None,
    sampled_from: str,
    scale: str,
) -> tuple[dict[str, float], dict[str, Path], list[str]]:
    """Write report.md, fitness.json and the figures, in `report/`, into `folder`.

    Args:
        folder: output folder, made if it is missing.
        title: name of what was measured, as plain text.
        fitness: measurements to report.
        probes: results of the probes; may be empty.
        problems: problems of the preference data; None if they were not examined.
        sampled_from: phrase that says which prompts the SFT model answered.
        scale: sentence that says how the scores relate to what PPO maximises.

    Returns:
        The measurements by metric; the file of each figure by caption; the verdict on the reward
        and, if they were examined, on the pairs, each in two sentences.
    """
    findings = find(fitness, probes)
    in_pairs = () if problems is None else find_in_pairs(problems)
    judged = judgement(findings)
    words = [judged.words] if problems is None else [judged.words, about_pairs(in_pairs)]
    pictures = draw_fitness(folder / PICTURES, title, fitness)
    metrics = fitness_metrics(fitness, probes, findings)
    shown = (f"![{what}]({path.relative_to(folder).as_posix()})" for what, path in pictures.items())
    text = (TEMPLATES / "fitness.md").read_text(encoding="utf-8").format(
        title=plain(title, CHARACTERS),
        conclusions="\n\n".join(f"**{plain(some, 10 * CHARACTERS)}**" for some in words),
        advice=for_ppo(findings, in_pairs),
        sampled_from=sampled_from,
        scale=scale,
        numbers="\n\n".join(_numbers(fitness)),
        pictures="\n\n".join(shown),
        checks=_checks((*findings, *in_pairs)),
        thresholds="\n".join(f"- **{check.name}**, {check.threshold:g}: {check.reason}."
                             for check in (*CHECKS, *PAIR_CHECKS)),
        probes=_probes(probes) if probes else "None was scored.",
        data="Not looked through." if problems is None else "\n".join(_data(problems)),
        min_count=MIN_COUNT,
        min_probes=MIN_PROBES,
    )  # fmt: skip
    (folder / PAGE).write_text(text, encoding="utf-8")
    measured = asdict(fitness)
    del measured["pairs"], measured["samples"]
    content = {
        "metrics": metrics,
        "fitness": measured,
        "findings": [asdict(finding) for finding in (*findings, *in_pairs)],
        "probes": [asdict(probe) | {"wins": probe.lead > 0} for probe in probes],
        "problems": None if problems is None else asdict(problems),
        "judgement": asdict(judged),
        "title": title,
        "verdict": judged.words,
        "about_pairs": None if problems is None else words[1],
    }
    numbers = json.dumps(content, indent=1, allow_nan=False) + "\n"
    (folder / NUMBERS).write_text(numbers, encoding="utf-8")
    return metrics, pictures, words


def read_judgement(folder: Path) -> Verdict | None:
    """Return the verdict of the report that `write_fitness` left in `folder`; None without one."""
    numbers = folder / NUMBERS
    if not numbers.is_file():
        return None
    return Verdict(**json.loads(numbers.read_text(encoding="utf-8"))["judgement"])


def _numbers(fitness: Fitness) -> Iterator[str]:
    """Yield the paragraph and the tables of the section of numbers."""
    length, calibration = fitness.length, fitness.calibration
    pairs, prompts = (
        counted(len(fitness.pairs), "held-out pair"),
        counted(fitness.prompts, "prompt"),
    )
    samples, ties = counted(len(fitness.samples), "SFT sample"), counted(fitness.ties, "tie")
    yield f"Measured on {pairs} of {prompts} and {samples}; {ties}."
    groups = [
        ("Accuracy", fitness.accuracy),
        *((f"Accuracy, {group.label}", group) for group in length.groups),
        *((f"Accuracy, score difference {group.label}", group) for group in fitness.by_difference),
        *((f"Accuracy, given margin {group.label}", group) for group in fitness.by_margin),
    ]
    rows = [
        _row(f"{name} ({counted(group.pairs, 'pair')})", group.accuracy, group.interval)
        for name, group in groups
    ]
    rows += [
        _row("Accuracy of always taking the longer response", length.longer_is_right),
        _row("Length gap", length.gap, length.gap_interval),
    ]
    if calibration is not None:
        rows += [
            _row("Log-loss, nats a pair", calibration.log_loss),
            _row("ECE", calibration.ece),
            _row("ECE of a calibrated model, by chance", calibration.ece_of_calibrated),
            _row("Overconfidence", calibration.overconfidence, calibration.overconfidence_interval),
        ]
    yield table(("", "value", "95% interval"), rows, right=(1, 2))
    if fitness.accuracy.accuracy == 1 and fitness.prompts > 1:
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


def _row(name: str, value: float | None, *interval: Interval | None) -> tuple[str, str, str]:
    """Return a row of the first table; `interval` is absent where the number never has one."""
    ends = ["-" if found is None else f"{found[0]:z.3f} to {found[1]:z.3f}" for found in interval]
    return name, number_text(value), "".join(ends)


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
            draw(figure, fitness)
            head(figure, title)
            figure.savefig(folder / name, dpi=DPI)
    return {what: folder / name for what, (name, _) in pictures.items()}


def _rewards(figure: Figure, fitness: Fitness) -> None:
    axes = figure.subplots()
    axes.set_xlabel("score")
    kinds = kinds_of(fitness)[::-1]
    for label, color, found in kinds:
        shares = np.array(found.histogram) / found.count
        axes.stairs(shares, fitness.edges, color=color, fill=True, alpha=0.15)
        axes.stairs(
            shares, fitness.edges, color=color, linewidth=1.6, label=f"{label} ({found.count:,})"
        )
    low, high = fitness.edges[0], fitness.edges[-1]
    margin = MARGIN * (high - low)
    limits = low - margin, high + margin
    axes.set_xlim(*limits)
    for row, (_, color, found) in enumerate(kinds, start=1):
        height = 0.06 * row * axes.get_ylim()[1]
        extremes = np.array([(found.lowest, height), (found.highest, height)])
        mark_outside(axes, extremes, limits, None, color)
    axes.set_ylabel("share of responses")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(bottom=0)
    axes.legend(handlelength=1.4, ncols=3, **LEGEND)


def _length(figure: Figure, fitness: Fitness) -> None:
    axes = figure.subplots()
    pairs, samples = fitness.pairs, fitness.samples
    kinds = [
        ("SFT samples", BLUE, "^", [(tokens, score) for score, tokens in samples]),
        ("rejected", PURPLE, "s", [(p.rejected_tokens, p.rejected_score) for p in pairs]),
        ("chosen", GREEN, "o", [(p.chosen_tokens, p.chosen_score) for p in pairs]),
    ]
    everything = [point for *_, points in kinds for point in points]
    x, y = view([tokens for tokens, _ in everything]), view([score for _, score in everything])
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
    axes.set_xlabel("tokens of the response")
    axes.set_ylabel("score")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.legend(handletextpad=0.1, ncols=3, **LEGEND)
