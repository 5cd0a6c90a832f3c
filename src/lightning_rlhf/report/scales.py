"""Positions of values on the axis of a plot, round ticks, and lines with fewer points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]

MOST_POINTS = 400
"""Number of points above which a line is thinned out; the extremes of each part stay."""
MOST_TICKS = 7
PREFIXED = 1e5
"""Number from which on ticks have an SI prefix: 1.5T for 1.5e12."""


@dataclass(frozen=True)
class Scale:
    """Map from values to positions."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False
    is_whole: bool = False
    """True if only whole numbers are ticks."""

    def __call__(self, value: float) -> float:
        low, high, value = map(self._scaled, (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.is_log else value

    def ticks(self) -> list[float]:
        """Return round values between the ends."""
        from matplotlib.ticker import LogLocator, MaxNLocator

        whole = MaxNLocator(nbins=5, integer=self.is_whole)
        locator = LogLocator(subs=(1, 2, 5)) if self.is_log else whole
        slack = 1e-9 * (self.high - self.low)
        found = locator.tick_values(self.low, self.high)
        inside = [float(x) for x in found if self.low - slack <= x <= self.high + slack]
        return inside[:: -(-len(inside) // MOST_TICKS)] if inside else [self.low]


def finite(points: Sequence[Point], is_log: bool) -> list[Point]:
    """Return the points that can be drawn; positive ones on a logarithmic axis."""
    return [
        (x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and (y > 0 or not is_log)
    ]


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most MOST_POINTS points: the lowest and the highest of each part of a line."""
    if len(points) <= MOST_POINTS:
        return list(points)
    parts = MOST_POINTS // 2
    kept = []
    for k in range(parts):
        part = points[k * len(points) // parts : (k + 1) * len(points) // parts]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def tick_text(tick: float) -> str:
    """Return the text of a tick."""
    from matplotlib.ticker import EngFormatter

    return f"{tick:g}" if abs(tick) < PREFIXED else EngFormatter(sep="")(tick)


def place_text(x: float) -> str:
    """Return a place on the x-axis as text: a step as it is, else three digits."""
    return tick_text(x if float(x).is_integer() and abs(x) < PREFIXED else float(f"{x:.3g}"))
