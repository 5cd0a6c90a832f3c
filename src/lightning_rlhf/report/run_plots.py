"""Plots of a run's page: curves with healthy bands, the reward fan and the frontiers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from lightning_rlhf.core.metrics import FAN, FLOPS, GOLD, HELD_OUT, HELD_OUT_KL, KL, REWARD
from lightning_rlhf.report.curves import BLUE, GREEN, ORANGE, Axis, Line, Panel, panel_for_each
from lightning_rlhf.report.plots import Area, Mark, Plot, Point, Series

Curves = Mapping[str, tuple[Sequence[int], Sequence[float]]]
"""Metric -> (steps, values)."""
Healthy = Mapping[str, tuple[str, tuple[float | None, float | None] | None]]
"""Metric -> (text on its healthy range, lowest and highest healthy value)."""
Panels = Callable[[Collection[str]], Sequence[Panel]]


def curve_plots(
    curves: Curves, panels: Panels | None, x_label: str, healthy: Healthy
) -> list[Plot]:
    """Return a plot for each axis of the panels, then one for each other metric with a band.

    What was measured once is not a curve, and is left out.
    """
    shown = (panels or panel_for_each)(curves)
    plots, drawn = [], set(FAN)
    for panel in shown:
        if set(FAN) & set(panel.metrics):
            continue
        drawn |= set(panel.metrics)
        for axis in (panel.left, *([] if panel.right is None else [panel.right])):
            plots.append(_axis_plot(panel, axis, curves, x_label, healthy))
    for name in curves:
        if name not in drawn and name in healthy and healthy[name][1] is not None:
            line = Axis("", (Line(name, "", BLUE, sparse=name.startswith("eval/")),))
            panel = Panel(name, line)
            plots.append(_axis_plot(panel, line, curves, x_label, healthy))
    return [plot for plot in plots if any(len(series.points) > 1 for series in plot.series)]


def _axis_plot(panel: Panel, axis: Axis, curves: Curves, x_label: str, healthy: Healthy) -> Plot:
    lines = [line for line in axis.lines if line.metric in curves]
    texts = [healthy[line.metric] for line in lines if line.metric in healthy]
    bands = [band for _, band in texts if band is not None]
    right = axis is panel.right
    names = ", ".join(line.label.removesuffix(" (right)") for line in axis.lines)
    subject = panel.title.partition(":")[0]
    return Plot(
        title=panel.title if panel.right is None else f"{subject}: {names}",
        x_label=x_label,
        unit=axis.unit,
        series=[
            Series(
                label=line.label.removesuffix(" (right)"),
                color=line.color,
                points=points(curves, line.metric),
                dots=line.sparse,
            )
            for line in lines
        ],
        healthy=bands[0] if bands else None,
        meaning=next((text for text, _ in texts if text != "-"), ""),
        reference=None if right else panel.reference,
        is_log=axis.scale == "log",
        limits=axis.limits,
    )


def fan_plot(curves: Curves, x_label: str) -> Plot | None:
    """Return the quantiles of the score over the run; None where they were not measured."""
    if not set(FAN) <= curves.keys():
        return None
    steps = curves[FAN[0]][0]
    p05, p25, p50, p75, p95 = (curves[name][1] for name in FAN)
    return Plot(
        title="Distribution of the score over the responses of an iteration",
        x_label=x_label,
        unit="score",
        series=[Series(label="median", color=BLUE, points=list(zip(steps, p50, strict=True)))],
        areas=[
            Area(label="5% to 95%", color=BLUE, opacity=0.15, x=steps, low=p05, high=p95),
            Area(label="25% to 75%", color=BLUE, opacity=0.3, x=steps, low=p25, high=p75),
        ],
    )


def frontier_plots(curves: Curves, diminishing: Mapping[str, Any] | None) -> list[Plot]:
    """Return reward against KL and against compute, with the knees of `diminishing.json`.

    The reward of iteration t is that of the policy after t - 1 iterations, an evaluation of step t
    that of the policy after t. Compute is counted in floating-point operations, or in iterations
    where these were not measured.
    """
    if REWARD not in curves:
        return []
    found = [] if diminishing is None else list(diminishing["curves"])
    by_kl = Plot(
        title="Reward against KL",
        x_label="KL to the reference, nats a response",
        unit="score",
        series=list(_against_kl(curves)),
        mark=_knee(found, REWARD, KL),
    )
    has_flops = FLOPS in curves and curves[FLOPS][0][:1] == curves[REWARD][0][:1]
    unit = FLOPS if has_flops else "iterations"
    by_compute = Plot(
        title="Reward against compute",
        x_label="floating-point operations" if has_flops else "iterations",
        unit="score",
        series=list(_against_compute(curves, has_flops)),
        mark=_knee(found, GOLD, unit) or _knee(found, REWARD, unit),
    )
    return [by_kl, by_compute] if KL in curves else [by_compute]


def kl_note(diminishing: Mapping[str, Any]) -> str:
    """Return where the reward stops rising with the KL; "" where that is not known."""
    for curve in diminishing["curves"]:
        if (curve["metric"], curve["unit"]) == (REWARD, KL) and (knee := curve["knee"]):
            low, high = knee["at_interval"]
            if knee["at"] is None:
                below = "" if low is None else f" (one below {low:.2f} nats is unlikely)"
                return f"no knee of reward against KL within this run{below}"
            start, end = ("end" if at is None else f"{at:.2f}" for at in (low, high))
            return f"the knee of reward against KL is at {knee['at']:.2f} [{start}-{end}] nats"
    return ""


def points(curves: Curves, metric: str) -> list[Point]:
    """Return a metric over the steps."""
    return list(zip(*curves[metric], strict=True)) if metric in curves else []


def joined(curves: Curves, x: str, y: str) -> list[Point]:
    """Return one metric against another one, at the steps that have both."""
    xs = dict(points(curves, x))
    return [(xs[step], value) for step, value in points(curves, y) if step in xs]


def _against_kl(curves: Curves) -> Iterator[Series]:
    yield Series(label="training", color=BLUE, points=joined(curves, KL, REWARD),
                 line=False, dots=True)  # fmt: skip
    for metric, label, color in ((HELD_OUT, "held-out prompts", ORANGE), (GOLD, "gold", GREEN)):
        if metric in curves:
            found = joined(curves, HELD_OUT_KL, metric)
            yield Series(label=label, color=color, points=found, dots=True)


def _against_compute(curves: Curves, has_flops: bool) -> Iterator[Series]:
    spent: dict[float, float] = {0: 0.0}
    if has_flops:
        steps, flops = curves[FLOPS]
        spent |= dict(zip(steps, accumulate(flops, max), strict=True))

    def at(after: float) -> float:
        return spent.get(after, math.nan) if has_flops else after

    shown = ((REWARD, "training", BLUE, 1), (HELD_OUT, "held-out prompts", ORANGE, 0),
             (GOLD, "gold", GREEN, 0))  # fmt: skip
    for metric, label, color, ahead in shown:
        found = [(at(step - ahead), value) for step, value in points(curves, metric)]
        if found:
            yield Series(label=label, color=color, points=found, dots=ahead == 0)


def _knee(found: Sequence[Mapping[str, Any]], metric: str, unit: str) -> Mark | None:
    """Return the point of diminishing returns of a curve; None where it has none in the run."""
    for curve in found:
        knee = curve["knee"]
        if (curve["metric"], curve["unit"]) == (metric, unit) and knee and knee["at"] is not None:
            low, high = knee["at_interval"]
            ends = (knee["at"] if low is None else low, math.inf if high is None else high)
            return Mark(x=knee["at"], interval=ends, label=f"knee at iteration {knee['iteration']}")
    return None
