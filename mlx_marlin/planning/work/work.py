"""The work of a product as a linear sequence of k tiles, and its ranges and splits.

The result is cut into tiles, and the k of each tile into k tiles. All k tiles of all
tiles form one sequence, in which those of a tile are adjacent. A threadgroup owns one
contiguous range of it; the part of a range in one tile is a *split*. Three tiles of
four k tiles on four threadgroups:

    tile            0       1       2
    k tile       0 1 2 3 0 1 2 3 0 1 2 3
    threadgroup  0 0 0 1 1 1 2 2 2 3 3 3

The splits of a tile are summed: each is written to a slot of its own in a workspace,
and slots are numbered in ascending k. The strategies differ in where they cut:

    data_parallel  one whole tile per threadgroup
    stripe         runs of units; a unit is one of `slices` slices of a tile
    split_k        one unit per threadgroup
    stream_k       runs of k tiles, which may end anywhere
    hybrid         the first `whole` tiles one per threadgroup, the rest as stream_k
    hytis          `whole` wide tiles, then narrow tiles, one per threadgroup

`shaders/lib/work.metal` uses the same names.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import gcd, inf
from typing import Any, Literal

from mlx_marlin.planning.work.tiles import Split

Strategy = Literal["data_parallel", "stripe", "split_k", "stream_k", "hybrid", "hytis"]
Partition = Literal["balanced", "ceil"]

STRATEGIES: tuple[Strategy, ...] = (
    "data_parallel",
    "stripe",
    "split_k",
    "stream_k",
    "hybrid",
    "hytis",
)
PARTITIONS: tuple[Partition, ...] = ("balanced", "ceil")

MOST_UNEVEN = 65535
"""Largest number of parts of an uneven partition: the shaders compute cuts in 32 bits,
and the product of two remainders must fit."""
MOST_THREADGROUPS = 65535
"""Largest number of threadgroups, unless the work has more k tiles: then it may have
one threadgroup per k tile. Further threadgroups would be idle."""
MOST_GROUPS = 8
"""Largest number of groups of stream-K ranges that work on adjacent tiles (the same as
in CUTLASS)."""


def check(work: "Work") -> None:
    """Raises ValueError if a value is out of range or does not fit the strategy."""
    strategy = work.strategy
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is not one of {STRATEGIES}")
    partitions = PARTITIONS if strategy == "stripe" else PARTITIONS[:1]
    if work.partition not in partitions:
        raise ValueError(
            f"partition={work.partition!r} is not one of {partitions} of {strategy}"
        )
    for name, (value, least, most) in _ranges(work).items():
        if not least <= value <= most:
            raise ValueError(
                f"{name}={value} is not between {least} and {most}, as {strategy} with "
                f"{work.tiles} tiles of {work.k_tiles} k tiles needs it"
            )
    if work.groups > 1:
        _check_groups(work)


def _ranges(work: "Work") -> dict[str, tuple[int, float, float]]:
    """Returns the values of fields by their names for callers, with their limits."""
    tiles, k_tiles, strategy = work.tiles, work.k_tiles, work.strategy
    streams = strategy in ("stream_k", "hybrid")
    uncut = strategy in ("data_parallel", "hytis")
    wholes: dict[str, tuple[int, int]] = {
        "data_parallel": (tiles, tiles),
        "hytis": (1, tiles - 1),
        "hybrid": (1, tiles - 1),
    }
    # Each of so many pieces has one threadgroup.
    pieces = tiles if uncut else tiles * work.slices if strategy == "split_k" else 0
    most = pieces or max(MOST_THREADGROUPS, work.total)
    return {
        "tiles": (tiles, 1, inf),
        "k_tiles": (k_tiles, 1, inf),
        "minimum": (work.minimum, 1, inf if streams else 1),
        "groups": (work.groups, 1, MOST_GROUPS if streams else 1),
        "k_parallel": (work.slices, k_tiles if streams else 1, 1 if uncut else k_tiles),
        "whole": (work.whole, *wholes.get(strategy, (0, 0))),
        "num_threadgroups": (work.threadgroups, pieces or work.whole + 1, most),
    }


def _check_groups(work: "Work") -> None:
    tail, shared = work.tiles - work.whole, work.threadgroups - work.whole
    if tail % work.groups or shared % work.groups:
        raise ValueError(
            f"groups={work.groups} must divide the {tail} tiles and the {shared} "
            f"threadgroups that share them"
        )


def locality_groups(tiles: int, threadgroups: int) -> int:
    """Returns the largest number of groups, at most 8, that divides both numbers."""
    return next(
        groups
        for groups in range(min(MOST_GROUPS, tiles, threadgroups), 0, -1)
        if tiles % groups == 0 and threadgroups % groups == 0
    )


_derived: Callable[[], Any] = partial(field, init=False, repr=False)


def balanced_cut(part: int, parts: int, total: int) -> int:
    """Returns the start of a part if the sizes of parts differ by at most one."""
    return part * total // parts


def ceil_cut(part: int, parts: int, total: int) -> int:
    """Returns the start of a part if all have ceil(total / parts), as in Marlin.

    The last parts may be shorter or empty.
    """
    return min(part * -(-total // parts), total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All work of a product and its assignment to threadgroups.

    Attributes:
        strategy: One of `STRATEGIES`.
        tiles: Tiles of the result.
        k_tiles: K tiles of each tile.
        threadgroups: Threadgroups that share the work; some may stay idle.
        whole: Leading tiles that are computed by one threadgroup each.
        slices: Slices of a tile's k, between which cuts may fall; all k tiles for
            stream_k.
        minimum: Smallest number of k tiles of a split, unless the tile has fewer.
        groups: Groups of ranges that cut their tiles alike. Group g has the remaining
            tiles whose number is g modulo `groups`.
        partition: "balanced", or "ceil" as in Marlin.
        total: Number of k tiles of all tiles. This and the following attributes are
            derived from those above.
        tail: Tiles after the leading whole ones.
        group_tiles: Tiles of a group.
        units: Slices of k of all tiles of a group; its ranges are runs of units.
        ranges: Ranges of a group; further threadgroups are idle.
        most_units: Units of the longest range.
        busy: Ranges of a group that have units.
        is_split: Whether a tile may have several splits.
        pieces: Number of splits of all tiles: one per tile, plus one per cut inside a
            tile. If `minimum` moves cuts to tile borders, this is an upper bound.
    """

    strategy: Strategy
    tiles: int
    k_tiles: int
    threadgroups: int
    whole: int = 0
    slices: int = 1
    minimum: int = 1
    groups: int = 1
    partition: Partition = "balanced"
    total: int = _derived()
    tail: int = _derived()
    group_tiles: int = _derived()
    units: int = _derived()
    ranges: int = _derived()
    most_units: int = _derived()
    busy: int = _derived()
    is_split: bool = _derived()
    pieces: int = _derived()

    def __post_init__(self) -> None:
        # Stored, because a search reads them thousands of times.
        derive = partial(object.__setattr__, self)
        derive("total", self.tiles * self.k_tiles)
        check(self)
        derive("tail", self.tiles - self.whole)
        derive("group_tiles", self.tail // self.groups)
        derive("units", self.group_tiles * self.slices)
        most = (self.threadgroups - self.whole) // self.groups
        derive("ranges", max(min(most, self.units // self.minimum), 1))
        derive("most_units", -(-self.units // self.ranges))
        by_ceil = self.partition == "ceil"
        derive(
            "busy",
            -(-self.units // max(self.most_units, 1)) if by_ceil else self.ranges,
        )
        derive("is_split", self._cuts_tiles())
        self._check_uneven()
        inside = self.groups * self._cuts_inside if self.is_split else 0
        derive("pieces", self.tiles + inside)

    def _check_uneven(self) -> None:
        for name, parts, total in (
            ("num_threadgroups", self.ranges, self.units),
            ("k_parallel", self.slices, self.k_tiles),
        ):
            if parts > MOST_UNEVEN and total % parts:
                raise ValueError(
                    f"{name}={parts} does not divide {total}, expected that or at "
                    f"most {MOST_UNEVEN}"
                )

    @property
    def slots(self) -> int:
        """Upper bound of the splits of a tile, too large by at most one.

        A tile has slices - 1 possible cuts, and one cut falls in every mean range.
        """
        if not self.is_split:
            return 1
        parts, units = self.ranges, self.units
        if self.partition == "ceil":
            parts, units = 1, self.most_units
        cuts = -(-(self.slices - 1) * parts // units)
        return min(cuts + 1, self.k_tiles // self.minimum, self.ranges)

    @property
    def idle(self) -> int:
        """Number of threadgroups without work."""
        sharing = self.threadgroups - self.whole
        if not self.tail:
            return sharing
        busy = self.busy
        # A range is empty if both of its ends are moved to the same tile border.
        if self.units < self.ranges * (2 * self.minimum - 1):
            repeats, lengths = self._period()
            busy -= repeats * lengths.count(0)
        return sharing - self.groups * busy

    @property
    def is_single(self) -> bool:
        """Whether every threadgroup has at most one split, judged by `pieces`."""
        return self.pieces == self.threadgroups - self.idle

    @property
    def longest(self) -> int:
        """Number of k tiles of the longest range."""
        return max(self.k_tiles if self.whole else 0, self.longest_of_tail)

    @property
    def longest_of_tail(self) -> int:
        """Number of k tiles of the longest range after the leading whole tiles.

        If slices are uneven, this may be too large by one.
        """
        if self.minimum > 1:
            return max(self._period()[1])
        # The length of any run of balanced slices is the mean, rounded up or down.
        return -(-self.most_units * self.k_tiles // self.slices)

    def range(self, threadgroup: int) -> tuple[int, int]:
        """Returns the range [begin, end) of the sequence that a threadgroup owns."""
        if threadgroup < self.whole:
            begin = threadgroup * self.k_tiles
            return begin, begin + self.k_tiles
        member, group = divmod(threadgroup - self.whole, self.groups)
        start = (self.whole + group * self.group_tiles) * self.k_tiles
        if member >= self.ranges:
            return start, start
        return start + self.cut(member), start + self.cut(member + 1)

    def cut(self, member: int) -> int:
        """Returns the start of range `member`, counted in k tiles of its group."""
        cut = balanced_cut if self.partition == "balanced" else ceil_cut
        tile, part = divmod(cut(member, self.ranges, self.units), self.slices)
        k_tile = balanced_cut(part, self.slices, self.k_tiles)
        # A cut that would leave a split below the minimum moves to the tile border.
        rest = self.k_tiles - k_tile
        if k_tile < self.minimum or rest < self.minimum:
            k_tile = 0 if k_tile < rest else self.k_tiles
        return tile * self.k_tiles + k_tile

    def owner(self, position: int) -> int:
        """Returns the range that owns a k tile of a group: the inverse of `cut`."""
        member = position * self.ranges // (self.group_tiles * self.k_tiles)
        while self.cut(member) > position:
            member -= 1
        while self.cut(member + 1) <= position:
            member += 1
        return member

    def splits(self, threadgroup: int) -> Iterator[Split]:
        """Yields the splits of a threadgroup, in the order of its range."""
        position, end = self.range(threadgroup)
        while position < end:
            index, k_idx = divmod(position, self.k_tiles)
            count = min(end - position, self.k_tiles - k_idx)
            yield Split(
                tile=self.tile_at(index),
                k_idx=k_idx,
                k_tile_count=count,
                k_tiles=self.k_tiles,
                slot=self._slot(threadgroup, index) if k_idx else 0,
            )
            position += count

    def tile_at(self, index: int) -> int:
        """Returns the tile at an index of the sequence; groups interleave tiles."""
        if index < self.whole:
            return index
        group, nth = divmod(index - self.whole, self.group_tiles)
        return self.whole + nth * self.groups + group

    def threadgroups_of(self, tile: int) -> list[int]:
        """Returns the threadgroups that compute a tile, ordered by ascending k."""
        if tile < self.whole:
            return [tile]
        nth, group = divmod(tile - self.whole, self.groups)
        first = self.owner(nth * self.k_tiles)
        last = self.owner((nth + 1) * self.k_tiles - 1)
        return [
            self.whole + member * self.groups + group
            for member in range(first, last + 1)
        ]

    def _slot(self, threadgroup: int, index: int) -> int:
        member = (threadgroup - self.whole) // self.groups
        nth = (index - self.whole) % self.group_tiles
        return member - self.owner(nth * self.k_tiles)

    def _cuts_tiles(self) -> bool:
        if self.slices == 1 or self.k_tiles < 2 * self.minimum:
            return False
        if self.partition == "ceil":
            return self.most_units % self.slices != 0
        length, rest = divmod(self.units, self.ranges)
        return rest != 0 or length % self.slices != 0

    def _period(self) -> tuple[int, list[int]]:
        """Returns how often the ranges of a group repeat, and their lengths in k tiles.

        Cuts repeat after the fewest ranges that cover a whole number of tiles.
        """
        repeats = gcd(self.ranges, self.group_tiles)
        cuts = [self.cut(member) for member in range(self.ranges // repeats + 1)]
        return repeats, [end - begin for begin, end in pairwise(cuts)]

    @property
    def _cuts_inside(self) -> int:
        """Number of cuts of a group that do not fall on a tile border."""
        if self.partition == "ceil":
            cuts = self.busy - 1
            return cuts - cuts // (self.slices // gcd(self.slices, self.most_units))
        # Cut i rounds down to a tile border if i * group_tiles modulo ranges, which is
        # a multiple of their greatest common divisor, is below ranges / slices.
        step = gcd(self.ranges, self.group_tiles)
        return self.ranges - step * -(-self.ranges // (step * self.slices))
