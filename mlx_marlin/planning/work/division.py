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

from math import inf
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mlx_marlin.planning.work.work import Work

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
