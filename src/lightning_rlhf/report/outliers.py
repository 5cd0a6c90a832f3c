"""Axis limits that leave out values far outside, and markers at the edge for those values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from numpy import ndarray

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
