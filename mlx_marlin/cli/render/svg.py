"""Charts as inline SVG, in the colours of the page."""

from mlx_marlin.cli.pictures.charts import Axis, Chart, Mark, Series, tick_label
from mlx_marlin.cli.render.html import Markup, element, joined

WIDTH, HEIGHT = 420.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 14.0, 26.0, 38.0
"""Space around the axes."""
COLORS = 8
"""Colours of series in the style sheet."""
RADIUS, SMALL = 4.2, 2.4
"""Radius of a marker, and in a series of `DENSE` points."""
DENSE = 32


def figure(chart: Chart) -> Markup:
    """Returns a chart with its title and legend."""
    drawing = element(
        "svg",
        _grid(chart),
        *(_series(chart, series) for series in chart.series),
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
        aria_label=chart.title,
    )
    legend = element("ul", *map(_legend_entry, chart.series), class_="legend")
    return element("figure", element("figcaption", chart.title), drawing, legend)


def _x(axis: Axis, value: float) -> float:
    return round(LEFT + axis.position(value) * (WIDTH - LEFT - RIGHT), 2)


def _y(axis: Axis, value: float) -> float:
    return round(HEIGHT - BOTTOM - axis.position(value) * (HEIGHT - TOP - BOTTOM), 2)


def _grid(chart: Chart) -> Markup:
    """Returns grid lines, the labels of ticks and the names of the axes."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in chart.x.ticks:
        x = _x(chart.x, tick)
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


def _series(chart: Chart, series: Series) -> Markup:
    places = [(_x(chart.x, mark.x), _y(chart.y, mark.y)) for mark in series.marks]
    parts = []
    if series.style != "points" and len(places) > 1:
        points = " ".join(f"{x:g},{y:g}" for x, y in places)
        parts.append(element("polyline", points=points))
    if series.style != "roof":
        radius = SMALL if len(places) >= DENSE else RADIUS
        for mark, place in zip(series.marks, places, strict=True):
            parts.append(_marker(series.color, place, radius, mark))
    return element("g", *parts, class_=_class(series))


def _marker(
    color: int, place: tuple[float, float], radius: float, mark: Mark | None = None
) -> Markup:
    """Returns a marker, whose shape depends on the colour, with its texts."""
    x, y = place
    title = [element("title", mark.text)] if mark and mark.text else []
    turned: str | None = None
    shape = color % 4
    if shape == 0:
        marker = element("circle", *title, cx=x, cy=y, r=radius, class_="mark")
    elif shape == 3:
        points = f"{x:g},{y - 1.2 * radius:g} {x - 1.1 * radius:g},{y + radius:g}"
        points += f" {x + 1.1 * radius:g},{y + radius:g}"
        marker = element("polygon", *title, points=points, class_="mark")
    else:
        turned = f"rotate(45 {x:g} {y:g})" if shape == 2 else None
        side = 1.8 * radius
        marker = element(
            "rect",
            *title,
            x=round(x - side / 2, 2),
            y=round(y - side / 2, 2),
            width=round(side, 2),
            height=round(side, 2),
            transform=turned,
            class_="mark",
        )
    if not mark or not mark.label:
        return marker
    return joined(marker, _text(mark.label, x, y + radius + 11, "middle"))


def _legend_entry(series: Series) -> Markup:
    """Returns the name of a series behind a sample of it."""
    parts = []
    if series.style != "points":
        parts.append(element("polyline", points="0,6 26,6"))
    if series.style != "roof":
        parts.append(_marker(series.color, (13, 6), RADIUS))
    sample = element("g", *parts, class_=_class(series))
    swatch = element("svg", sample, viewBox="0 0 26 12", aria_hidden="true")
    return element("li", swatch, element("span", series.name))


def _class(series: Series) -> str:
    """Returns the classes that give a series its colour and strokes."""
    if series.style == "roof":
        return f"roof roof{series.color % 2}"
    kind = "measured" if series.is_measured else "predicted"
    return f"series color{series.color % COLORS} {kind}"
