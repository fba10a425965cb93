"""SVG and PNG pictures of charts, drawn with matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_marlin.cli.pictures import figures
from mlx_marlin.cli.pictures.charts import COLORS, Axis, Chart, Series, tick_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vPXh"
"""Markers, in the order of `Series.marker`."""
DENSE = 32
"""Points of a series from which its markers are small."""
ROOFS = ("black", "#777777")
"""Colours of roofs."""

# Inches. The layout is fixed, because matplotlib's own differs between runs.
WIDTH, LEFT, RIGHT = 8.0, 0.75, 0.3
HEIGHT, AREA = 3.7, 0.75
"""Height of the axes of a chart, and of one with an area."""
ABOVE, BELOW = 0.35, 0.45
"""Space for the title, and for ticks and their label."""
LEGEND, BETWEEN = 0.19, 0.2
"""Height of a line of a legend, and space after a chart."""
LEGEND_WIDTH = 104
"""Characters of names that fit side by side in a legend of two columns."""


def save(path: Path, option: str, charts: Sequence[Chart]) -> None:
    """Draws charts to a file, one below the other.

    Args:
        path: The file; its suffix, .svg or .png, selects the format.
        option: The option that names it, for messages.
        charts: The charts, at least one.

    Raises:
        ImportError: If matplotlib is missing.
        OSError: If the file cannot be written.
    """
    figures.save(path, option, lambda: _figure(charts))


def _figure(charts: Sequence[Chart]) -> "Figure":
    from matplotlib.figure import Figure

    heights = [_height(chart) for chart in charts]
    total = sum(heights)
    figure = Figure(figsize=(WIDTH, total))
    top = total
    for chart, height in zip(charts, heights, strict=True):
        size = _axes_height(chart)
        axes = figure.add_axes(
            (
                LEFT / WIDTH,
                (top - ABOVE - size) / total,
                (WIDTH - LEFT - RIGHT) / WIDTH,
                size / total,
            )
        )
        _draw(axes, chart)
        top -= height
    return figure


def _height(chart: Chart) -> float:
    """Returns the height of a chart with its texts."""
    lines = -(-len(chart.series) // _legend_columns(chart))
    legend = LEGEND * lines if _has_legend(chart) else 0
    return ABOVE + _axes_height(chart) + BELOW + legend + BETWEEN


def _legend_columns(chart: Chart) -> int:
    """Returns 2 if the names of both halves of the series fit side by side, else 1."""
    lengths = [len(series.name) for series in chart.series]
    half = -(-len(lengths) // 2)
    left, right = lengths[:half], lengths[half:]
    return 2 if right and max(left) + max(right) <= LEGEND_WIDTH else 1


def _axes_height(chart: Chart) -> float:
    return HEIGHT if _has_legend(chart) else AREA


def _draw(axes: "Axes", chart: Chart) -> None:
    axes.set_title(chart.title, size=10, loc="left")
    _set_axis(axes, "x", chart.x)
    _set_axis(axes, "y", chart.y)
    axes.grid(color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    for series in chart.series:
        _draw_series(axes, series)
    if _has_legend(chart):
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(0, -BELOW / HEIGHT),
            fontsize=8,
            frameon=False,
            borderaxespad=0,
            ncols=_legend_columns(chart),
        )


def _has_legend(chart: Chart) -> bool:
    """Returns whether names are listed; an area's is the title."""
    return any(series.style != "area" for series in chart.series)


def _set_axis(axes: "Axes", side: str, axis: Axis) -> None:
    """Sets the scale, limits and ticks of an axis."""
    limits = (axis.low, axis.high)
    labels = [tick_label(tick) for tick in axis.ticks]
    axes.set(
        **{
            f"{side}scale": "log" if axis.is_log else "linear",
            f"{side}lim": limits,
            f"{side}label": axis.label,
        }
    )
    set_ticks: Any = axes.set_xticks if side == "x" else axes.set_yticks
    set_ticks(axis.ticks, labels)
    set_ticks([], minor=True)
    axes.tick_params(labelsize=8)


def _draw_series(axes: "Axes", series: Series) -> None:
    xs = [mark.x for mark in series.marks]
    ys = [mark.y for mark in series.marks]
    color = COLORS[series.color % len(COLORS)]
    if series.style == "area":
        axes.fill_between(xs, ys, step="post", color=color, alpha=0.8, lw=0)
        return
    line: dict[str, Any] = {"color": color, "lw": 1.4}
    marker: dict[str, Any] = {
        "marker": MARKERS[series.marker],
        "ms": 5.5 if len(xs) < DENSE else 3,
        "mfc": color if series.is_measured else "white",
        "mec": color,
        "clip_on": False,
        "zorder": 3,
    }
    styles: dict[str, dict[str, Any]] = {
        "roof": {"color": ROOFS[series.color % len(ROOFS)], "lw": 1.6},
        "points": {**marker, "ls": "none"},
        "line": {**line, **marker, "ls": "-" if series.is_measured else "--"},
    }
    axes.plot(xs, ys, label=series.name, **styles[series.style])
    for mark in series.marks:
        if mark.label:
            axes.annotate(
                mark.label,
                (mark.x, mark.y),
                (0, -13),
                textcoords="offset points",
                size=7,
                ha="center",
            )
