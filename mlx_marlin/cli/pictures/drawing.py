"""The pictures of `mlx-marlin plan` as SVG or PNG, drawn with matplotlib."""

import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mlx_marlin.cli.pictures.text import (
    Bar,
    ends,
    fullest,
    schedule,
    shown_columns,
    span,
    spans_of,
    why_not_drawn,
)
from mlx_marlin.planning.choice import Choice
from mlx_marlin.planning.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METADATA = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
}
"""Suffix -> what matplotlib must not write, so that equal pictures are equal files."""

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
"""Of threadgroups, in turn: light colours that the colour-blind tell apart and on which
black can be read (Paul Tol)."""
GREY = "#DDDDDD"

COLUMNS = 16
"""Columns of tiles that a picture shows; the middle of more is elided."""
ROWS = 6
"""Rows of tiles, likewise."""
BARS = 20
"""Threadgroups over time, likewise."""
SIDE_BY_SIDE = 3
"""Plans beside each other; more begin another line."""

# Inches.
WIDTH = {1: 8.0, 2: 6.0, 3: 5.2}
"""Of a plan, by how many stand side by side."""
TOP = 0.5
TITLE = 0.75
MAP = 1.5
BETWEEN = 0.35
TIMELINE = 2.5
BELOW = 0.75
LEFT, RIGHT = 0.65, 0.25
HEIGHT = TITLE + MAP + BETWEEN + TIMELINE + BELOW

POINTS = 72
LARGEST, SMALL, SMALLEST = 9.0, 6.0, 4.5
"""Points of a label, of one in a bar, and below which it is left out."""
THIN = 0.03
"""Inches of the splits of a bar, on average, below which it is drawn as one."""
ROOM = 1.2 * LARGEST
"""Points of height that a label needs."""
CHARACTER = 0.66
"""Width of a digit over its height."""


def save(path: Path, choices: Sequence[Choice]) -> None:
    """Draws map and timeline of plans of one product, side by side, into a file.

    The same plans give the same bytes. A file that exists is replaced as a whole.

    Args:
        path: The file; its suffix says what it becomes, .svg or .png.
        choices: The plans, at least one.

    Raises:
        ValueError: If the file has another suffix, its folder does not exist, or a plan
            has too many threadgroups.
        ImportError: If matplotlib is missing.
        OSError: If the file cannot be written.
    """
    check(path)
    for choice in choices:
        if too_large := why_not_drawn(choice.plan):
            raise ValueError(f"--save {path}: {too_large}")
    content = _rendered(choices, path.suffix.lower())
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise OSError(
            f"--save {path}: cannot be written ({error.strerror}), expected a file in "
            f"a folder that you may write to"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def check(path: Path) -> None:
    """Checks that a picture can be saved under a name.

    Args:
        path: The file.

    Raises:
        ValueError: If it has another suffix than .svg or .png, or its folder does not
            exist.
    """
    if path.suffix.lower() not in METADATA:
        raise ValueError(f"--save {path}: expected a name that ends in .svg or .png")
    if not path.parent.is_dir():
        raise ValueError(
            f"--save {path}: the folder {path.parent} does not exist, expected a file "
            f"in an existing folder"
        )
    if path.is_dir():
        raise ValueError(f"--save {path}: is a folder, expected a file")


def _rendered(choices: Sequence[Choice], suffix: str) -> bytes:
    try:
        import matplotlib.style
    except ImportError as error:
        raise ImportError(
            "--save draws with matplotlib: pip install 'mlx-marlin[plot]', or pip "
            f"install matplotlib ({error})"
        ) from None
    output = BytesIO()
    # Text stays text: small files, and what is drawn can be searched.
    ours = {
        "svg.hashsalt": "mlx-marlin",
        "svg.fonttype": "none",
        "font.sans-serif": ["DejaVu Sans"],
    }
    with matplotlib.style.context(["default", ours]):
        figure = _figure(choices)
        figure.savefig(
            output, format=suffix[1:], dpi=150, metadata=METADATA[suffix], pad_inches=0
        )
    return output.getvalue()


def _figure(choices: Sequence[Choice]) -> "Figure":
    from matplotlib.figure import Figure

    across = min(len(choices), SIDE_BY_SIDE)
    lines = -(-len(choices) // across)
    width, height = across * WIDTH[across], TOP + lines * HEIGHT
    figure = Figure(figsize=(width, height))
    first = choices[0]
    title = f"{first.plan.problem.explain()}\n{first.device.variant}"
    figure.text(LEFT / width, 1 - 0.1 / height, title, size=9, va="top")
    until = max(choice.prediction.seconds for choice in choices) * 1e6
    for index, choice in enumerate(choices):
        line, column = divmod(index, across)
        left = column * WIDTH[across] + LEFT
        top = height - TOP - line * HEIGHT
        _draw_plan(figure, choice, until, (left, top, WIDTH[across] - LEFT - RIGHT))
    return figure


def _draw_plan(
    figure: "Figure", choice: Choice, until: float, place: tuple[float, float, float]
) -> None:
    """Draws a plan.

    Args:
        figure: Where to draw.
        choice: The plan.
        until: Where its time axis ends, in microseconds.
        place: Left and upper border and width, in inches from the lower left corner.
    """
    left, top, width = place
    figure_width, figure_height = figure.get_size_inches()
    x = left / figure_width

    def axes(upper: float, height: float) -> "Axes":
        bottom = (upper - height) / figure_height
        return figure.add_axes(
            (x, bottom, width / figure_width, height / figure_height)
        )

    under = top - TITLE
    strategy = choice.plan.strategy
    figure.text(x, (under + 0.4) / figure_height, strategy, size=11, weight="bold")
    figure.text(x, (under + 0.22) / figure_height, _subtitle(choice), size=8)
    _draw_map(axes(under, MAP), choice.plan, width)
    _draw_timeline(axes(under - MAP - BETWEEN, TIMELINE), choice, until, width)


def _subtitle(choice: Choice) -> str:
    work, prediction = choice.plan.work, choice.prediction
    return (
        f"{prediction.seconds * 1e6:.1f} us (model, not measured), "
        f"{work.threadgroups} threadgroups, {work.idle} idle, "
        f"{choice.plan.dispatches} "
        f"{'dispatch' if choice.plan.dispatches == 1 else 'dispatches'}"
    )


def _draw_map(axes: "Axes", plan: Plan, width: float) -> None:
    """Draws each tile as a box, its splits below each other in ascending k."""
    columns, rows = shown_columns(plan, COLUMNS), ends(plan.m_tiles, ROWS)
    spans = [1 if column is None else span(plan, column) for column in columns]
    inch = sum(spans) / width
    for y, row in enumerate(rows):
        for place, (column, wide) in enumerate(zip(columns, spans, strict=True)):
            x = sum(spans[:place])
            if row is None or column is None:
                axes.text(x + wide / 2, y + 0.5, "...", ha="center", va="center")
                continue
            tile = column * plan.m_tiles + row
            _draw_tile(axes, plan, tile, (x, y), (wide, inch, len(rows) / MAP))
    axes.set(xlim=(0, sum(spans)), ylim=(len(rows), 0))
    centers = [sum(spans[:place]) + wide / 2 for place, wide in enumerate(spans)]
    _label_ticks(axes, "x", centers, columns)
    _label_ticks(axes, "y", [place + 0.5 for place in range(len(rows))], rows)
    axes.set_ylabel("row of tiles", size=8)
    axes.set_title("column of tiles, and who computes it", size=8, loc="right", pad=3)


def _draw_tile(
    axes: "Axes",
    plan: Plan,
    tile: int,
    corner: tuple[float, float],
    scale: tuple[int, float, float],
) -> None:
    """Draws a tile, each of its splits in the colour of its threadgroup.

    Args:
        axes: Where to draw.
        plan: The plan.
        tile: The tile.
        corner: Its left and upper border.
        scale: Its width, and the units of an inch in x and in y.
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
    named = False
    for threadgroup, split in zip(owners, splits, strict=True):
        top = y + split.k_idx / split.k_tiles
        height = split.k_tile_count / split.k_tiles
        color = _color(threadgroup)
        axes.add_patch(Rectangle((x, top), wide, height, fc=color, ec="black", lw=0.3))
        if height / y_inch * POINTS > ROOM:
            middle = x + wide / 2, top + height / 2
            _draw_label(axes, f"{threadgroup}", middle, wide / x_inch)
            named = True
    if not named:
        _draw_label(axes, spans_of(owners), (x + wide / 2, y + 0.5), wide / x_inch)
    axes.add_patch(Rectangle((x, y), wide, 1, fill=False, ec="black", lw=0.8))


def _draw_timeline(axes: "Axes", choice: Choice, until: float, width: float) -> None:
    """Draws the splits of each threadgroup as bars; in grey, further dispatches."""
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
        axes: Where to draw.
        bar: The threadgroup.
        y: Its line.
        scale: Microseconds of a k tile.
        inches: Inches of a microsecond.
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
    """Writes a text as large as so many inches allow, or not at all."""
    size = min(most, inches * POINTS / (CHARACTER * (len(text) + 0.5)))
    if size >= SMALLEST:
        axes.text(*middle, text, ha="center", va="center", size=round(size, 1))


def _label_ticks(
    axes: "Axes",
    side: Literal["x", "y"],
    places: Sequence[float],
    names: Sequence[int | None],
) -> None:
    """Names the rows or columns that are shown."""
    texts = ["" if name is None else f"{name}" for name in names]
    if side == "x":
        axes.set_xticks(places, texts, size=7)
    else:
        axes.set_yticks(places, texts, size=7)
    axes.tick_params(axis=side, length=0)


def _color(threadgroup: int) -> str:
    return COLORS[threadgroup % len(COLORS)]
