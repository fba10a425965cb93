"""One linear space of work, and every way to cut it: the words of `work.metal`.

The result is cut into tiles, and the k of each tile into k tiles. All k tiles of all
tiles stand in one line, those of a tile together. A threadgroup owns one contiguous
range of the line; what it does for one tile is a *split*. Three tiles of four k tiles
for four threadgroups:

    tile            0       1       2
    k tile       0 1 2 3 0 1 2 3 0 1 2 3
    threadgroup  0 0 0 1 1 1 2 2 2 3 3 3

A tile with several splits needs their sum, so each writes to a slot of its own in a
workspace, numbered in ascending k. Every strategy is a choice of the places to cut:

    data_parallel  one whole tile each
    stripe         runs of units; a unit is one of `slices` slices of a tile
    split_k        one unit each
    stream_k       runs of k tiles, wherever they end
    hybrid         `whole` tiles one each, then the rest as stream_k
    hytis          `whole` wide tiles one each, then narrow tiles one each
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import gcd
from typing import Literal

from mlx_marlin.weights.formats import TILE_K, TILE_N

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
"""Most parts that share a whole unevenly: the shaders cut in 32 bits, and the product
of two remainders has to fit."""
MOST_THREADGROUPS = 65535
"""Most threadgroups of work with fewer k tiles; other work may have one for each k tile
of it. More would stay idle."""
MOST_GROUPS = 8
"""Groups of stream-K ranges that work on neighbouring tiles (CUTLASS takes 8 too)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What a threadgroup computes at a time: m rows x n columns, k a k tile."""

    m: int
    n: int = TILE_N
    k: int = TILE_K

    def __post_init__(self) -> None:
        if self.m < 1 or self.n < 1 or self.k < 1 or self.n % 8 or self.k % 8:
            raise ValueError(
                f"a tile needs m >= 1 and positive multiples of 8 for n and k, "
                f"got {self}"
            )

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What one threadgroup does for one tile.

    Attributes:
        tile: The tile, numbered down the columns of tiles first.
        k_idx: Its first k tile.
        k_tile_count: How many k tiles it has.
        k_tiles: How many k tiles the whole tile has.
        slot: Which of the tile's splits it is, in ascending k.
    """

    tile: int
    k_idx: int
    k_tile_count: int
    k_tiles: int
    slot: int

    @property
    def is_first_split(self) -> bool:
        """Whether it begins where k begins."""
        return self.k_idx == 0

    @property
    def is_final_split(self) -> bool:
        """Whether it ends where k ends."""
        return self.k_idx + self.k_tile_count == self.k_tiles

    @property
    def requires_fixup(self) -> bool:
        """Whether other splits have to be added to it."""
        return self.k_tile_count != self.k_tiles


def balanced_cut(part: int, parts: int, total: int) -> int:
    """Returns where a part begins when parts differ by at most one."""
    return part * total // parts


def ceil_cut(part: int, parts: int, total: int) -> int:
    """Returns where a part begins when all have ceil(total / parts), as in Marlin.

    The last parts can be short, or empty.
    """
    return min(part * -(-total // parts), total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All work of a product, and who does which part of it.

    Attributes:
        strategy: Which of the ways of this file's first lines.
        tiles: Tiles of the result.
        k_tiles: K tiles in each of them.
        threadgroups: Threadgroups that share the work; some may stay idle.
        whole: Leading tiles that one threadgroup each computes alone.
        slices: Parts of a tile's k between which a cut may fall; stream_k: all k tiles.
        minimum: Fewest k tiles of a split, unless its whole tile has fewer.
        groups: Groups of ranges that cut their own tiles alike; group g has every
            tile of the rest whose number is g modulo `groups`.
        partition: "balanced", or "ceil" as in Marlin.
        tail: Tiles after the leading whole ones (follows from the fields above, as all
            below do).
        group_tiles: Tiles of each group.
        units: Slices of k of all tiles of a group: what its ranges are runs of.
        ranges: Ranges of each group; further threadgroups stay idle.
        is_split: Whether a tile may have several splits.
        pieces: Splits of all tiles: one a tile, one more for each cut inside of one.
            Where a minimum moves cuts to the borders of tiles, a few too many.
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
    tail: int = field(init=False, repr=False, compare=False)
    group_tiles: int = field(init=False, repr=False, compare=False)
    units: int = field(init=False, repr=False, compare=False)
    ranges: int = field(init=False, repr=False, compare=False)
    is_split: bool = field(init=False, repr=False, compare=False)
    pieces: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_values()
        # Asked for thousands of times while plans are compared.
        derive = partial(object.__setattr__, self)
        derive("tail", self.tiles - self.whole)
        derive("group_tiles", self.tail // self.groups)
        derive("units", self.group_tiles * self.slices)
        most = (self.threadgroups - self.whole) // self.groups
        derive("ranges", max(min(most, self.units // self.minimum), 1))
        derive("is_split", self._cuts_tiles())
        self._check_strategy()
        self._check_uneven()
        inside = self.groups * self._cuts_inside if self.is_split else 0
        derive("pieces", self.tiles + inside)

    def _check_values(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy={self.strategy!r} is not one of {STRATEGIES}")
        if self.partition not in PARTITIONS:
            raise ValueError(f"partition={self.partition!r} is not one of {PARTITIONS}")
        for name in ("tiles", "k_tiles", "minimum", "groups"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 1 <= self.slices <= self.k_tiles:
            raise ValueError(
                f"k_parallel={self.slices} is not between 1 and {self.k_tiles}, the "
                f"k tiles"
            )
        if self.threadgroups < 1:
            raise ValueError(f"num_threadgroups={self.threadgroups} must be at least 1")
        if self.threadgroups > max(MOST_THREADGROUPS, self.total):
            raise ValueError(
                f"num_threadgroups={self.threadgroups}, expected at most "
                f"{max(MOST_THREADGROUPS, self.total)} for {self.tiles} tiles of "
                f"{self.k_tiles} k tiles"
            )
        if not 0 <= self.whole <= self.tiles:
            raise ValueError(
                f"whole={self.whole} is not between 0 and {self.tiles}, the tiles"
            )

    def _check_strategy(self) -> None:
        """Refuses numbers that are another strategy's."""
        streams = self.strategy in ("stream_k", "hybrid")
        one_each = {
            "data_parallel": self.tiles,
            "hytis": self.tiles,
            "split_k": self.tiles * self.slices,
        }.get(self.strategy, self.threadgroups)
        least, most = {
            "data_parallel": (self.tiles, self.tiles),
            "hytis": (1, self.tiles - 1),
            "hybrid": (1, self.tiles - 1),
        }.get(self.strategy, (0, 0))
        if self.threadgroups != one_each:
            raise ValueError(
                f"{self.strategy} gives each of {one_each} pieces one threadgroup, got "
                f"num_threadgroups={self.threadgroups}"
            )
        if not least <= self.whole <= most:
            raise ValueError(
                f"whole={self.whole} is not between {least} and {most}, as "
                f"{self.strategy} with {self.tiles} tiles needs it"
            )
        if (
            self.slices != self.k_tiles
            if streams
            else (self.slices != 1 and self.strategy in ("data_parallel", "hytis"))
        ):
            raise ValueError(
                f"{self.strategy} cuts k into {self.k_tiles if streams else 1}, got "
                f"k_parallel={self.slices}"
            )
        if not streams and (self.minimum, self.groups) != (1, 1):
            raise ValueError(
                f"{self.strategy} has minimum=1 and groups=1, got "
                f"minimum={self.minimum}, groups={self.groups}"
            )
        if self.strategy != "stripe" and self.partition != "balanced":
            raise ValueError(
                f"{self.strategy} has partition='balanced', got {self.partition!r}"
            )
        if self.strategy == "hybrid" and self.threadgroups <= self.whole:
            raise ValueError(
                f"num_threadgroups={self.threadgroups} leaves none for the tiles after "
                f"the first whole={self.whole}"
            )
        if streams and (
            self.groups > MOST_GROUPS
            or self.tail % self.groups
            or (self.threadgroups - self.whole) % self.groups
        ):
            raise ValueError(
                f"groups={self.groups} must divide the {self.tail} tiles and the "
                f"{self.threadgroups - self.whole} threadgroups that share them, and "
                f"be at most {MOST_GROUPS}"
            )

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
    def total(self) -> int:
        """All k tiles of all tiles."""
        return self.tiles * self.k_tiles

    @property
    def slots(self) -> int:
        """Most splits that a tile can have, or one more.

        Inside a tile lie slices - 1 places to cut, and a cut at every mean range.
        """
        if not self.is_split:
            return 1
        parts, units = self.ranges, self.units
        if self.partition == "ceil":
            parts, units = 1, self._most_units
        cuts = -(-(self.slices - 1) * parts // units)
        return min(cuts + 1, self.k_tiles // self.minimum, self.ranges)

    @property
    def idle(self) -> int:
        """Threadgroups without work."""
        sharing = self.threadgroups - self.whole
        if not self.tail:
            return sharing
        busy = self._busy
        # A range is lost where both of its ends move to the same border.
        if self.units < self.ranges * (2 * self.minimum - 1):
            periods, lengths = self._period()
            busy -= periods * lengths.count(0)
        return sharing - self.groups * busy

    @property
    def is_single(self) -> bool:
        """Whether no threadgroup has more than one split, as far as `pieces` tells."""
        return self.pieces == self.threadgroups - self.idle

    @property
    def longest(self) -> int:
        """K tiles of the longest range."""
        return max(self.k_tiles if self.whole else 0, self.longest_of_tail)

    @property
    def longest_of_tail(self) -> int:
        """K tiles of the longest range after the leading whole tiles.

        Where slices are uneven, at most one k tile too many.
        """
        if not self.tail:
            return 0
        if self.minimum > 1:
            return max(self._period()[1])
        # Any run of balanced slices has the mean length, rounded up or down.
        return -(-self._most_units * self.k_tiles // self.slices)

    def range(self, threadgroup: int) -> tuple[int, int]:
        """Returns the k tiles [begin, end) of the line that a threadgroup owns."""
        if threadgroup < self.whole:
            begin = threadgroup * self.k_tiles
            return begin, begin + self.k_tiles
        member, group = divmod(threadgroup - self.whole, self.groups)
        start = (self.whole + group * self.group_tiles) * self.k_tiles
        if member >= self.ranges:
            return start, start
        return start + self.cut(member), start + self.cut(member + 1)

    def cut(self, member: int) -> int:
        """Returns where range `member` of a group begins, in k tiles of the group."""
        cut = balanced_cut if self.partition == "balanced" else ceil_cut
        tile, part = divmod(cut(member, self.ranges, self.units), self.slices)
        k_tile = balanced_cut(part, self.slices, self.k_tiles)
        # Too near the border of a tile to leave a split of the minimum: cut there.
        rest = self.k_tiles - k_tile
        if k_tile < self.minimum or rest < self.minimum:
            k_tile = 0 if k_tile < rest else self.k_tiles
        return tile * self.k_tiles + k_tile

    def owner(self, position: int) -> int:
        """Returns which range of a group has a k tile of it: the inverse of `cut`."""
        member = position * self.ranges // (self.group_tiles * self.k_tiles)
        while self.cut(member) > position:
            member -= 1
        while self.cut(member + 1) <= position:
            member += 1
        return member

    def splits(self, threadgroup: int) -> Iterator[Split]:
        """Yields what a threadgroup does, tile after tile."""
        position, end = self.range(threadgroup)
        while position < end:
            place, k_idx = divmod(position, self.k_tiles)
            count = min(end - position, self.k_tiles - k_idx)
            yield Split(
                tile=self.tile_at(place),
                k_idx=k_idx,
                k_tile_count=count,
                k_tiles=self.k_tiles,
                slot=self._slot(threadgroup, place) if k_idx else 0,
            )
            position += count

    def tile_at(self, place: int) -> int:
        """Returns which tile stands at a place of the line: groups are interleaved."""
        if place < self.whole:
            return place
        group, nth = divmod(place - self.whole, self.group_tiles)
        return self.whole + nth * self.groups + group

    def threadgroups_of(self, tile: int) -> list[int]:
        """Returns the threadgroups that compute a tile, in ascending k."""
        if tile < self.whole:
            return [tile]
        nth, group = divmod(tile - self.whole, self.groups)
        first = self.owner(nth * self.k_tiles)
        last = self.owner((nth + 1) * self.k_tiles - 1)
        return [
            self.whole + member * self.groups + group
            for member in range(first, last + 1)
        ]

    def _slot(self, threadgroup: int, place: int) -> int:
        member = (threadgroup - self.whole) // self.groups
        nth = (place - self.whole) % self.group_tiles
        return member - self.owner(nth * self.k_tiles)

    def _cuts_tiles(self) -> bool:
        if self.slices == 1 or self.k_tiles < 2 * self.minimum:
            return False
        if self.partition == "ceil":
            return self._most_units % self.slices != 0
        each, rest = divmod(self.units, self.ranges)
        return rest != 0 or each % self.slices != 0

    def _period(self) -> tuple[int, list[int]]:
        """Returns how often the ranges of a group repeat, and the k tiles of each.

        Where so many ranges end that they have a whole number of tiles.
        """
        periods = gcd(self.ranges, self.group_tiles)
        cuts = [self.cut(member) for member in range(self.ranges // periods + 1)]
        return periods, [end - begin for begin, end in pairwise(cuts)]

    @property
    def _cuts_inside(self) -> int:
        """Cuts of a group that do not fall on the border of a tile."""
        if self.partition == "ceil":
            cuts = self._busy - 1
            return cuts - cuts // (self.slices // gcd(self.slices, self._most_units))
        # Cut i rounds down to a border where i * group_tiles modulo ranges, a multiple
        # of their common divisor, is below ranges / slices.
        step = gcd(self.ranges, self.group_tiles)
        return self.ranges - step * -(-self.ranges // (step * self.slices))

    @property
    def _most_units(self) -> int:
        return -(-self.units // self.ranges)

    @property
    def _busy(self) -> int:
        """Ranges of a group that have units."""
        by_ceil = self.partition == "ceil"
        return -(-self.units // self._most_units) if by_ceil else self.ranges


def data_parallel(tiles: int, k_tiles: int) -> Work:
    """Returns the work in which each threadgroup computes one whole tile."""
    return Work(
        strategy="data_parallel",
        tiles=tiles,
        k_tiles=k_tiles,
        threadgroups=tiles,
        whole=tiles,
    )


def locality_groups(tiles: int, threadgroups: int) -> int:
    """Returns the most groups that divide both, searched downwards from 8."""
    return next(
        groups
        for groups in range(min(MOST_GROUPS, tiles, threadgroups), 0, -1)
        if tiles % groups == 0 and threadgroups % groups == 0
    )


def tile_position(tile: int, m_tiles: int) -> tuple[int, int]:
    """Returns (row, column) of a tile that is numbered down the columns first."""
    return tile % m_tiles, tile // m_tiles
