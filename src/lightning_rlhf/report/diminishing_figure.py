"""diminishing.json and diminishing.png of a run of PPO."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter

from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.report.curves import BLUE, GREEN, ORANGE
from lightning_rlhf.report.diminishing import (
    FLOPS,
    ITERATIONS,
    KL,
    Curve,
    Diminishing,
    Frontier,
    measure,
)
from lightning_rlhf.report.figures import DPI, GREY, LEGEND, ROW_IN, STYLE, WIDTH_IN, head
from lightning_rlhf.report.gold_stop import GoldStop

NUMBERS, PICTURE = "diminishing.json", "diminishing.png"
LABELS = {
    ITERATIONS: "iterations of training",
    FLOPS: "floating-point operations",
    KL: "KL to the reference (smoothed), nats a response",
}


def write_diminishing(
    folder: Path, title: str, curves: Mapping[str, Curve], gold_stop: GoldStop | None = None
) -> Diminishing:
    """Write diminishing.json and diminishing.png into `folder`, and return what they show.

    curves: metric -> steps and values, as in metrics.csv.
    gold_stop: stop by the evaluations of the same prompts; None where there is none.
    """
    found = measure(curves, gold_stop)
    with written_whole(folder / NUMBERS) as beside:
        text = json.dumps(found.as_json(), indent=1, allow_nan=False)
        beside.write_text(text + "\n", encoding="utf-8")
    with written_whole(folder / PICTURE) as beside:
        draw(found, title).savefig(beside, dpi=DPI, format="png")
    return found


def draw(found: Diminishing, title: str) -> Figure:
    """Return the figure: reward, and gold where there is one, against compute and against KL."""
    import matplotlib as mpl

    panels = [
        ("Reward against compute", found.reward, BLUE),
        ("Gold score against compute", found.gold, ORANGE),
        ("Reward against KL", found.by_kl, GREEN),
    ]
    shown = [(name, curve, color) for name, curve, color in panels if curve is not None]
    with mpl.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(wspace=0.05)
        figure = Figure(figsize=(WIDTH_IN, ROW_IN + 0.9), layout=layout)
        head(figure, f"{title}. {found.sentence[:1].upper()}{found.sentence[1:]}")
        for axes, (name, curve, color) in zip(
            np.atleast_1d(figure.subplots(1, len(shown))), shown, strict=True
        ):
            axes.set_title(name, loc="left", pad=34, fontsize=11)
            _draw_frontier(axes, curve, color)
            if found.gold_stop is not None and curve is found.gold:
                _mark_stop(axes, curve, found.gold_stop.step)
            axes.legend(ncols=3, handlelength=1.4, fontsize=8, **LEGEND).set_in_layout(False)
    return figure


def _draw_frontier(axes: Axes, curve: Frontier, color: str) -> None:
    axes.set_xlabel(LABELS[curve.unit], fontsize=9)
    if curve.unit == FLOPS:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel("score")
    axes.plot(curve.x, curve.y, "o", color=color, markersize=3, alpha=0.45, label="measured")
    if curve.fit is None:
        axes.text(
            0.5, 0.04, "no gain beyond the noise, or too few points", transform=axes.transAxes,
            ha="center", color=GREY,
        )  # fmt: skip
    else:
        shares = np.linspace(0.0, 1.0, 400)
        x = curve.x[0] + shares * (curve.x[-1] - curve.x[0])
        axes.plot(x, curve.fit.value(shares), color=color, linewidth=1.8, label="fit")
        is_peak = curve.peak is not None
        place = curve.fit.peak if is_peak else curve.fit.knee
        low, high = (curve.x[0] + min(end, 1.0) * (x[-1] - x[0]) for end in place.interval)
        axes.axvspan(low, high, color=GREY, alpha=0.15, linewidth=0, label="90% interval")
        if (at := curve.at(place.at)) is not None:
            name = "maximum" if is_peak else "knee"
            words = EngFormatter(sep="", places=0)(at) if curve.unit == FLOPS else f"{at:.3g}"
            axes.axvline(at, color=GREY, linewidth=1, linestyle="--", label=f"{name}: {words}")


def _mark_stop(axes: Axes, curve: Frontier, step: int) -> None:
    """Circle the evaluation at which to stop."""
    at = curve.after == step
    label = f"stop: iteration {step}"
    axes.plot(
        curve.x[at], curve.y[at], "o", color=GREY, markersize=9, fillstyle="none", label=label
    )
