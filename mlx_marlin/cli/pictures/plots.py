"""Charts, drawn with matplotlib."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlx_marlin.cli.pictures.charts import Chart, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = (
    "#0077BB",
    "#EE7733",
    "#009988",
    "#CC3311",
    "#AA3377",
    "#997700",
    "#33BBEE",
    "#555555",
)
"""Colours of series, repeated in order: Paul Tol's vibrant scheme and others,
distinguishable with colour blindness."""
MARKERS = "osD^vPXh"
"""Shapes of markers: other series of a colour have another."""
ROOFS = ("black", "#777777")
"""Colours of roofs."""
DENSE = 32
"""Points of a series from which its markers are small."""

WIDTH, HEIGHT, AREA, LINE = 8.0, 4.5, 1.5, 0.2
"""Inches of a chart, the height of one with an area, and of a line of a legend."""


def figure(charts: Sequence[Chart]) -> "Figure":
    """Draws charts, at least one, one below the other."""
    from matplotlib.figure import Figure

    heights = [_height(chart) for chart in charts]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    places = figure.subplots(len(charts), squeeze=False, height_ratios=heights)[:, 0]
    for axes, chart in zip(places, charts, strict=True):
        _draw(axes, chart)
    return figure


def _height(chart: Chart) -> float:
    return HEIGHT + LINE * len(chart.series) if _has_legend(chart) else AREA


def _has_legend(chart: Chart) -> bool:
    """Returns whether names are listed; an area's is the title."""
    return any(series.style != "area" for series in chart.series)


def _draw(axes: "Axes", chart: Chart) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_title(chart.title, size=10, loc="left")
    axes.set(xlabel=chart.x, ylabel=chart.y)
    axes.grid(color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    for series in chart.series:
        _draw_series(axes, series)
    if chart.log_base is not None:
        axes.set_xscale("log", base=chart.log_base)
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis)[chart.log_base == 2 :]:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axes.set_xlim(0, chart.ends[0] if chart.ends else None)
        axes.set_ylim(0, chart.ends[1] if chart.ends else None)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:.10g}")  # exponents need mathematical text
        axis.set_minor_formatter("")
    if _has_legend(chart):
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), fontsize=8)


def _draw_series(axes: "Axes", series: Series) -> None:
    xs, ys, _ = zip(*series.marks, strict=True)
    color = COLORS[series.color % len(COLORS)]
    if series.style == "area":
        axes.fill_between(xs, ys, step="post", color=color, alpha=0.8, lw=0)
        return
    shape = series.color + series.color // len(COLORS)
    marker: dict[str, Any] = {
        "marker": MARKERS[shape % len(MARKERS)],
        "ms": 5.5 if len(xs) < DENSE else 3,
        "mfc": color if series.is_measured else "white",
        "color": color,
        "clip_on": False,
        "zorder": 3,
    }
    styles: dict[str, dict[str, Any]] = {
        "roof": {"color": ROOFS[series.color % len(ROOFS)]},
        "points": {**marker, "ls": "none"},
        "line": {**marker, "ls": "-" if series.is_measured else "--"},
    }
    axes.plot(xs, ys, label=series.name, **styles[series.style])
    for mark in series.marks:
        axes.annotate(
            mark.label,
            (mark.x, mark.y),
            (0, -13),
            textcoords="offset points",
            size=7,
            ha="center",
        )
