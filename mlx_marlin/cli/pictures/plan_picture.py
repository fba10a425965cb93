"""The two diagrams of a plan, drawn with matplotlib: tiles, and work over time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlx_marlin.cli.pictures import figures
from mlx_marlin.cli.pictures.text import (
    Bar,
    ends,
    fullest,
    schedule,
    shown_columns,
    span,
    spans_of,
)
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.search import Choice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = (
    *("#77AADD", "#EE8866", "#EEDD88", "#FFAABB"),
    *("#99DDFF", "#44BB99", "#BBCC33", "#AAAA00"),
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
PER_LINE = 3
"""Plans in a line of the picture."""
WIDTH = {1: 8.0, 2: 6.0, 3: 5.2}
"""Inches of a plan, by the number of plans in a line."""
HEIGHT, HEAD, LEFT, GAP = 5.4, 0.4, 0.6, 0.1
"""Inches of a plan, of the line above all, left of the diagrams, and at other edges."""
MAP, TIMELINE, NAMES, TICKS = 1.6, 2.5, 0.65, 0.45
"""Inches of the diagrams, of what is above the first, and of what is below the last."""
CHARACTERS = 13
"""Characters of a label in an inch."""
THIN = 0.03
"""Average inches of the splits of a bar below which it is drawn as one box."""


def figure(choices: Sequence[Choice]) -> "Figure":
    """Draws the tiles and the timeline of plans of one product, at least one."""
    from matplotlib.figure import Figure

    per_line = min(len(choices), PER_LINE)
    lines = -(-len(choices) // per_line)
    width = WIDTH[per_line]
    height = lines * HEIGHT + HEAD
    drawn = Figure((per_line * width, height))
    inches = drawn.dpi_scale_trans
    first = choices[0]
    title = f"{first.plan.problem.explain()}\n{first.device.variant}"
    drawn.text(GAP, height - GAP, title, size=9, va="top", transform=inches)
    until = max(choice.prediction.seconds for choice in choices) * 1e6
    wide = width - LEFT - GAP
    for index, choice in enumerate(choices):
        line, place = divmod(index, per_line)
        left, top = place * width + LEFT, (lines - line) * HEIGHT
        at = left + wide / 2, top - GAP
        subtitle = drawn.text(*at, _subtitle(choice), ha="center", transform=inches)
        subtitle.set(size=9, va="top")
        upper = figures.add_axes(drawn, (left, top - NAMES - MAP, wide, MAP))
        lower = figures.add_axes(drawn, (left, top - HEIGHT + TICKS, wide, TIMELINE))
        _draw_map(upper, choice.plan, width)
        _draw_timeline(lower, choice, until, width)
    return drawn


def _subtitle(choice: Choice) -> str:
    work, prediction = choice.plan.work, choice.prediction
    return (
        f"{choice.plan.strategy}\n"
        f"{prediction.seconds * 1e6:.1f} us (model, not measured), "
        f"{work.threadgroups} threadgroups, {work.idle} idle, "
        f"{choice.plan.dispatches} "
        f"{'dispatch' if choice.plan.dispatches == 1 else 'dispatches'}"
    )


def _draw_map(axes: "Axes", plan: Plan, inches: float) -> None:
    """Draws each tile as a box, with its splits in ascending k from the top."""
    columns, rows = shown_columns(plan, COLUMNS), ends(plan.m_tiles, ROWS)
    spans = [1 if column is None else span(plan, column) for column in columns]
    starts = [sum(spans[:index]) for index in range(len(spans))]
    for y, row in enumerate(rows):
        for x, column, wide in zip(starts, columns, spans, strict=True):
            if row is None or column is None:
                axes.text(x + wide / 2, y + 0.5, "...", ha="center", va="center")
                continue
            room = inches * wide / sum(spans), MAP / len(rows)
            _draw_tile(axes, plan, column * plan.m_tiles + row, (x, y, wide), room)
    axes.set(xlim=(0, sum(spans)), ylim=(len(rows), 0), ylabel="row of tiles")
    axes.set_xticks(
        [x + wide / 2 for x, wide in zip(starts, spans, strict=True)],
        _names(columns),
    )
    axes.set_yticks([index + 0.5 for index in range(len(rows))], _names(rows))
    axes.tick_params(length=0, labelsize=7)
    axes.set_title("column of tiles, and who computes it", size=8, loc="right")


def _draw_tile(
    axes: "Axes",
    plan: Plan,
    tile: int,
    place: tuple[float, float, int],
    room: tuple[float, float],
) -> None:
    """Draws a tile; each split has the colour of its threadgroup."""
    from matplotlib.patches import Rectangle

    x, y, wide = place
    owners = plan.work.threadgroups_of(tile)
    labels = {}
    for threadgroup in owners:
        for split in plan.work.splits(threadgroup):
            if split.tile != tile:
                continue
            top = y + split.k_idx / split.k_tiles
            height = split.k_tile_count / split.k_tiles
            axes.add_patch(
                Rectangle((x, top), wide, height, fc=_color(threadgroup), ec="black")
            )
            if height * room[1] * CHARACTERS > 2:
                labels[top + height / 2] = f"{threadgroup}"
    for middle, text in (labels or {y + 0.5: spans_of(owners)}).items():
        _draw_label(axes, text, (x + wide / 2, middle), room[0])
    axes.add_patch(Rectangle((x, y), wide, 1, fill=False, ec="black", lw=1.5))


def _draw_timeline(axes: "Axes", choice: Choice, until: float, width: float) -> None:
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
    axes.set(xlim=(0, until), ylim=(len(shown) - 0.4, -0.6), ylabel="threadgroup")
    axes.set_yticks(range(len(shown)), _names(shown))
    axes.tick_params(labelsize=7)
    mark = "grey: further dispatches" if us > first_us else "dashed: the end"
    axes.set_xlabel(
        f"us (model, not measured); in the bars: the tile; {mark}", size=8, loc="left"
    )
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bar(axes: "Axes", bar: Bar, y: int, scale: float, inches: float) -> None:
    """Draws the splits of a threadgroup.

    `scale`: microseconds per k tile.
    """
    if not bar.pieces:
        axes.text(0, y, " idle", va="center", size=7)
        return
    times = [(piece.begin * scale, piece.end * scale) for piece in bar.pieces]
    whole = times[0][0], times[-1][1]
    is_thin = (whole[1] - whole[0]) / len(times) * inches < THIN
    for begin, end in [whole] if is_thin else times:
        color = _color(bar.threadgroup)
        axes.barh(y, end - begin, left=begin, color=color, ec="black", lw=0.5)
    if is_thin:
        return
    for piece, (begin, end) in zip(bar.pieces, times, strict=True):
        middle = (begin + end) / 2, y
        _draw_label(axes, f"{piece.split.tile}", middle, (end - begin) * inches)


def _draw_label(
    axes: "Axes", text: str, middle: tuple[float, float], inches: float
) -> None:
    """Draws a text where the width allows it."""
    if len(text) <= inches * CHARACTERS:
        axes.text(*middle, text, ha="center", va="center", size=6)


def _names(values: Sequence[int | None]) -> list[str]:
    return ["" if value is None else f"{value}" for value in values]


def _color(threadgroup: int) -> str:
    return COLORS[threadgroup % len(COLORS)]
