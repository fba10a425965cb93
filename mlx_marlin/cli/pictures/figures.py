"""Charts drawn with matplotlib, and figures as files that are equal in each run."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from mlx_marlin.cli import output
from mlx_marlin.cli.pictures.charts import Chart, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METADATA = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
}
"""Metadata to omit, by suffix, so that the same pictures give the same bytes."""
STYLE = {
    "svg.hashsalt": "mlx-marlin",
    "svg.fonttype": "none",  # text stays text: files are small and can be searched
    "font.sans-serif": ["DejaVu Sans"],
    "text.parse_math": False,
    "legend.frameon": False,
}


def require(option: str) -> None:
    """Checks that matplotlib is installed."""
    try:
        import matplotlib.style  # noqa: F401
    except ImportError as error:
        needed = f"{option} draws with matplotlib, pip install matplotlib: {error}"
        raise ImportError(needed, name=error.name) from None


def add_axes(figure: "Figure", inches: tuple[float, float, float, float]) -> "Axes":
    """Adds axes at a fixed place: left, bottom, width and height.

    Places that a layout engine finds depend on how texts are measured, and ids in an
    SVG on the last bits of places.
    """
    wide, high = figure.get_size_inches()
    left, bottom, width, height = inches
    return figure.add_axes((left / wide, bottom / high, width / wide, height / high))


def content(draw: "Callable[[], Figure]", suffix: str) -> bytes:
    """Returns a figure as a file. The same figure gives the same bytes."""
    import matplotlib.style

    output = BytesIO()
    with matplotlib.style.context(["default", STYLE]):
        draw().savefig(output, format=suffix[1:], dpi=150, metadata=METADATA[suffix])
    return output.getvalue()


def save(path: Path, option: str, draw: "Callable[[], Figure]") -> None:
    """Draws a figure to a file, whose suffix selects the format; messages name the
    option."""
    require(option)
    output.write_file(path, option, content(draw, path.suffix.lower()))


COLORS = (
    *("#0077BB", "#EE7733", "#009988", "#CC3311"),
    *("#AA3377", "#997700", "#33BBEE", "#555555"),
)
"""Colours of series, repeated in order: Paul Tol's vibrant scheme and others,
distinguishable with colour blindness."""
MARKERS = "osD^vPXh"
"""Shapes of markers: other series of a colour have another."""
ROOFS = ("black", "#777777")
"""Colours of roofs."""
DENSE = 32
"""Points of a series from which its markers are small."""
SEEN = 4
"""Series of a chart that are all seen where they are equal; of more, some may hide."""

WIDTH, LEFT, RIGHT = 4.7, 0.8, 0.3
"""Inches of a chart and of its margins. A phone shows the width in about as many pixels
as it has points."""
HEIGHT, TICKS, GAP = 2.4, 0.28, 0.12
"""Inches of a chart's axes, and of what is between their parts."""
TEXT, LINE = 11.5, 0.24
"""Points of all text, hence at least 11 pixels on a phone, and inches of a line."""
LETTERS = 37
"""Letters of a line of a title or of a name in a legend."""


def figure(charts: Sequence[Chart]) -> "Figure":
    """Draws charts, at least one, one below the other."""
    from matplotlib.figure import Figure

    heights = [_height(chart) for chart in charts]
    drawn = Figure(figsize=(WIDTH, sum(heights)))
    for index, chart in enumerate(charts):
        _draw(drawn, chart, sum(heights[index:]))
    return drawn


def _height(chart: Chart) -> float:
    # Names of the axes, the title and the legend
    lines = 2 + _count(chart.title) + sum(_count(each.name) for each in chart.series)
    return HEIGHT + TICKS + LINE * lines + 2 * GAP


def _count(text: str) -> int:
    return _lines(text).count("\n") + 1


def _lines(text: str) -> str:
    """Returns a text in lines; a time and what is in brackets stay together."""
    tied = text.replace(" us", "\N{NO-BREAK SPACE}us")
    tied = tied.replace(" (", "\N{NO-BREAK SPACE}(")
    return fill(tied, LETTERS).replace("\N{NO-BREAK SPACE}", " ")


def _draw(figure: "Figure", chart: Chart, top: float) -> None:
    """Draws a chart whose upper edge is `top` inches above the figure's lower one."""
    from matplotlib.ticker import LogLocator

    inches = figure.dpi_scale_trans
    bottom = top - GAP - LINE * (_count(chart.title) + 1) - HEIGHT
    axes = add_axes(figure, (LEFT, bottom, WIDTH - LEFT - RIGHT, HEIGHT))
    for text, at in (
        (_lines(chart.title), top - GAP),
        (chart.y, bottom + HEIGHT + LINE),
    ):
        figure.text(GAP, at, text, size=TEXT, va="top", transform=inches)
    axes.set_xlabel(chart.x, size=TEXT)
    axes.grid(color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=TEXT)
    step = min(1, SEEN / len(chart.series))
    for above, series in zip(range(len(chart.series))[::-1], chart.series, strict=True):
        _draw_series(axes, series, above * step)
    if chart.log_base is not None:
        axes.set_xscale("log", base=chart.log_base)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        if chart.log_base != 2:
            axes.xaxis.set_major_locator(LogLocator())
    else:
        axes.set(xlim=(0, None), ylim=(0, None))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:.10g}")  # exponents need mathematical text
        axis.set_minor_formatter("")
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0, bottom - TICKS - LINE),
        bbox_transform=inches,
        fontsize=TEXT,
        handlelength=1.5,
        borderpad=0,
    )


def _draw_series(axes: "Axes", series: Series, above: float) -> None:
    """Draws a series, wider where others are drawn `above` it, so that it is seen."""
    xs, ys, _ = zip(*series.marks, strict=True)
    color = COLORS[series.color % len(COLORS)]
    shape = series.color + series.color // len(COLORS)
    marker: dict[str, Any] = {
        "marker": MARKERS[shape % len(MARKERS)],
        "ms": (5 if len(xs) < DENSE else 3) + 2.5 * above,
        "lw": 1.2 + 1.5 * above,
        "mfc": color if series.is_measured else "white",
        "color": color,
        "clip_on": False,
        "zorder": 3,
    }
    styles: dict[str, dict[str, Any]] = {
        "roof": {"color": ROOFS[series.color % len(ROOFS)], "lw": 1.5},
        "points": {**marker, "ls": "none"},
        "line": {**marker, "ls": "-" if series.is_measured else "--"},
    }
    axes.plot(xs, ys, label=_lines(series.name), **styles[series.style])
    for mark in series.marks:
        axes.annotate(
            mark.label,
            (mark.x, mark.y),
            (7, -3),
            textcoords="offset points",
            size=TEXT,
            va="top",
        )
