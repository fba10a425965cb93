"""How a product's k tiles are divided among threadgroups: the strategies.

All k tiles of all tiles form one sequence, in which those of a tile are adjacent. A
threadgroup owns one contiguous range of it. The strategies differ in where they cut:

    data_parallel  one whole tile per threadgroup
    stripe         runs of units; a unit is one of `slices` slices of a tile
    split_k        one unit per threadgroup
    stream_k       runs of k tiles, which may end anywhere
    hybrid         the first `whole` tiles one per threadgroup, the rest as stream_k
    hytis          `whole` wide tiles, then narrow tiles, one per threadgroup
"""

from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How the k tiles of a product are divided among threadgroups.

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

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ValueError if a value is out of range or does not fit the strategy."""
        self._check_values()
        self._check_strategy()

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
        """Rejects values that the strategy does not allow."""
        self._check_threadgroups()
        self._check_whole()
        self._check_slices()
        if self.strategy != "stripe" and self.partition != "balanced":
            raise ValueError(
                f"{self.strategy} has partition='balanced', got {self.partition!r}"
            )
        if self.strategy == "hybrid" and self.threadgroups <= self.whole:
            raise ValueError(
                f"num_threadgroups={self.threadgroups} leaves none for the tiles after "
                f"the first whole={self.whole}"
            )
        if self._is_streamed:
            self._check_groups()

    @property
    def _is_streamed(self) -> bool:
        return self.strategy in ("stream_k", "hybrid")

    def _check_threadgroups(self) -> None:
        expected = {
            "data_parallel": self.tiles,
            "hytis": self.tiles,
            "split_k": self.tiles * self.slices,
        }.get(self.strategy, self.threadgroups)
        if self.threadgroups != expected:
            raise ValueError(
                f"{self.strategy} gives each of {expected} pieces one threadgroup, got "
                f"num_threadgroups={self.threadgroups}"
            )

    def _check_whole(self) -> None:
        least, most = {
            "data_parallel": (self.tiles, self.tiles),
            "hytis": (1, self.tiles - 1),
            "hybrid": (1, self.tiles - 1),
        }.get(self.strategy, (0, 0))
        if not least <= self.whole <= most:
            raise ValueError(
                f"whole={self.whole} is not between {least} and {most}, as "
                f"{self.strategy} with {self.tiles} tiles needs it"
            )

    def _check_slices(self) -> None:
        streams = self._is_streamed
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

    def _check_groups(self) -> None:
        tail, shared = self.tiles - self.whole, self.threadgroups - self.whole
        if self.groups > MOST_GROUPS or tail % self.groups or shared % self.groups:
            raise ValueError(
                f"groups={self.groups} must divide the {tail} tiles and the {shared} "
                f"threadgroups that share them, and be at most {MOST_GROUPS}"
            )

    @property
    def total(self) -> int:
        """Number of k tiles of all tiles."""
        return self.tiles * self.k_tiles


def locality_groups(tiles: int, threadgroups: int) -> int:
    """Returns the largest number of groups, at most 8, that divides both numbers."""
    return next(
        groups
        for groups in range(min(MOST_GROUPS, tiles, threadgroups), 0, -1)
        if tiles % groups == 0 and threadgroups % groups == 0
    )
