"""Charts as inline SVG, in the colours of the page."""

import math
from collections.abc import Sequence

from mlx_marlin.cli.pictures.charts import COLORS, Axis, Chart, Mark, Series, tick_label
from mlx_marlin.cli.render.html import Markup, element, joined

WIDTH, HEIGHT = 420.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 14.0, 26.0, 38.0
"""Space around the axes."""
RADIUS, SMALL = 4.2, 2.4
"""Radius of a marker, and in a series of `DENSE` points."""
DENSE = 32
WIDE = 860.0
"""Width of a chart that has a line of the page for itself."""

Corners = tuple[tuple[float, float], ...]


def _turned(corners: Corners) -> Corners:
    """Returns corners turned by 45 degrees."""
    half = math.sqrt(0.5)
    return tuple((half * (x - y), half * (x + y)) for x, y in corners)


_SQUARE = ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9))
_TRIANGLE = ((0, -1.2), (1.1, 1), (-1.1, 1))
_ARM = ((-0.4, -0.4), (-0.4, -1.2), (0.4, -1.2))
_PLUS = (
    *_ARM,
    *((-y, x) for x, y in _ARM),
    *((-x, -y) for x, y in _ARM),
    *((y, -x) for x, y in _ARM),
)
_HEXAGON = tuple(
    (1.15 * math.sin(math.pi * i / 3), 1.15 * math.cos(math.pi * i / 3))
    for i in range(6)
)
SHAPES: tuple[Corners, ...] = (
    _SQUARE,
    _turned(_SQUARE),
    _TRIANGLE,
    tuple((x, -y) for x, y in _TRIANGLE),
    _PLUS,
    _turned(_PLUS),
    _HEXAGON,
)
"""Corners of markers for a radius of 1; the first shape is a circle."""


def figures(charts: Sequence[Chart]) -> Markup:
    """Returns charts in two columns; the last one takes both if it is alone."""
    is_odd = len(charts) % 2 == 1
    widths = [WIDE if chart is charts[-1] and is_odd else WIDTH for chart in charts]
    return element("div", *map(_figure, charts, widths), class_="figures")


def _figure(chart: Chart, width: float) -> Markup:
    """Returns a chart with its title and legend."""
    drawing = element(
        "svg",
        _grid(chart, width),
        *(_series(chart, series, width) for series in chart.series),
        viewBox=f"0 0 {width:g} {HEIGHT:g}",
        role="img",
        aria_label=chart.title,
    )
    legend = element("ul", *map(_legend_entry, chart.series), class_="legend")
    caption = element("figcaption", chart.title)
    name = "wide" if width == WIDE else None
    return element("figure", caption, drawing, legend, class_=name)


def _x(axis: Axis, value: float, width: float) -> float:
    return round(LEFT + axis.position(value) * (width - LEFT - RIGHT), 2)


def _y(axis: Axis, value: float) -> float:
    return round(HEIGHT - BOTTOM - axis.position(value) * (HEIGHT - TOP - BOTTOM), 2)


def _grid(chart: Chart, width: float) -> Markup:
    """Returns grid lines, the labels of ticks and the names of the axes."""
    bottom, right = HEIGHT - BOTTOM, width - RIGHT
    parts = []
    for tick in chart.x.ticks:
        x = _x(chart.x, tick, width)
        parts.append(_line("grid", (x, TOP), (x, bottom)))
        parts.append(_text(tick_label(tick), x, bottom + 14, "middle"))
    for tick in chart.y.ticks:
        y = _y(chart.y, tick)
        parts.append(_line("grid", (LEFT, y), (right, y)))
        parts.append(_text(tick_label(tick), LEFT - 5, y + 3.5, "end"))
    parts.append(_text(chart.x.label, (LEFT + right) / 2, HEIGHT - 6, "middle"))
    parts.append(_text(chart.y.label, 0, 12, "start"))
    return element("g", *parts, class_="axes")


def _line(name: str, start: tuple[float, float], end: tuple[float, float]) -> Markup:
    return element("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], class_=name)


def _text(text: str, x: float, y: float, anchor: str) -> Markup:
    return element("text", text, x=x, y=round(y, 2), text_anchor=anchor)


def _series(chart: Chart, series: Series, width: float) -> Markup:
    places = [
        (_x(chart.x, mark.x, width), _y(chart.y, mark.y)) for mark in series.marks
    ]
    parts = []
    if series.style != "points" and len(places) > 1:
        points = " ".join(f"{x:g},{y:g}" for x, y in places)
        parts.append(element("polyline", points=points))
    if series.style != "roof":
        radius = SMALL if len(places) >= DENSE else RADIUS
        for mark, place in zip(series.marks, places, strict=True):
            parts.append(_marker(series.marker, place, radius, mark))
    return element("g", *parts, class_=_class(series))


def _marker(
    shape: int, place: tuple[float, float], radius: float, mark: Mark | None = None
) -> Markup:
    """Returns a marker of a shape, an index of `Series.marker`, with its texts."""
    x, y = place
    title = [element("title", mark.text)] if mark and mark.text else []
    if shape == 0:
        marker = element("circle", *title, cx=x, cy=y, r=radius, class_="mark")
    else:
        corners = (
            f"{x + radius * right:.5g},{y + radius * down:.5g}"
            for right, down in SHAPES[shape - 1]
        )
        marker = element("polygon", *title, points=" ".join(corners), class_="mark")
    if not mark or not mark.label:
        return marker
    return joined(marker, _text(mark.label, x, y + radius + 11, "middle"))


def _legend_entry(series: Series) -> Markup:
    """Returns the name of a series behind a sample of it."""
    parts = []
    if series.style != "points":
        parts.append(element("polyline", points="0,6 26,6"))
    if series.style != "roof":
        parts.append(_marker(series.marker, (13, 6), RADIUS))
    sample = element("g", *parts, class_=_class(series))
    swatch = element("svg", sample, viewBox="0 0 26 12", aria_hidden="true")
    return element("li", swatch, element("span", series.name))


def _class(series: Series) -> str:
    """Returns the classes that give a series its colour and strokes."""
    if series.style == "roof":
        return f"roof roof{series.color % 2}"
    kind = "measured" if series.is_measured else "predicted"
    return f"series color{series.color % len(COLORS)} {kind}"
