"""Plots drawn by matplotlib: as pictures, and as SVG inside a page, in its colours."""

import io
import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from markupsafe import Markup, escape
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, PercentFormatter
from numpy import ndarray

from lightning_rlhf.io import console, storage
from lightning_rlhf.report import curves, estimates
from lightning_rlhf.report.fitness import Fitness

Limits = estimates.Interval | None
"""Ends of an axis; None if no value is outside of them."""

MARGIN = 0.05
"""Margin on either side of the displayed range, as a share of that range."""
MOST_MARKS = 50
"""Maximum number of triangles on one side; the farthest values have one."""
MOST_POINTS = 400
"""Number of dots, and of places of an area, above which some are left out."""
PREFIXED = 1e5
"""Number from which on ticks have an SI prefix: 1.5T for 1.5e12."""
LETTERS_AN_INCH = 10
"""Number of bold, wide characters of a heading that fit in an inch."""
WIDTH_IN, ROW_IN, DPI = 12.8, 3.4, 150
WIDTH, HEIGHT = 420, 230
"""Size of a plot of a page, in points, which become CSS pixels or less."""
PLACE = (54 / WIDTH, 36 / HEIGHT, 1 - 68 / WIDTH, 1 - 46 / HEIGHT)
"""Left, bottom, width and height of the plotted area, as shares."""
GREY, GRID, HEALTHY, BAD = "#777777", "#e6e6e6", "#11803f", "#c3262f"
COLORS = {color.lower(): f"var(--c{place})" for place, color in enumerate(curves.PALETTE)}
COLORS |= {GREY: "var(--soft)", GRID: "var(--line)", HEALTHY: "var(--good)", BAD: "var(--bad)"}
COLORS |= {"#ffffff": "var(--page)"}
"""Colour of a plot -> the one of the page that a browser draws it in, light or dark."""
STYLE: dict[str, Any] = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
STYLE |= {"grid.color": GRID, "font.size": 10}
SOFT = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
TICKS = [f"{axis}tick.{kind}.size" for axis in "xy" for kind in ("major", "minor")]
PAGE = STYLE | dict.fromkeys(SOFT, GREY) | dict.fromkeys(TICKS, 0)
PAGE |= {"font.size": 11, "svg.fonttype": "none", "path.simplify_threshold": 0.5}
LEGEND: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "frameon": False}
LEGEND |= {"borderaxespad": 0.2, "columnspacing": 1.2}
"""Placement of a legend above the plot, where it hides no curve."""
KINDS = {"SFT samples": curves.BLUE, "rejected": curves.PURPLE, "chosen": curves.GREEN}
"""Kinds of scored responses and their colours."""


def view(values: Sequence[float], *, is_log: bool = False) -> Limits:
    """Return limits that leave out values far outside; None if no value is far outside.

    is_log: whether the axis is logarithmic and shows only positive values.
    """
    found = np.asarray(values, dtype=float)
    inner = estimates.inner_range(np.log10(found[found > 0]) if is_log else found)
    if inner is None:
        return None
    low, high = inner
    margin = MARGIN * (high - low)
    ends = low - margin, high + margin
    return (float(10 ** ends[0]), float(10 ** ends[1])) if is_log else ends


def mark_outside(
    axes: Axes, points: Float[ndarray, "N 2"], x: Limits, y: Limits, color: str
) -> None:
    """Draw triangles at the edge for points outside the limits, and label the farthest value.

    points: columns x and y; infinite values are outside, NaN is not drawn.
    x, y: limits of the axes; None if no value is outside.
    """
    ends = [(-np.inf, np.inf) if limits is None else limits for limits in (x, y)]
    at = np.clip(points, *np.transpose(ends))
    box = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5}
    style: dict[str, Any] = {"va": "center", "fontsize": 8, "color": color, "bbox": box}
    for marker, column, side in (("<", 0, -1), (">", 0, 1), ("v", 1, -1), ("^", 1, 1)):
        beyond = np.flatnonzero(side * points[:, column] > side * at[:, column])
        if not len(beyond):
            continue
        beyond = beyond[np.argsort(-side * points[beyond, column], kind="stable")][:MOST_MARKS]
        axes.plot(*at[beyond].T, marker, color=color, markersize=6, clip_on=False, zorder=4)
        place, label = at[beyond[0]].tolist(), f"{points[beyond[0], column]:.4g}"
        # The label is on the side of the triangle where the axes have room.
        is_left = marker == ">" or (marker != "<" and place[0] > sum(axes.get_xlim()) / 2)
        style["ha"], style["xytext"] = ("right", (-6, 0)) if is_left else ("left", (6, 0))
        axes.annotate(label, place, textcoords="offset points", **style)


def draw_plots(path: Path, title: str, plots: Sequence[curves.Plot]) -> None:
    """Draw plots below a title into a PNG file, in rows of three, or of two where there are four.

    The last one fills the rest of its row.
    """
    columns = 2 if len(plots) == 4 else 3
    rows = -(-len(plots) // columns)
    with mpl.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(wspace=0.05, hspace=0.06)
        figure = Figure(figsize=(WIDTH_IN, ROW_IN * rows + 0.4), layout=layout)
        head(figure, title)
        grid = figure.add_gridspec(rows, columns)
        for k, plot in enumerate(plots, start=1):
            row, column = divmod(k - 1, columns)
            wide = slice(column, None if k == len(plots) else column + 1)
            axes = figure.add_subplot(grid[row, wide])
            if plot.title:
                axes.set_title(plot.title, loc="left", pad=24, fontsize=11)
            axes.set_ylabel(plot.unit or "")
            handles = draw(axes, plot)
            if not plot.series:
                at = axes.transAxes
                axes.text(0.5, 0.5, "not measured", transform=at, ha="center", color=GREY)
            axes.legend(handles=handles, ncols=max(1, len(handles)), handlelength=1.6, **LEGEND)
        with storage.written_whole(path) as temporary:
            figure.savefig(temporary, dpi=DPI, format="png")


def head(figure: Figure, title: str) -> None:
    """Write `title` above a figure, wrapped to its width and not interpreted as math."""
    text = textwrap.fill(title, int(LETTERS_AN_INCH * figure.get_figwidth())) or title
    figure.suptitle(text, x=0.01, ha="left", weight="bold", fontsize=11, parse_math=False)


def tick_text(tick: float) -> str:
    """Return the text of a tick."""
    return f"{tick:g}" if abs(tick) < PREFIXED else EngFormatter(sep="")(tick)


def known(plot: curves.Plot, series: curves.Series) -> list[curves.Point]:
    """Return the points that can be drawn: finite, and positive on a logarithmic axis."""
    lowest = 0 if plot.is_log else -math.inf
    return [(x, y) for x, y in series.points if math.isfinite(x) and lowest < y < math.inf]


def dots(plot: curves.Plot, series: curves.Series) -> list[curves.Point]:
    """Return the points of a series that have a dot; [] for a mere line."""
    found, (low, high) = known(plot, series), shown_range(plot) or (-math.inf, math.inf)
    if not series.dots and len(found) != 1:
        return []
    found = [(x, y) for x, y in found if low <= y <= high]
    return found[:: max(1, -(-len(found) // MOST_POINTS))]


def shown_range(plot: curves.Plot) -> Limits:
    """Return the limits of the y-axis, where values far outside leave them; None without such."""
    if plot.areas or plot.limits is not None:
        return None
    return view([y for series in plot.series for _, y in series.points], is_log=plot.is_log)


def draw(axes: Axes, plot: curves.Plot) -> list[Artist]:
    """Draw a plot; return the artists of its legend."""
    axes.set_xlabel(console.visible_line(plot.x_label), parse_math=False)
    xs = [x for series in plot.series for x, _ in series.points]
    xs += [x for area in plot.areas for x in area.x]
    is_whole = all(float(x).is_integer() for x in xs)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=is_whole))
    if plot.is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter("")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda tick, _: tick_text(tick))
    handles: list[Artist] = []
    for area in plot.areas:
        x, low, high = (y[:: 1 + len(y) // MOST_POINTS] for y in (area.x, area.low, area.high))
        drawn = axes.fill_between(x, low, high, color=area.color, alpha=area.opacity, linewidth=0)
        drawn.set_label(area.label)
        handles += [drawn] if area.label else []
    for number, series in enumerate(plot.series):
        found, dotted, color = known(plot, series), dots(plot, series), series.color
        if series.line and len(found) > 1:
            axes.plot(*zip(*found, strict=True), color=color, gid=f"line {number}")
        if dotted:
            marks = zip(*dotted, strict=True)
            axes.plot(*marks, "o", color=color, ms=6, mew=0, zorder=3, gid=f"dots {number}")
        kind = "o" * bool(dotted) + "-" * series.line or "o"
        legend = axes.plot([], [], kind, color=color, markersize=5, label=series.label)
        handles += legend if series.label else []
    limits = plot.limits or shown_range(plot)
    if limits is not None:
        axes.set_ylim(*limits)
    for series in () if plot.limits is not None or limits is None else plot.series:
        at = np.array(series.points, dtype=float).reshape(-1, 2)
        mark_outside(axes, at, None, limits, series.color)
    if plot.reference is not None:
        level, name = plot.reference
        handles.append(axes.axhline(level, color=GREY, linewidth=1, linestyle="--", label=name))
        bottom, top = axes.get_ylim()
        axes.set_ylim(min(bottom, level), max(top, level))
    across, up = axes.get_xlim(), axes.get_ylim()
    if plot.healthy is not None:
        pairs = zip(plot.healthy, up, strict=True)
        band = np.clip([edge if end is None else end for end, edge in pairs], *up)
        axes.axhspan(*band, color=HEALTHY, alpha=0.13, linewidth=0, zorder=0)
    if plot.mark is not None:
        knee, interval, name = plot.mark
        if interval[0] <= across[1]:
            span = np.clip(interval, *across)
            handles.append(axes.axvspan(*span, color=BAD, alpha=0.12, linewidth=0, label=name))
        if across[0] <= knee <= across[1]:
            axes.axvline(knee, color=BAD, linewidth=1.6)
    axes.set_xlim(*across)
    axes.set_ylim(*up)
    return handles


def svg(plot: curves.Plot) -> str:
    """Return a plot as an <svg> in the page's fonts and colours, light or dark; texts are escaped.

    The same plot gives the same text, and other plots have other ids. A browser shows the numbers
    under the pointer.
    """
    with mpl.rc_context({**PAGE, "svg.hashsalt": repr(plot)}):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), frameon=False)
        axes = figure.add_axes(PLACE)
        axes.patch.set_visible(False)
        draw(axes, plot)
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing)
    found = file.getvalue()
    found = found[found.index("<g ") : found.rindex("</svg>")]
    for number, series in enumerate(plot.series):
        last = "".join(_tip(series, *point) for point in known(plot, series)[-1:])
        found = found.replace(f'<g id="line {number}">', f"<g>{last}", 1)
        before, dot, group = found.partition(f'<g id="dots {number}">')
        tips = [_tip(series, *point) for point in dots(plot, series)]
        first, *uses = re.split("(?=<use )", group, maxsplit=len(tips))
        marks = (use.replace("/>", f">{tip}</use>", 1) for use, tip in zip(uses, tips, strict=True))
        found = f"{before}{dot}{first}{''.join(marks)}"
    found = re.sub(r'<g id="[^"]*"/>| transform="rotate\(-0 [^"]*"', "", found)
    found = re.sub(r'<g id="[^"]*">', "<g>", found).replace("xlink:href", "href")
    found = re.sub(r"font-family:[^;\"]*;? ?", "", found)
    found = re.sub(r"#[0-9a-f]{6}\b", lambda color: COLORS.get(color[0], color[0]), found)
    parts = re.split(r'( (?:d|x|y|transform)="[^"]*")', found)
    for place in range(1, len(parts), 2):
        parts[place] = re.sub(r"\d+\.\d+", lambda x: f"{float(x[0]):.1f}", parts[place])
    found = "".join(parts)
    found = re.sub(r"\s*\n\s*", " ", found).replace("> <", "><")
    label = _text(f"{plot.title}: {plot.unit} over {plot.x_label}")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{found}</svg>'


def _tip(series: curves.Series, x: float, y: float) -> str:
    """Return what a browser shows of a point under the pointer."""
    place = tick_text(x if float(x).is_integer() and abs(x) < PREFIXED else float(f"{x:.3g}"))
    return f"<title>{_text(series.label)}: {y:.4g} at {place}</title>"


def _text(words: str) -> Markup:
    """Return foreign text for HTML: hidden characters shown, markup escaped."""
    return escape(console.visible_line(words))


def figure_of(plot: curves.Plot) -> Markup:
    """Return the plot as a `<figure>` with its caption, legend and healthy range."""
    place = curves.PALETTE.index
    keys = [(f"c{place(one.color)}", one.label) for one in plot.series if one.points]
    keys += [(f"c{place(area.color)} soft", area.label) for area in plot.areas]
    keys += [("band", "healthy" if plot.healthy else "")]
    keys += [("level", plot.reference[1] if plot.reference else "")]
    keys += [("knee", plot.mark[2] if plot.mark else "")]
    legend = "".join(f'<span class="key {kind}">{_text(one)}</span>' for kind, one in keys if one)
    is_measured = plot.areas or any(known(plot, one) for one in plot.series)
    unit = f" <small>{_text(plot.unit)}</small>" if plot.unit else ""
    meaning = f'<p class="meaning">healthy: {_text(plot.meaning)}</p>' if plot.meaning else ""
    return Markup(
        f"<figure><figcaption>{_text(plot.title)}{unit}</figcaption>"
        f'<div class="legend">{legend}</div>'
        f"{svg(plot) if is_measured else '<p class=absent>not measured</p>'}{meaning}</figure>"
    )


def draw_fitness(path: Path, title: str, fitness: Fitness) -> None:
    """Draw the histograms of scores below a title, with the extremes that lie outside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({**STYLE, "axes.axisbelow": True}):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        axes = figure.subplots()
        low, high = fitness.edges[0], fitness.edges[-1]
        margin = MARGIN * (high - low)
        limits = low - margin, high + margin
        kinds = [(kind, KINDS[kind], found) for kind, found in reversed(fitness.kinds.items())]
        for kind, color, found in kinds:
            count = found["count"]
            shares, label = np.divide(found["histogram"], count), f"{kind} ({count:,})"
            axes.stairs(shares, fitness.edges, color=color, fill=True, alpha=0.15)
            axes.stairs(shares, fitness.edges, color=color, linewidth=1.6, label=label)
        axes.set_xlim(*limits)
        for row, (_, color, found) in enumerate(kinds, start=1):
            height = 0.06 * row * axes.get_ylim()[1]
            extremes = np.array([(found["lowest"], height), (found["highest"], height)])
            mark_outside(axes, extremes, limits, None, color)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set(xlabel="score", ylabel="share of responses")
        axes.set_ylim(bottom=0)
        axes.legend(handlelength=1.4, ncols=3, **LEGEND)
        head(figure, title)
        figure.savefig(path, dpi=DPI)
