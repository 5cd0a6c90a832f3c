"""Figures of a fitness report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lightning_rlhf.report.curves import BLUE, GREEN, ORANGE, PURPLE, SHARE
from lightning_rlhf.report.estimates import Distribution, Group, Interval
from lightning_rlhf.report.figures import DPI, GREY, LEGEND, STYLE, head
from lightning_rlhf.report.fitness import Fitness
from lightning_rlhf.report.outliers import MARGIN, mark_outside, view
from lightning_rlhf.report.probing import ProbeResult
from lightning_rlhf.report.tables import spread

WIDTH_IN, HEIGHT_IN = 7.2, 4.0
MOST_POINTS = 1500
"""Maximum number of points of each kind in the scatter plot, spread evenly over the data."""

Draw = Callable[[Figure], None]


def draw_fitness(
    folder: Path, title: str, fitness: Fitness, probes: Sequence[ProbeResult]
) -> dict[str, Path]:
    """Draw every figure for which there are data into `folder`; return caption -> file.

    title: heading of each figure, which says what was measured.
    """
    pictures: dict[str, tuple[str, Draw]] = {
        "Scores of chosen and rejected responses, of SFT samples and of probes": (
            "rewards.png", lambda figure: _rewards(figure, fitness, probes)),
        "Score against length": ("length.png", lambda figure: _length(figure, fitness)),
        "Accuracy by how far apart the two responses are": (
            "margin.png", lambda figure: _margins(figure, fitness)),
    }  # fmt: skip
    if fitness.calibration is not None:
        what = "Reliability: how often right, by how sure"
        pictures[what] = ("reliability.png", lambda figure: _reliability(figure, fitness))
    folder.mkdir(parents=True, exist_ok=True)
    return {what: _save(folder / name, draw, title) for what, (name, draw) in pictures.items()}


def _save(path: Path, draw: Draw, title: str) -> Path:
    import matplotlib as mpl

    with mpl.rc_context({**STYLE, "axes.axisbelow": True}):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
        draw(figure)
        head(figure, title)
        figure.savefig(path, dpi=DPI)
    return path


def _rewards(figure: Figure, fitness: Fitness, probes: Sequence[ProbeResult]) -> None:
    if probes:
        figure.set_figheight(HEIGHT_IN + 0.4 + 0.24 * len(probes))
        rows = figure.subplots(2, 1, sharex=True, height_ratios=[10, 1 + len(probes)])
        axes, strip = rows
    else:
        axes = strip = figure.subplots()
    strip.set_xlabel("score")
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
    shown = fitness.edges[0], fitness.edges[-1]
    reach = shown[1] - shown[0]
    medians = [m for probe in probes for m in (probe.median, probe.chosen_median)]
    near = [m for m in medians if shown[0] - reach <= m <= shown[1] + reach]
    low, high = min(*shown, *near), max(*shown, *near)
    margin = MARGIN * (high - low)
    limits = low - margin, high + margin
    axes.set_xlim(*limits)
    if probes:
        _probe_strip(strip, probes, limits)
    kinds_shown = [(color, found) for _, color, found in kinds if found is not None]
    for row, (color, found) in enumerate(kinds_shown, start=1):
        height = 0.06 * row * axes.get_ylim()[1]
        extremes = np.array([(found.lowest, height), (found.highest, height)])
        mark_outside(axes, extremes, limits, None, color)
    axes.set_ylabel("share of responses")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(bottom=0)
    axes.legend(handlelength=1.4, ncols=3, **LEGEND)


def _probe_strip(axes: Axes, probes: Sequence[ProbeResult], limits: Interval) -> None:
    """Draw a row for each probe with its median, and that of good responses to the same prompts."""
    names = [probe.kind.replace("_", " ") for probe in probes]
    for row, probe in enumerate(probes):
        axes.plot([probe.chosen_median, probe.median], [row, row], color=GREY, linewidth=1)
        color = ORANGE if probe.wins else GREY
        axes.plot(probe.median, row, "D", color=color, markersize=6)
        mark_outside(axes, np.array([(probe.median, row)]), limits, None, color)
        axes.plot(probe.chosen_median, row, "|", color=GREEN, markersize=10, markeredgewidth=2)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    mark = partial(Line2D, [], [], linestyle="")
    handles = [
        mark(
            marker="|",
            color=GREEN,
            markersize=10,
            markeredgewidth=2,
            label="median of good responses",
        ),
        mark(marker="D", color=GREY, label="of a probe"),
        mark(marker="D", color=ORANGE, label="of a probe that beats them"),
    ]
    axes.legend(handles=handles, handletextpad=0.2, ncols=3, **LEGEND)


def _reliability(figure: Figure, fitness: Fitness) -> None:
    assert fitness.calibration is not None
    axes = figure.subplots()
    points = fitness.calibration.points
    confidence = [point.confidence for point in points]
    accuracy = [point.accuracy for point in points]
    low = min(0.5, *accuracy) - 0.03
    axes.plot([0.5, 1], [0.5, 1], color=GREY, linestyle="--", linewidth=1, label="calibrated")
    axes.plot(confidence, accuracy, color=BLUE, linewidth=1)
    sizes = [20 + 60 * point.pairs / max(p.pairs for p in points) for point in points]
    axes.scatter(
        confidence, accuracy, s=sizes, color=BLUE, zorder=3, label="held-out pairs, in bins"
    )
    axes.text(0.98, 0.03, "below the line: surer than right", transform=axes.transAxes,
              ha="right", color=GREY, fontsize=9)  # fmt: skip
    axes.set_xlim(0.485, 1.015)
    axes.set_ylim(low, 1.03)
    axes.set_xlabel("confidence in its own pick")
    axes.set_ylabel("share ranked right")
    axes.legend(ncols=3, **LEGEND)


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
