"""Plots as SVG inside a page: small, in the page's colours, light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from lightning_rlhf.io.console import visible_line
from lightning_rlhf.report.curves import PALETTE

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


WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 10, 36
"""Margins of the plotted area, in the units of WIDTH and HEIGHT."""
LETTER = 7.2
"""Width of a digit, in the units of WIDTH."""
HALF_MARGIN = 0.5
"""Half the range of an axis on which all values are equal."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one kind, drawn as a line, as dots or as both."""

    label: str
    """Name in the legend; empty to leave the series out of it."""
    color: str
    """A colour of PALETTE."""
    points: Sequence[Point]
    line: bool = True
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Area:
    """Area between two curves over the same x."""

    label: str
    color: str
    opacity: float
    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Vertical line at a place on the x-axis, with its interval."""

    x: float
    interval: tuple[float, float] | None
    label: str


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot with its axes."""

    title: str
    x_label: str
    unit: str
    """Unit of the y-axis."""
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


def draw(plot: Plot) -> Markup:
    """Return the plot as a `<figure>`; its texts are escaped."""
    kept = [(s, finite(s.points, plot.is_log)) for s in plot.series]
    xs = [x for _, points in kept for x, _ in points] + [x for a in plot.areas for x in a.x]
    ys = [y for _, points in kept for _, y in points]
    ys += [y for a in plot.areas for y in (*a.low, *a.high) if math.isfinite(y)]
    if not xs or not ys:
        return Markup(_figure(plot, '<p class="absent">not measured</p>'))
    if plot.reference is not None:
        ys.append(plot.reference[0])
    is_whole = all(float(a).is_integer() for a in xs)
    x = Scale(*_ends(xs), LEFT, WIDTH - RIGHT, is_whole=is_whole)
    low, high = _seen(ys, plot)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP, is_log=plot.is_log)
    parts = [*_axes(x, y, plot), *_healthy(y, plot)]
    for area in plot.areas:
        parts.append(_area(area, x, y))
    if plot.mark is not None:
        parts += _mark(plot.mark, x)
    if plot.reference is not None:
        at = y(plot.reference[0])
        parts.append(f'<path class="reference" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
    for series, points in kept:
        parts += _series(series, points, x, y)
    label = f"{plot.title}: {plot.unit} over {plot.x_label}"
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(label)}">'
        f"{''.join(parts)}</svg>"
    )
    return Markup(_figure(plot, svg))


def text(words: str) -> str:
    """Return foreign text for HTML: hidden characters shown, markup escaped."""
    return escape(visible_line(words))


def color_class(color: str) -> str:
    """Return the class of the style sheet for a colour of PALETTE."""
    return f"c{PALETTE.index(color)}"


def _ends(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - HALF_MARGIN, low + HALF_MARGIN)


def _seen(ys: Sequence[float], plot: Plot) -> tuple[float, float]:
    """Return the limits of the y-axis, without values that are far outside of the others."""
    from lightning_rlhf.report.figures import MARGIN, view

    if plot.limits is not None:
        return plot.limits
    found = None if plot.areas else view(ys, is_log=plot.is_log)
    if found is not None:
        return found
    low, high = min(ys), max(ys)
    if plot.is_log:
        return (low, high) if high > low else (low / 2, high * 2)
    margin = MARGIN * (high - low) or HALF_MARGIN * max(abs(high), 1e-3)
    return low - margin, high + margin


def _axes(x: Scale, y: Scale, plot: Plot) -> Iterator[str]:
    for tick in y.ticks():
        at = y(tick)
        yield f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
        yield (f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick_text(tick)}</text>')
    for tick in x.ticks():
        words = tick_text(tick)
        at = min(x(tick), WIDTH - LETTER / 2 * len(words))
        yield (f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{words}</text>')
    yield f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'
    yield (
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">'
        f"{text(plot.x_label)}</text>"
    )


def _healthy(y: Scale, plot: Plot) -> Iterator[str]:
    """Yield the healthy band, as far as the axis shows it."""
    if plot.healthy is None:
        return
    low, high = plot.healthy
    bottom = max(y.low, y.low if low is None else low)
    top = min(y.high, y.high if high is None else high)
    if top > bottom:
        yield (
            f'<rect class="healthy" x="{LEFT}" y="{y(top):.1f}" width="{WIDTH - RIGHT - LEFT}" '
            f'height="{y(bottom) - y(top):.1f}"/>'
        )


def _area(area: Area, x: Scale, y: Scale) -> str:
    rows = [
        row for row in zip(area.x, area.low, area.high, strict=True) if all(map(math.isfinite, row))
    ]
    rows = rows[:: max(1, -(-len(rows) // MOST_POINTS))]
    there = [(a, high) for a, _, high in rows]
    back = [(a, low) for a, low, _ in reversed(rows)]
    return (
        f'<path class="area {color_class(area.color)}" opacity="{area.opacity:g}" '
        f'd="{_path([*there, *back], x, y)}Z"/>'
    )


def _mark(mark: Mark, x: Scale) -> Iterator[str]:
    if not x.low <= mark.x <= x.high:
        return
    if mark.interval is not None:
        low, high = (x(min(max(end, x.low), x.high)) for end in mark.interval)
        yield (
            f'<rect class="mark" x="{low:.1f}" y="{TOP}" width="{high - low:.1f}" '
            f'height="{HEIGHT - BOTTOM - TOP}"/>'
        )
    yield (
        f'<path class="mark" d="M{x(mark.x):.1f} {TOP}V{HEIGHT - BOTTOM}">'
        f"<title>{text(mark.label)}</title></path>"
    )


def _series(series: Series, points: Sequence[Point], x: Scale, y: Scale) -> Iterator[str]:
    if not points:
        return
    color = color_class(series.color)
    label = text(series.label)
    if series.line and len(points) > 1:
        yield (
            f'<path class="line {color}" d="{_path(thinned(points), x, y)}"><title>{label}: '
            f"{points[-1][1]:.4g} at {place_text(points[-1][0])}</title></path>"
        )
    if series.dots or len(points) == 1:
        for a, b in points[:: max(1, -(-len(points) // MOST_POINTS))]:
            at = min(max(b, y.low), y.high)
            yield (
                f'<circle class="{color}" cx="{x(a):.1f}" cy="{y(at):.1f}" r="3"><title>{label}: '
                f"{b:.4g} at {place_text(a)}</title></circle>"
            )


def _path(points: Sequence[Point], x: Scale, y: Scale) -> str:
    """Return the points as the steps of a path; those beyond the axis lie on its edge."""
    return "M" + "L".join(f"{x(a):.1f} {y(min(max(b, y.low), y.high)):.1f}" for a, b in points)


def _figure(plot: Plot, body: str) -> str:
    keys = [(s.label, color_class(s.color)) for s in plot.series if s.label and s.points]
    keys += [(area.label, f"{color_class(area.color)} soft") for area in plot.areas if area.label]
    legend = "".join(f'<span class="key {color}">{text(label)}</span>' for label, color in keys)
    if plot.healthy is not None:
        legend += '<span class="key band">healthy</span>'
    if plot.reference is not None:
        legend += f'<span class="key level">{text(plot.reference[1])}</span>'
    if plot.mark is not None:
        legend += f'<span class="key knee">{text(plot.mark.label)}</span>'
    unit = f" <small>{text(plot.unit)}</small>" if plot.unit else ""
    meaning = f'<p class="meaning">healthy: {text(plot.meaning)}</p>' if plot.meaning else ""
    return (
        f"<figure><figcaption>{text(plot.title)}{unit}</figcaption>"
        f'<div class="legend">{legend}</div>{body}{meaning}</figure>'
    )
