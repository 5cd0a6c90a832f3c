"""Plots of a run's metrics: curves.png, drawn from metrics.csv."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator
from numpy import ndarray

from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.report.curves import Axis, Panel, panel_for_each
from lightning_rlhf.report.estimates import Interval, inner_range

MARGIN = 0.05
"""Margin on either side of the displayed range, as a share of that range."""
MARKERS = (("<", ">"), ("v", "^"))
"""Markers of values below and above the limits of the x-axis, and of the y-axis."""
MOST_MARKS = 50
"""Maximum number of markers of one kind on one side; the farthest values are drawn."""


def view(values: Sequence[float], *, is_log: bool = False) -> Interval | None:
    """Return limits that leave out values far outside; None if no value is far outside.

    is_log: whether the axis is logarithmic and shows only positive values.
    """
    found = np.asarray(values, dtype=float)
    scaled = np.log10(found[found > 0]) if is_log else found
    inner = inner_range(scaled)
    if inner is None:
        return None
    low, high = inner
    margin = MARGIN * (high - low)
    ends = low - margin, high + margin
    return (float(10 ** ends[0]), float(10 ** ends[1])) if is_log else ends


def mark_outside(
    axes: Axes,
    points: Float[ndarray, "N 2"],
    x: Interval | None,
    y: Interval | None,
    color: str,
) -> None:
    """Draw a triangle at the edge for each point outside the limits, and label the farthest value.

    points: columns x and y; infinite values are outside, NaN is not drawn.
    x, y: limits of the axes; None if no value is outside.
    """
    ends = [(-np.inf, np.inf) if limits is None else limits for limits in (x, y)]
    at = np.clip(points, [low for low, _ in ends], [high for _, high in ends])
    for column, markers in enumerate(MARKERS):
        for side, marker in zip((-1, 1), markers, strict=True):
            beyond = np.flatnonzero(side * points[:, column] > side * at[:, column])
            if not len(beyond):
                continue
            farthest = beyond[np.argsort(-side * points[beyond, column], kind="stable")]
            axes.plot(
                *at[farthest[:MOST_MARKS]].T, marker, color=color, markersize=6, clip_on=False,
                zorder=4,
            )  # fmt: skip
            _write(axes, points[farthest[0], column], at[farthest[0]].tolist(), marker, color)


def _write(axes: Axes, value: float, at: Sequence[float], marker: str, color: str) -> None:
    """Write a value beside its triangle, on the side where the axes have room."""
    middle = sum(axes.get_xlim()) / 2
    is_left = marker == ">" or (marker != "<" and at[0] > middle)
    axes.annotate(
        f"{value:.4g}", (at[0], at[1]), xytext=(-6 if is_left else 6, 0),
        textcoords="offset points", ha="right" if is_left else "left", va="center", fontsize=8,
        color=color, bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5},
    )  # fmt: skip


WIDTH_IN, ROW_IN, DPI = 12.8, 3.4, 150
LETTERS_AN_INCH = 10
"""Number of bold, wide characters of a heading that fit in an inch."""
GREY = "#777777"
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "font.size": 10,
}

LEGEND = {
    "loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "frameon": False, "borderaxespad": 0.2,
    "columnspacing": 1.2,
}  # fmt: skip
"""Placement of a legend above the plot, where it hides no curve."""

Curve = tuple[list[int], list[float]]


def draw_curves(
    run_dir: Path,
    title: str,
    x_label: str,
    panels: Callable[[Collection[str]], Sequence[Panel]] | None = None,
) -> Path:
    """Draw `<run_dir>/curves.png` from `<run_dir>/metrics.csv` and return its path.

    panels: names of the measured metrics -> panels to draw; None draws one for each metric.
    """
    import matplotlib as mpl

    curves = read_curves(run_dir / "metrics.csv")
    shown = (panels or panel_for_each)(curves)
    columns = 2 if len(shown) == 4 else 3
    rows = -(-len(shown) // columns)
    with mpl.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(wspace=0.05, hspace=0.06)
        figure = Figure(figsize=(WIDTH_IN, ROW_IN * rows + 0.4), layout=layout)
        head(figure, title)
        grid = figure.add_gridspec(rows, columns)
        for k, panel in enumerate(shown, start=1):
            row, column = divmod(k - 1, columns)
            # The last panel fills the rest of its row.
            wide = slice(column, None if k == len(shown) else column + 1)
            axes = figure.add_subplot(grid[row, wide])
            _draw_panel(axes, panel, curves)
            axes.set_xlabel(x_label)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        path = run_dir / "curves.png"
        with written_whole(path) as beside:
            figure.savefig(beside, dpi=DPI, format="png")
    return path


def head(figure: Figure, title: str) -> None:
    """Write `title` above a figure, wrapped to its width and not interpreted as math."""
    lines = textwrap.wrap(title, int(LETTERS_AN_INCH * figure.get_figwidth())) or [title]
    figure.suptitle(
        "\n".join(lines), x=0.01, ha="left", weight="bold", fontsize=11, parse_math=False
    )


def read_curves(path: Path) -> dict[str, Curve]:
    """Return metric -> (steps, values), without the steps at which the metric was not measured."""
    curves: dict[str, Curve] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step"))
            for name, cell in row.items():
                if cell:
                    steps, values = curves.setdefault(name, ([], []))
                    steps.append(step)
                    values.append(float(cell))
    return curves


def _draw_panel(axes: Axes, panel: Panel, curves: Mapping[str, Curve]) -> None:
    axes.set_title(panel.title, loc="left", pad=24, fontsize=11)
    handles = draw_axis(axes, panel.left, curves)
    if panel.right is not None:
        twin = axes.twinx()
        twin.grid(visible=False)
        twin.spines["right"].set_visible(True)
        handles += draw_axis(twin, panel.right, curves)
    if panel.reference is not None:
        level, name = panel.reference
        handles.append(axes.axhline(level, color=GREY, linewidth=1, linestyle="--", label=name))
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, level), max(high, level))
    if not any(metric in curves for metric in panel.metrics):
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=GREY)
    axes.legend(handles=handles, ncols=len(handles), handlelength=1.6, **LEGEND)


def draw_axis(axes: Axes, axis: Axis, curves: Mapping[str, Curve]) -> list[Artist]:
    """Draw the bands and lines of an axis that were measured; return those for the legend."""
    axes.set_ylabel(axis.unit)
    if axis.scale == "log":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter("")
    axes.yaxis.set_major_formatter("{x:g}")
    if axis.limits is not None:
        axes.set_ylim(*axis.limits)
    handles: list[Artist] = []
    for band in axis.bands:
        if band.low in curves and band.high in curves:
            (steps, low), (_, high) = curves[band.low], curves[band.high]
            handles.append(
                axes.fill_between(
                    steps, low, high, color=band.color, alpha=band.opacity, linewidth=0,
                    label=band.label,
                )
            )  # fmt: skip
    for line in axis.lines:
        if line.metric in curves:
            steps, values = curves[line.metric]
            # A line of a single point is invisible without a marker.
            marker = "o" if line.sparse or len(steps) == 1 else None
            drawn = axes.plot(
                steps, values, color=line.color, label=line.label, marker=marker, markersize=4,
                linewidth=1.8 if line.sparse else 1.3, zorder=3 if line.sparse else 2,
            )  # fmt: skip
            handles += drawn if line.label else []
    if axis.limits is None and not axis.bands:
        _keep_in_view(axes)
    return handles


def _keep_in_view(axes: Axes) -> None:
    """Fit the y-axis to all values except those far outside, which are marked at its edge."""
    lines = list(axes.lines)
    limits = view(
        [y for line in lines for y in np.asarray(line.get_ydata())],
        is_log=axes.get_yscale() == "log",
    )
    if limits is None:
        return
    axes.set_ylim(*limits)
    for line in lines:
        points = np.asarray(line.get_xydata(), dtype=float)
        mark_outside(axes, points, None, limits, str(line.get_color()))
