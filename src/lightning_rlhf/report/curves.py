"""Plots of a run: which curves each stage shows, with healthy bands, and the frontiers."""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from lightning_rlhf.core import metrics
from lightning_rlhf.core.metrics import FAN, GOLD, HELD_OUT, HELD_OUT_KL, KL, METRICS, REWARD

# Palette of Okabe and Ito, distinguishable with all common kinds of colour blindness.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, "#E69F00", "#56B4E9", "#F0E442")

SHARE = (0.0, 1.04)
"""Limits of an axis for shares: 0 to 1, with room for a line at 1."""

KL_AXIS = "KL to the reference, nats a response"
"""Name of the x-axis of a frontier."""

Point = tuple[float, float]
Mark = tuple[float, tuple[float, float], str]
"""Place on the x-axis, its interval, and its name."""
Curves = Mapping[str, tuple[Sequence[int], Sequence[float]]]
"""Metric -> (steps, values)."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one kind, drawn as a line, as dots or as both."""

    label: str
    """Name in the legend; empty to leave the series out of it."""
    color: str
    """A colour of PALETTE."""
    metric: str = ""
    """Metric whose points over the steps these are; empty for other points."""
    points: Sequence[Point] = ()
    line: bool = True
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Area:
    """Area between two curves over the same x."""

    label: str
    color: str
    opacity: float
    metrics: Sequence[str] = ()
    """Lower and upper metric between which the area lies; empty for other curves."""
    x: Sequence[float] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot with its axes; a panel is such a plot whose metrics `measured` fills in."""

    title: str
    x_label: str = ""
    unit: str | None = None
    """Unit of the y-axis; None until `measured` takes that of the first metric."""
    series: Sequence[Series]
    areas: Sequence[Area] = ()
    healthy: tuple[float | None, float | None] | None = None
    """Lowest and highest healthy value, None where there is no such end."""
    meaning: str = ""
    """Text on the healthy range, shown under the plot."""
    reference: tuple[float, str] | None = None
    """Level to compare with, and its name."""
    mark: Mark | None = None
    is_log: bool = False
    limits: tuple[float, float] | None = None
    """Limits of the y-axis; None fits them to the data."""

    @property
    def metrics(self) -> set[str]:
        """Return the metrics that a panel shows."""
        ends = (metric for area in self.areas for metric in area.metrics)
        return {*(one.metric for one in self.series), *ends}

    def measured(self, curves: Curves, x_label: str) -> Self:
        """Return the plot of what was measured, with the healthy range of its metrics."""
        known = (one for one in self.series if one.metric in curves)
        series = [replace(one, points=points(curves, one.metric)) for one in known]
        areas = []
        for area in self.areas:
            if curves.keys() >= {*area.metrics}:
                (x, low), (_, high) = (curves[metric] for metric in area.metrics)
                areas.append(replace(area, x=x, low=low, high=high))
        rows = [METRICS[one.metric] for one in series if one.metric in METRICS]
        unit = rows[0].unit.replace("1", "") if rows and self.unit is None else self.unit or ""
        healthy = next((row.band for row in rows if row.band is not None), None)
        meaning = next((row.healthy for row in rows if row.healthy != "-"), "")
        filled = replace(self, x_label=x_label, unit=unit, series=series, areas=areas)
        return replace(filled, healthy=healthy, meaning=meaning)


Panels = Callable[[Collection[str]], Sequence[Plot]]
"""Function: names of the measured metrics -> panels."""


def _of(title: str, *lines: tuple[str, str, str], **options: Any) -> Plot:
    """Return the panel of metrics with names in the legend and colours; evaluations have dots."""
    series = [
        Series(metric=metric, label=label, color=color, dots=metric.startswith("eval/"))
        for metric, label, color in lines
    ]
    return Plot(title=title, series=series, **options)


def _held_out(title: str, metric: str, **options: Any) -> Plot:
    """Return a panel of a metric in training and on validation data."""
    training, validation = f"update/{metric}", f"eval/{metric}"
    return _of(title, (training, "training", BLUE), (validation, "validation", ORANGE), **options)


def _of_pairs(title: str, metric: str) -> Plot:
    """Return a panel of a metric of the chosen and of the rejected responses in training."""
    chosen, rejected = (f"update/{metric}_{side}" for side in ("chosen", "rejected"))
    return _of(title, (chosen, "chosen", GREEN), (rejected, "rejected", PURPLE))


SFT_PANELS = (
    _held_out("Loss", "loss"),
    _held_out("Perplexity", "perplexity", is_log=True),
    _of("Learning rate", ("update/lr", "learning rate", BLUE)),
)
_PAIR_PANELS = (
    _held_out("Accuracy", "accuracy", unit="share of pairs", reference=(0.5, "guessing")),
    _of_pairs("Rewards in training", "reward"),
    _held_out("Margin, chosen less rejected", "reward_margin", reference=(0.0, "no preference")),
)
RM_PANELS = (_held_out("Loss", "rm_loss", reference=(0.6931, "guessing")), *_PAIR_PANELS)
DPO_PANELS = (
    _held_out("Loss, without the SFT term", "dpo_loss"),
    *_PAIR_PANELS,
    _of_pairs("Log-probability under the policy", "logps"),
    _held_out("SFT loss of the chosen responses", "sft_loss"),
)
_PROMPTS, _STEP = "held-out prompts", "Size of an iteration's update"
_UNDER_SFT, _CORRECT = "eval/response_perplexity", ("eval/judge/correct", "correct", GREEN)
_LOSSES = (("ppo_loss", "PPO", BLUE), ("update/policy_loss", "policy", GREEN))
_PPO_PANELS = (
    _of("Reward, before the KL penalty", (REWARD, "training", BLUE), (HELD_OUT, _PROMPTS, ORANGE)),
    _of("KL to the reference", (KL, "training", BLUE), (HELD_OUT_KL, _PROMPTS, ORANGE)),
    _of("Policy: entropy", ("entropy", "entropy", BLUE)),
    _of("Policy: perplexity under SFT", (_UNDER_SFT, "perplexity under SFT", ORANGE)),
    _of("Loss (no sign of progress)", *_LOSSES, ("update/value_loss", "value", PURPLE)),
    _of("Responses: length", ("rollout/response_tokens", "length", BLUE)),
    _of("Responses: ended", ("rollout/ended", "ended", GREEN), limits=SHARE),
)
_STEP_SIZE = (
    _of(f"{_STEP}: approx. KL", ("update/approx_kl", "approx. KL", BLUE)),
    _of(f"{_STEP}: clipped", ("update/clip_fraction", "clipped", GREEN), unit="share of tokens"),
)
_JUDGE = (
    _of("Judge, on held-out prompts: gold", (GOLD, "gold", BLUE), unit="score"),
    _of("Judge, on held-out prompts: correct", _CORRECT, unit="share", limits=SHARE),
)
FAN_PANEL = _of(
    "Responses: distribution of the score",
    (FAN[2], "median", BLUE),
    areas=[
        Area(label="5% to 95%", color=BLUE, opacity=0.15, metrics=(FAN[0], FAN[4])),
        Area(label="25% to 75%", color=BLUE, opacity=0.3, metrics=(FAN[1], FAN[3])),
    ],
)


def ppo_panels(measured: Collection[str]) -> Sequence[Plot]:
    """Return the panels of PPO: with those of the judge, where there was a judge, of the quantiles
    of the score, where they are measured, and of the components of several."""
    judged = [panel for panel in _JUDGE if panel.metrics & set(measured)]
    fan = [FAN_PANEL] if FAN_PANEL.metrics <= set(measured) else []
    part, held_out = metrics.PART, metrics.EVAL_PART
    names = [metric.removeprefix(part) for metric in measured if metric.startswith(part)]
    colors = list(zip(names, itertools.cycle(PALETTE), strict=False))
    lines = [(part + name, name, color) for name, color in colors]
    lines += [(held_out + name, "", color) for name, color in colors]
    components = _of("Components, unweighted (dots: held out)", *lines, unit="score")
    parts = [components] if len(names) > 1 else []
    return (*_PPO_PANELS, *(judged or _STEP_SIZE), *fan, *parts)


def panel_for_each(measured: Collection[str]) -> Sequence[Plot]:
    """Return one panel for each metric that is not a time; update/x and eval/x share one."""
    names = dict.fromkeys(
        name.removeprefix("update/").removeprefix("eval/")
        for name in measured
        if not name.startswith(("time/", "compute/"))
    )
    found = []
    for name in names:
        sides = ("update/" + name, "training", BLUE), ("eval/" + name, "validation", ORANGE)
        found.append(_of(name, (name, "", BLUE), *sides, unit=""))
    return found


def curve_plots(curves: Curves, panels: Panels | None, x_label: str) -> list[Plot]:
    """Return a plot of each panel but the fan, then of each other metric with a healthy band.

    What was measured once is not a curve, and is left out.
    """
    shown = [one for one in (panels or panel_for_each)(curves) if one is not FAN_PANEL]
    drawn = {metric for panel in shown for metric in panel.metrics} | set(FAN)
    banded = (name for name in curves if name in METRICS and METRICS[name].band is not None)
    rest = [_of(name, (name, "", BLUE), unit="") for name in banded if name not in drawn]
    plots = [panel.measured(curves, x_label) for panel in (*shown, *rest)]
    return [plot for plot in plots if any(len(series.points) > 1 for series in plot.series)]


_REWARDS = (
    (REWARD, KL, "training", BLUE),
    (HELD_OUT, HELD_OUT_KL, _PROMPTS, ORANGE),
    (GOLD, HELD_OUT_KL, "gold", GREEN),
)
"""Metric, KL of the same policy, name in the legend and colour of the frontiers."""


def frontier_plots(curves: Curves, diminishing: Mapping[str, Any] | None) -> list[Plot]:
    """Return reward against KL and against compute, with the knees of `diminishing.json`.

    The reward of iteration t is that of the policy after t - 1 iterations, an evaluation of step t
    that of the policy after t. Compute is counted in floating-point operations, or in iterations
    where these were not measured.
    """
    if REWARD not in curves:
        return []
    steps, flops = curves.get(metrics.FLOPS, ((), ()))
    has_flops = len(steps) > 0 and steps[:1] == curves[REWARD][0][:1]
    unit = metrics.FLOPS if has_flops else "iterations"
    spent = {0: 0.0, **dict(zip(steps, itertools.accumulate(flops, max), strict=True))}
    by_kl, by_compute = [], []
    for metric, kl, label, color in _REWARDS:
        is_before = metric == REWARD
        found = [(step - is_before, value) for step, value in points(curves, metric)]
        if has_flops:
            found = [(spent.get(int(step), math.nan), value) for step, value in found]
        if found:
            one = Series(label=label, color=color, points=joined(curves, kl, metric), dots=True)
            by_kl.append(replace(one, line=not is_before))
            by_compute.append(replace(one, points=found, dots=not is_before))
    title, x_label = "Reward against compute", "floating-point operations" if has_flops else unit
    knee = _mark(diminishing, GOLD, unit) or _mark(diminishing, REWARD, unit)
    plots = [Plot(title=title, x_label=x_label, unit="score", series=by_compute, mark=knee)]
    if KL in curves:
        title, knee = "Reward against KL", _mark(diminishing, REWARD, KL)
        plots.insert(0, Plot(title=title, x_label=KL_AXIS, unit="score", series=by_kl, mark=knee))
    return plots


def _knee(diminishing: Mapping[str, Any] | None, metric: str, unit: str) -> Mapping[str, Any]:
    """Return the knee of a curve of `diminishing.json`; {} without one."""
    found = () if diminishing is None else diminishing["curves"]
    knees = (one["knee"] for one in found if (one["metric"], one["unit"]) == (metric, unit))
    return next(filter(None, knees), {})


def _mark(diminishing: Mapping[str, Any] | None, metric: str, unit: str) -> Mark | None:
    """Return the point of diminishing returns of a curve; None where it has none in the run."""
    knee = _knee(diminishing, metric, unit)
    if knee.get("at") is None:
        return None
    low, high = knee["at_interval"]
    ends = (knee["at"] if low is None else low, math.inf if high is None else high)
    return knee["at"], ends, f"knee at iteration {knee['iteration']}"


def kl_note(diminishing: Mapping[str, Any]) -> str:
    """Return where the reward stops rising with the KL; "" where that is not known."""
    if not (knee := _knee(diminishing, REWARD, KL)):
        return ""
    low, high = knee["at_interval"]
    if knee["at"] is None:
        below = "" if low is None else f" (one below {low:.2f} nats is unlikely)"
        return f"no knee of reward against KL within this run{below}"
    start, end = ("end" if at is None else f"{at:.2f}" for at in (low, high))
    return f"the knee of reward against KL is at {knee['at']:.2f} [{start}-{end}] nats"


def points(curves: Curves, metric: str) -> list[Point]:
    """Return a metric over the steps."""
    return list(zip(*curves[metric], strict=True)) if metric in curves else []


def joined(curves: Curves, x: str, y: str) -> list[Point]:
    """Return one metric against another one, at the steps that have both."""
    xs = dict(points(curves, x))
    return [(xs[step], value) for step, value in points(curves, y) if step in xs]
