"""The two diagrams of a plan, drawn on matplotlib axes: tiles, and work over time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from mlx_marlin.cli.pictures.text import (
    Bar,
    ends,
    fullest,
    schedule,
    shown_columns,
    span,
    spans_of,
)
from mlx_marlin.planning.choice import Choice
from mlx_marlin.planning.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = (
    "#77AADD",
    "#EE8866",
    "#EEDD88",
    "#FFAABB",
    "#99DDFF",
    "#44BB99",
    "#BBCC33",
    "#AAAA00",
)
"""Colours of threadgroups, repeated in order: Paul Tol's light scheme, which is legible
under black text and distinguishable with colour blindness."""
GREY = "#DDDDDD"

COLUMNS = 16
"""Columns of tiles in a diagram; of more, the middle is omitted."""
ROWS = 6
"""Rows of tiles in a diagram."""
BARS = 20
"""Threadgroups in a timeline."""
POINTS = 72
LARGEST, SMALL, SMALLEST = 9.0, 6.0, 4.5
"""Maximum font size of a label, of a label in a bar, and the minimum, in points."""
THIN = 0.03
"""Average inches of the splits of a bar below which it is drawn as one box."""
ROOM = 1.2 * LARGEST
"""Height in points that a label needs."""
CHARACTER = 0.66
"""Width of a digit divided by its height."""


def draw_map(axes: "Axes", plan: Plan, size: tuple[float, float]) -> None:
    """Draws each tile as a box, with its splits in ascending k from the top.

    Args:
        axes: The axes.
        plan: The plan.
        size: Width and height of the axes in inches.
    """
    columns, rows = shown_columns(plan, COLUMNS), ends(plan.m_tiles, ROWS)
    spans = [1 if column is None else span(plan, column) for column in columns]
    x_inch, y_inch = sum(spans) / size[0], len(rows) / size[1]
    starts = [sum(spans[:index]) for index in range(len(spans))]
    for y, row in enumerate(rows):
        for x, column, wide in zip(starts, columns, spans, strict=True):
            if row is None or column is None:
                axes.text(x + wide / 2, y + 0.5, "...", ha="center", va="center")
                continue
            tile = column * plan.m_tiles + row
            _draw_tile(axes, plan, tile, (x, y), (wide, x_inch, y_inch))
    axes.set(xlim=(0, sum(spans)), ylim=(len(rows), 0))
    centers = [x + wide / 2 for x, wide in zip(starts, spans, strict=True)]
    _label_ticks(axes, "x", centers, columns)
    _label_ticks(axes, "y", [index + 0.5 for index in range(len(rows))], rows)
    axes.set_ylabel("row of tiles", size=8)
    axes.set_title("column of tiles, and who computes it", size=8, loc="right", pad=3)


def _draw_tile(
    axes: "Axes",
    plan: Plan,
    tile: int,
    corner: tuple[float, float],
    scale: tuple[int, float, float],
) -> None:
    """Draws a tile; each split has the colour of its threadgroup.

    Args:
        axes: The axes.
        plan: The plan.
        tile: The tile.
        corner: Its left and upper border.
        scale: Its width, and units per inch in x and in y.
    """
    from matplotlib.patches import Rectangle

    (x, y), (wide, x_inch, y_inch) = corner, scale
    owners = plan.work.threadgroups_of(tile)
    splits = [
        split
        for threadgroup in owners
        for split in plan.work.splits(threadgroup)
        if split.tile == tile
    ]
    labelled = False
    for threadgroup, split in zip(owners, splits, strict=True):
        top = y + split.k_idx / split.k_tiles
        height = split.k_tile_count / split.k_tiles
        color = _color(threadgroup)
        axes.add_patch(Rectangle((x, top), wide, height, fc=color, ec="black", lw=0.3))
        if height / y_inch * POINTS > ROOM:
            middle = x + wide / 2, top + height / 2
            _draw_label(axes, f"{threadgroup}", middle, wide / x_inch)
            labelled = True
    if not labelled:
        _draw_label(axes, spans_of(owners), (x + wide / 2, y + 0.5), wide / x_inch)
    axes.add_patch(Rectangle((x, y), wide, 1, fill=False, ec="black", lw=0.8))


def draw_timeline(axes: "Axes", choice: Choice, until: float, width: float) -> None:
    """Draws the splits of each threadgroup as bars, and further dispatches in grey."""
    bars = schedule(choice.plan, choice.device.cores)
    shown = ends(len(bars), BARS)
    us = choice.prediction.seconds * 1e6
    first_us = us - choice.prediction.dispatch * 1e6
    scale = first_us / fullest(choice, bars)
    for y, index in enumerate(shown):
        if index is None:
            axes.text(first_us / 2, y, "...", ha="center", va="center")
        else:
            _draw_bar(axes, bars[index], y, scale, width / until)
    if us > first_us:
        axes.axvspan(first_us, us, fc=GREY, ec="none", zorder=0)
    else:
        axes.axvline(us, color="black", lw=0.8, ls="--", clip_on=False)
    axes.set(xlim=(0, until), ylim=(len(shown) - 0.4, -0.6))
    _label_ticks(axes, "y", list(range(len(shown))), shown)
    axes.tick_params(labelsize=7)
    axes.set_ylabel("threadgroup", size=8)
    mark = "grey: further dispatches" if us > first_us else "dashed: the end"
    axes.set_xlabel(
        f"us (model, not measured); in the bars: the tile; {mark}", size=8, loc="left"
    )
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bar(axes: "Axes", bar: Bar, y: int, scale: float, inches: float) -> None:
    """Draws the splits of a threadgroup.

    Args:
        axes: The axes.
        bar: The threadgroup.
        y: Its position.
        scale: Microseconds per k tile.
        inches: Inches per microsecond.
    """
    if not bar.pieces:
        axes.text(0, y, " idle", va="center", size=7)
        return
    begins = [piece.begin * scale for piece in bar.pieces]
    lengths = [(piece.end - piece.begin) * scale for piece in bar.pieces]
    if sum(lengths) / len(lengths) * inches < THIN:
        begins, lengths = begins[:1], [sum(lengths)]
    axes.barh(
        [y] * len(begins),
        lengths,
        left=begins,
        height=0.8,
        color=_color(bar.threadgroup),
        ec="black",
        lw=0.5,
        clip_on=False,
    )
    if len(lengths) < len(bar.pieces):
        return
    for piece, begin, length in zip(bar.pieces, begins, lengths, strict=True):
        middle = begin + length / 2, y
        _draw_label(axes, f"{piece.split.tile}", middle, length * inches, SMALL)


def _draw_label(
    axes: "Axes",
    text: str,
    middle: tuple[float, float],
    inches: float,
    most: float = LARGEST,
) -> None:
    """Draws a text as large as the width allows, or omits it.

    Args:
        axes: The axes.
        text: The text.
        middle: The center.
        inches: Width available.
        most: Maximum font size.
    """
    size = min(most, inches * POINTS / (CHARACTER * (len(text) + 0.5)))
    if size >= SMALLEST:
        axes.text(*middle, text, ha="center", va="center", size=round(size, 1))


def _label_ticks(
    axes: "Axes",
    side: Literal["x", "y"],
    positions: Sequence[float],
    names: Sequence[int | None],
) -> None:
    """Labels the rows or columns of a diagram."""
    texts = ["" if name is None else f"{name}" for name in names]
    if side == "x":
        axes.set_xticks(positions, texts, size=7)
    else:
        axes.set_yticks(positions, texts, size=7)
    axes.tick_params(axis=side, length=0)


def _color(threadgroup: int) -> str:
    return COLORS[threadgroup % len(COLORS)]
