"""Fitness report of a reward: report.md and its figures for people, fitness.json for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
    for_ppo,
    judgement,
    metrics,
)
from lightning_rlhf.report.curves import BLUE, GREEN, PURPLE, SHARE
from lightning_rlhf.report.estimates import Correlation, Distribution, Group, Interval
from lightning_rlhf.report.figures import DPI, GREY, LEGEND, MARGIN, STYLE, head, mark_outside, view
from lightning_rlhf.report.fitness import Fitness, ProbeResult
from lightning_rlhf.report.run_page import TEMPLATES
from lightning_rlhf.report.tables import plain, spread, table
from lightning_rlhf.rewards.format_check import PROBES

NUMBERS, PICTURES = "fitness.json", "report"
CHARACTERS = 200
"""Maximum length of a text that is shown as an example, in characters."""


@dataclass(frozen=True)
class Written:
    """Files and conclusions of a report."""

    page: Path
    numbers: Path
    pictures: Mapping[str, Path]
    """File of each figure, by caption."""
    findings: tuple[Finding, ...]
    """Findings about the reward."""
    judgement: Verdict
    """Verdict on the reward."""
    about_pairs: str | None
    """Summary of the findings about the pairs; None if the pairs were not examined."""

    @property
    def verdict(self) -> str:
        """Return the verdict in two sentences."""
        return self.judgement.words


def write_fitness(
    folder: Path,
    *,
    title: str,
    fitness: Fitness,
    probes: Sequence[ProbeResult],
    problems: Problems | None,
    sampled_from: str,
    scale: str,
) -> Written:
    """Write report.md, fitness.json and the figures, in `report/`, into `folder`.

    Args:
        folder: output folder, made if it is missing.
        title: name of what was measured, as plain text.
        fitness: measurements to report.
        probes: results of the probes; may be empty.
        problems: problems of the preference data; None if they were not examined.
        sampled_from: phrase that says which prompts the SFT model answered.
        scale: sentence that says how the scores relate to what PPO maximises.
    """
    findings = find(fitness, probes)
    in_pairs = () if problems is None else find_in_pairs(problems)
    pairs = None if problems is None else about_pairs(in_pairs)
    pictures = draw_fitness(folder / PICTURES, title, fitness)
    judged = judgement(findings)
    words = [judged.words] if pairs is None else [judged.words, pairs]
    shown = (f"![{what}]({path.relative_to(folder).as_posix()})" for what, path in pictures.items())
    text = (TEMPLATES / "fitness.md").read_text(encoding="utf-8")
    sections = {
        "title": plain(title, CHARACTERS),
        "conclusions": "\n\n".join(f"**{plain(some, 10 * CHARACTERS)}**" for some in words),
        "advice": for_ppo(findings, in_pairs),
        "sampled_from": sampled_from,
        "scale": scale,
        "numbers": "\n\n".join(_numbers(fitness)),
        "pictures": "\n\n".join(shown),
        "checks": _checks((*findings, *in_pairs)),
        "thresholds": "\n".join(f"- **{check.name}**, {check.threshold:g}: {check.reason}."
                                for check in (*CHECKS, *PAIR_CHECKS)),
        "probes": _probes(probes),
        "data": _data(problems),
    }  # fmt: skip
    page, numbers = folder / PAGE, folder / NUMBERS
    page.write_text(
        text.format(**sections, min_count=MIN_COUNT, min_probes=MIN_PROBES), encoding="utf-8"
    )
    labels = {
        "judgement": asdict(judged),
        "title": title,
        "verdict": judged.words,
        "about_pairs": pairs,
    }
    content = as_json(fitness, (*findings, *in_pairs), probes, problems) | labels
    numbers.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return Written(page, numbers, pictures, findings, judged, pairs)


def read_judgement(folder: Path) -> Verdict | None:
    """Return the verdict of the report that `write_fitness` left in `folder`; None without one."""
    numbers = folder / NUMBERS
    if not numbers.is_file():
        return None
    return Verdict(**json.loads(numbers.read_text(encoding="utf-8"))["judgement"])


def as_json(
    fitness: Fitness,
    findings: Sequence[Finding],
    probes: Sequence[ProbeResult],
    problems: Problems | None,
) -> dict[str, Any]:
    """Return all measurements as a JSON object, without the pairs and samples they come from."""
    measured = asdict(fitness)
    del measured["pairs"], measured["samples"]
    return {
        "metrics": metrics(fitness, probes, [f for f in findings if f.check in CHECKS]),
        "fitness": measured,
        "findings": [asdict(finding) for finding in findings],
        "probes": [asdict(probe) | {"wins": probe.wins} for probe in probes],
        "problems": None if problems is None else asdict(problems),
    }


def _numbers(fitness: Fitness) -> Iterator[str]:
    counts = [
        counted(len(fitness.pairs), "held-out pair"),
        counted(fitness.prompts, "prompt"),
        counted(len(fitness.samples), "SFT sample"),
        counted(fitness.ties, "tie"),
    ]
    yield "Measured on {} of {} and {}; {}.".format(*counts)
    rows = [_group_row("Accuracy", fitness.accuracy)]
    rows += [_group_row(f"Accuracy, {group.label}", group) for group in fitness.length.groups]
    rows += [
        _group_row(f"Accuracy, {by} {group.label}", group)
        for by, groups in (
            ("score difference", fitness.by_difference), ("given margin", fitness.by_margin)
        )
        for group in groups
    ]  # fmt: skip
    length, calibration = fitness.length, fitness.calibration
    rows.append(
        ("Accuracy of always taking the longer response", number(length.longer_is_right), "")
    )
    rows.append(("Length gap", number(length.gap), interval(length.gap_interval)))
    if calibration is not None:
        low_high = interval(calibration.overconfidence_interval)
        rows += [
            ("Log-loss, nats a pair", number(calibration.log_loss), ""),
            ("ECE", number(calibration.ece), ""),
            ("ECE of a calibrated model, by chance", number(calibration.ece_of_calibrated), ""),
            ("Overconfidence", number(calibration.overconfidence), low_high),
        ]
    yield table(("", "value", "95% interval"), rows, right=(1, 2))
    if fitness.accuracy.accuracy == 1 and fitness.prompts > 1:
        most = min(1.0, 3 / fitness.prompts)
        yield (
            "Every pair is ranked right, so that a bootstrap has nothing to vary; by the rule of "
            f"three up to {percent(most)} of such pairs may still be ranked wrong (95%)."
        )
    correlations = [
        _correlation_row("Score with length, responses of the pairs", length.responses),
        _correlation_row("Differences of score and length, within pairs", length.pairs),
        _correlation_row("Score with length, SFT samples", length.samples),
    ]
    yield table(("Correlation", "points", "Pearson", "Spearman"), correlations, right=(1, 2, 3))
    kinds = {
        "chosen": fitness.chosen, "rejected": fitness.rejected, "SFT samples": fitness.sampled
    }  # fmt: skip
    moments = [
        (name, f"{found.count:,}", *map(number, (found.mean, found.std, found.lowest,
                                                 found.median, found.highest)))
        for name, found in kinds.items() if found is not None
    ]  # fmt: skip
    heading = ("Score", "responses", "mean", "std", "lowest", "median", "highest")
    yield table(heading, moments, right=range(1, 7))


def _checks(findings: Sequence[Finding]) -> str:
    rows = (
        (f.subject, f"**{f.outcome}**" if f.outcome == "flag" else f.outcome,
         number(f.value), f"{f.check.threshold:g}", plain(f.words, 10 * CHARACTERS))
        for f in findings
    )  # fmt: skip
    return table(("check", "outcome", "measured", "threshold", "in words"), rows, right=(2, 3))


def _probes(probes: Sequence[ProbeResult]) -> str:
    if not probes:
        return "None was scored."
    heading = ("probe", "prompts", "mean", "median", "median of chosen", "median of rejected",
               "beats chosen")  # fmt: skip
    rows = (
        (f"{p.kind.replace('_', ' ')}: {PROBES[p.kind]}", f"{p.prompts:,}", number(p.mean),
         f"**{number(p.median)}**" if p.wins else number(p.median), number(p.chosen_median),
         number(p.rejected_median), percent(p.beats_chosen, 0))
        for p in probes
    )  # fmt: skip
    examples = (
        (p.kind.replace("_", " "), plain(p.example.pair.prompt, CHARACTERS),
         plain(p.example.response, CHARACTERS), number(p.example.score),
         number(p.example.pair.chosen_score))
        for p in probes
    )  # fmt: skip
    shown = ("probe", "prompt", "response", "score", "score of chosen")
    return (
        f"{table(heading, rows, right=range(1, 7))}\n\nOne example of each, the one whose score is "
        f"nearest to the median:\n\n{table(shown, examples, right=(3, 4))}"
    )


def _data(problems: Problems | None) -> str:
    if problems is None:
        return "Not looked through."
    items = []
    for problem in problems.counted:
        items.append(f"- {problem.line}")
        items += [f"  - {plain(example, CHARACTERS)}" for example in problem.examples]
    return "\n".join([*items, f"- {problems.length.line}"])


def _group_row(name: str, group: Group) -> tuple[str, str, str]:
    pairs = counted(group.pairs, "pair")
    return f"{name} ({pairs})", number(group.accuracy), interval(group.interval)


def _correlation_row(name: str, found: Correlation) -> tuple[str, str, str, str]:
    undefined = "undefined"
    pearson, spearman = (
        undefined if r is None else f"{r:+z.3f}" for r in (found.pearson, found.spearman)
    )
    return name, f"{found.points:,}", pearson, spearman


def number(value: float | None) -> str:
    """Return the number as text with three decimals, or a dash for None."""
    return "-" if value is None else f"{value:z.3f}"


def interval(ends: Interval | None) -> str:
    """Return both ends as text with three decimals, or a dash for None."""
    return "-" if ends is None else f"{ends[0]:z.3f} to {ends[1]:z.3f}"


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
        "Accuracy by how far apart the two responses are": ("margin.png", _margins),
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
    kinds: list[tuple[str, str, Distribution | None]] = [
        ("SFT samples", BLUE, fitness.sampled),
        ("rejected", PURPLE, fitness.rejected),
        ("chosen", GREEN, fitness.chosen),
    ]
    for label, color, found in kinds:
        if found is not None:
            shares = np.array(found.histogram) / found.count
            axes.stairs(shares, fitness.edges, color=color, fill=True, alpha=0.15)
            axes.stairs(
                shares, fitness.edges, color=color, linewidth=1.6,
                label=f"{label} ({found.count:,})",
            )  # fmt: skip
    low, high = fitness.edges[0], fitness.edges[-1]
    margin = MARGIN * (high - low)
    limits = low - margin, high + margin
    axes.set_xlim(*limits)
    kinds_shown = [(color, found) for _, color, found in kinds if found is not None]
    for row, (color, found) in enumerate(kinds_shown, start=1):
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
        ("SFT samples", BLUE, "^", [(s.tokens, s.score) for s in samples]),
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


def _margins(figure: Figure, fitness: Fitness) -> None:
    groups = [
        ("by |chosen - rejected|, score", fitness.by_difference),
        ("by the margin given in the data", fitness.by_margin),
        ("by length", fitness.length.groups),
    ]
    shown = [(label, group) for label, group in groups if group]
    figure.set_figwidth(WIDTH_IN + 3.2 * (len(shown) - 2))
    plots = figure.subplots(1, len(shown), sharey=True, squeeze=False,
                            width_ratios=[1 + len(group) for _, group in shown]).flat  # fmt: skip
    for axes, (label, group) in zip(plots, shown, strict=True):
        _accuracies(axes, group)
        axes.set_title(label, loc="left", fontsize=10)
    figure.axes[0].set_ylabel("share ranked right (pairs)")


def _accuracies(axes: Axes, groups: Sequence[Group]) -> None:
    axes.axhline(0.5, color=GREY, linewidth=1, linestyle="--")
    for x, group in enumerate(groups):
        if group.interval is not None:
            axes.vlines(x, *group.interval, color=BLUE, linewidth=2)
        axes.plot(x, group.accuracy, "o", color=BLUE, markersize=7)
    names = [f"{g.label.replace(' to ', chr(10) + 'to ')}\n({g.pairs:,})" for g in groups]
    axes.set_xticks(range(len(groups)), [name.replace("chosen ", "chosen\n") for name in names])
    axes.tick_params(axis="x", labelsize=8.5)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylim(*SHARE)
    axes.grid(visible=False, axis="x")
