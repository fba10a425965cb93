"""Diagrams of a plan as text: the threadgroups of each tile, and a timeline."""

from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate, groupby, takewhile

from mlx_marlin import tables
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.search import Choice
from mlx_marlin.planning.work.tiles import Split

SHOWN = 12
"""Maximum rows, columns and threadgroups of a diagram; of more, the middle is
omitted."""
WIDTH = 56
"""Characters of the longest bar."""
BESIDE = 56
"""Characters of a line beside a bar: of the other columns, and of the mark of times."""
SPANS = 3
"""Runs of threadgroups that a label lists; of more, the first two and the last."""
MAX_DRAWN = 2**18
"""Maximum threadgroups of a plan that is drawn; more take seconds."""
GAP = "..."
CLOSE = 0.98
"""Fraction of the predicted time above which bars count as filling it."""
WHOLE, PART = "=", "-"
"""Characters of bars: a tile that one threadgroup computes alone, or a part of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A split in time. The unit of time is a k tile of an ordinary tile."""

    split: Split
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The work of a threadgroup over time."""

    threadgroup: int  # The threadgroup
    core: int  # The core that would run it
    begin: int  # Start time on the core
    pieces: tuple[Piece, ...]  # Its splits in order; an idle threadgroup has none

    @property
    def end(self) -> int:
        """End time on the core."""
        return self.pieces[-1].end if self.pieces else self.begin


def why_not_drawn(plan: Plan) -> str | None:
    """Returns why a plan has too many threadgroups for a diagram, or None."""
    if plan.num_threadgroups <= MAX_DRAWN:
        return None
    return (
        f"not drawn: {plan.num_threadgroups} threadgroups, more than the {MAX_DRAWN} "
        f"that a picture can have"
    )


def tile_map(plan: Plan) -> str:
    """Draws the tiles of the result with the threadgroups that compute them."""
    for shown in range(SHOWN, 0, -2):
        text = _tile_map(plan, shown)
        if max(map(len, text)) <= tables.width():
            break
    idle = spans_of(idle_threadgroups(plan))
    return "\n".join([*text, f"idle: {idle}"] if idle else text)


def _tile_map(plan: Plan, shown: int) -> list[str]:
    """Returns the lines of a tile map with at most `shown` columns."""
    columns = shown_columns(plan, shown)
    head = [GAP if column is None else f"{column}" for column in columns]
    lines = [("col", head)]
    for row in ends(plan.m_tiles, SHOWN):
        if row is None:
            lines.append((GAP, [GAP] * len(columns)))
            continue
        owners = [
            GAP if column is None else _owners(plan, row, column) for column in columns
        ]
        lines.append((f"row {row}", owners))
    spans = [0 if column is None else span(plan, column) for column in columns]
    return [_title(plan), *_grid(lines, spans)]


def timeline(choice: Choice) -> str:
    """Draws the splits of each threadgroup as bars over the predicted time."""
    bars = schedule(choice.plan, choice.device.cores)
    last = max(bar.end for bar in bars)
    until_last = fullest(choice, bars)
    dispatch = choice.prediction.dispatch
    until = f"{(choice.prediction.seconds - dispatch) * 1e6:.1f} us"
    length = min(WIDTH, max(tables.width() - BESIDE, len(until) + 1))
    axis = f"0{until:>{length - 1}} (model, not measured)"
    rows = [["threadgroup", "core", "k tiles", axis]]
    for index in ends(len(bars), SHOWN):
        if index is None:
            rows.append(["", "", "", GAP])
        else:
            rows.append(_bar_row(choice.plan, bars[index], length / until_last))
    title = f"threadgroups over time: {WHOLE} a whole tile, {PART} a part of one"
    text = f"{title}\n{tables.aligned(rows)}"
    if last < CLOSE * until_last:
        text += "\nthe rest of the time: at worst the longest meet on one core"
    if dispatch:
        text += f"\nthen {dispatch * 1e6:.1f} us (model, not measured) for "
        text += _further_dispatches(choice.plan)
    return text


def schedule(plan: Plan, cores: int) -> list[Bar]:
    """Assigns the threadgroups in order, each to the core that is free first.

    Metal does not document how it assigns threadgroups. Concurrent threadgroups of a
    core share it, so that drawing them one after another does not change when the core
    ends.
    """
    free = [(0, core) for core in range(cores)]
    bars = []
    for threadgroup in range(plan.num_threadgroups):
        begin, core = free[0]
        pieces = _pieces(plan, threadgroup, begin)
        bar = Bar(threadgroup=threadgroup, core=core, begin=begin, pieces=pieces)
        heapreplace(free, (bar.end, core))
        bars.append(bar)
    return bars


def fullest(choice: Choice, bars: list[Bar]) -> float:
    """Returns the k tiles of the busiest core in the predicted time.

    This can exceed the longest bar: the cost model assumes that the longest ranges may
    be assigned to one core.
    """
    total = sum(bar.end - bar.begin for bar in bars)
    by_model = total / (choice.device.cores * choice.prediction.busy)
    return max(by_model, *(bar.end for bar in bars))


def ends(count: int, most: int) -> list[int | None]:
    """Returns 0 .. count - 1; if there are more than `most`, None is the middle."""
    if count <= most:
        return list(range(count))
    half = most // 2
    return [*range(half), None, *range(count - half, count)]


def shown_columns(plan: Plan, most: int) -> list[int | None]:
    """Returns the columns of tiles to draw; None is the middle of more than `most`.

    A wide tile counts as the columns that it spans. The first and last column are
    always drawn. The columns of a batch of products follow each other.
    """
    columns = plan.problem.batch * plan.n_tiles
    widths = [span(plan, column) for column in range(columns)]
    if sum(widths) <= most:
        return list(range(columns))
    left = _fitting(widths, most // 2)
    right = _fitting(widths[left:][::-1], most // 2)
    return [*range(left), None, *range(columns - right, columns)]


def span(plan: Plan, column: int) -> int:
    """Returns the number of ordinary columns that a column of tiles spans."""
    return plan.columns_of(column * plan.m_tiles) // plan.tile.n


def spans_of(threadgroups: list[int]) -> str:
    """Formats threadgroups: "3", "0-2", "0,2,4", and "0,2..14" for more than three."""
    runs = [
        [threadgroup for _, threadgroup in run]
        for _, run in groupby(enumerate(threadgroups), lambda pair: pair[1] - pair[0])
    ]
    names = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(names) > SPANS:
        return f"{names[0]},{names[1]}..{names[-1]}"
    return ",".join(names)


def idle_threadgroups(plan: Plan) -> list[int]:
    """Returns the threadgroups without work."""
    ranges = map(plan.work.range, range(plan.num_threadgroups))
    return [index for index, (begin, end) in enumerate(ranges) if begin == end]


def _fitting(widths: list[int], most: int) -> int:
    """Returns how many leading widths fit, at least 1."""
    fitting = takewhile(lambda end: end <= most, accumulate(widths))
    return max(1, sum(1 for _ in fitting))


def _title(plan: Plan) -> str:
    wide = f", wide ones {plan.tile.m} x {plan.wide_n}" if plan.wide_columns else ""
    batch = f", columns a product: {plan.n_tiles}" if plan.problem.batch > 1 else ""
    return f"threadgroups of each tile of {plan.tile.m} x {plan.tile.n}{wide}{batch}"


def _owners(plan: Plan, row: int, column: int) -> str:
    return spans_of(plan.work.threadgroups_of(column * plan.m_tiles + row))


def _grid(lines: list[tuple[str, list[str]]], spans: list[int]) -> list[str]:
    """Formats a table whose cells may span several columns."""
    bar = len(" | ")
    width = max(
        -(-(len(cell) - bar * (wide - 1)) // wide)
        for _, cells in lines
        for cell, wide in zip(cells, spans, strict=True)
        if wide
    )
    widths = [wide * width + bar * (wide - 1) if wide else len(GAP) for wide in spans]
    name = max(len(head) for head, _ in lines)
    return [
        " | ".join([head.rjust(name), *map(str.center, cells, widths)]) + " |"
        for head, cells in lines
    ]


def _pieces(plan: Plan, threadgroup: int, begin: int) -> tuple[Piece, ...]:
    """Returns a threadgroup's splits in time; time is proportional to the width."""
    pieces = []
    for split in plan.work.splits(threadgroup):
        wide = plan.columns_of(split.tile) // plan.tile.n
        end = begin + split.k_tile_count * wide
        pieces.append(Piece(split=split, begin=begin, end=end))
        begin = end
    return tuple(pieces)


def _bar_row(plan: Plan, bar: Bar, scale: float) -> list[str]:
    begin, end = plan.work.range(bar.threadgroup)
    if begin == end:
        return [f"{bar.threadgroup}", "", "idle", ""]
    before = " " * round(bar.begin * scale)
    text = before
    for piece in bar.pieces:
        text += _piece_text(piece, round(piece.end * scale) - len(text))
    if text == before:
        text += "|"
    return [f"{bar.threadgroup}", f"{bar.core}", f"{begin}-{end - 1}", text]


def _piece_text(piece: Piece, width: int) -> str:
    """Draws a split: a border, the tile if it fits, and the fill character.

    Returns "" if the split is too short.
    """
    if width < 1:
        return ""
    fill = PART if piece.split.requires_fixup else WHOLE
    name = f"|{piece.split.tile}"
    return (name if len(name) <= width else "|").ljust(width, fill)


def _further_dispatches(plan: Plan) -> str:
    if plan.reduction == "atomic":
        return "dispatches that zero the sums before and finish them after"
    return "a dispatch that adds the splits"
