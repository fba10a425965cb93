"""The ways to cut a product's work that are worth comparing, strategy by strategy."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from mlx_marlin.planning.work import (
    STRATEGIES,
    Strategy,
    Work,
    data_parallel,
    locality_groups,
)

THREADGROUPS_PER_CORE = (1, 2, 4, 8, 16)
"""Threadgroups of each core that runs of units, and slices of k, aim at."""
STREAMS_PER_CORE = (1, 2, 4)
"""Likewise for runs of k tiles: they are even, so few and long ones do."""
MINIMUM_TRIPS = 8
"""Trips of the main loop that a split of a stream should have: each of eight simdgroups
then has one (CUTLASS takes 8 k tiles too)."""
SHORTEST_TRIPS = 4
"""Trips that a slice of k should have where runs of slices are shared out evenly."""
LEAST_CACHE = 256 * 1024
"""Bytes of the smallest second-level cache that was reported, of an M1 Pro; the sources
do not agree on any."""
WIDTHS = (2, 4)
"""Tiles side by side in a wide tile."""

ACCEPTED: dict[Strategy, frozenset[str]] = {
    "data_parallel": frozenset(),
    "stripe": frozenset({"partition", "k_parallel", "num_threadgroups"}),
    "split_k": frozenset({"k_parallel"}),
    "stream_k": frozenset({"num_threadgroups", "minimum", "groups"}),
    "hybrid": frozenset({"num_threadgroups", "whole", "minimum", "groups"}),
    "hytis": frozenset({"whole", "simdgroups_n"}),
}
"""The fields of a plan that a strategy leaves to be wished."""
WORK_WISHES = frozenset({"strategy"}).union(*ACCEPTED.values())
"""The fields that say how work is cut."""

Wished = Mapping[str, Any]
Wide = tuple[Work, int]
"""Work, and the tiles side by side in its wide tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is to be cut, and for how many cores.

    Attributes:
        m_tiles: Tiles down the rows.
        n_tiles: Tiles across the columns.
        batch: Products, each of so many tiles.
        k_tiles: K tiles of a tile.
        trips: Trips of the main loop for a k tile.
        cores: GPU cores.
        widest: Simdgroups along k, or the most that there may be: tiles side by side
            divide them.
        x_bytes: Bytes of the activations.
    """

    m_tiles: int
    n_tiles: int
    batch: int
    k_tiles: int
    trips: int
    cores: int
    widest: int
    x_bytes: int

    @property
    def tiles(self) -> int:
        """Tiles of the result."""
        return self.batch * self.m_tiles * self.n_tiles

    def targets(self, per_core: tuple[int, ...]) -> list[int]:
        """Returns numbers of threadgroups that load all cores alike."""
        return [self.cores * count for count in per_core]


def works(space: Space, overrides: Wished) -> Iterator[Wide]:
    """Yields the ways to cut the work that have the wished fields, at least one.

    Raises:
        ValueError: If no strategy, or not the wished one, can have them.
    """
    wished = overrides.get("strategy")
    if wished is not None:
        yield from _of_strategy(wished, space, overrides)
        return
    fields = overrides.keys() & WORK_WISHES
    fitting = [each for each in STRATEGIES if fields <= ACCEPTED[each]]
    if not fitting:
        raise ValueError(f"no strategy takes all of {', '.join(sorted(fields))}")
    if fields:
        yield from _of_any(fitting, space, overrides)
        return
    for strategy in fitting:
        yield from _of_strategy(strategy, space, overrides)


def _of_strategy(strategy: Strategy, space: Space, overrides: Wished) -> Iterator[Wide]:
    if strategy not in WAYS:
        raise ValueError(f"strategy={strategy!r} is not one of {STRATEGIES}")
    others = overrides.keys() & WORK_WISHES - ACCEPTED[strategy] - {"strategy"}
    for field in sorted(others):
        raise ValueError(f"{strategy} does not take {field}={overrides[field]!r}")
    for work in WAYS[strategy](space, overrides):
        yield work if isinstance(work, tuple) else (work, 1)


def _of_any(fitting: list[Strategy], space: Space, overrides: Wished) -> list[Wide]:
    """Returns what some strategies make of wishes; one that cannot is left out."""
    found: list[Wide] = []
    refusals: list[ValueError] = []
    for strategy in fitting:
        try:
            found += _of_strategy(strategy, space, {**overrides, "strategy": strategy})
        except ValueError as refusal:
            refusals.append(refusal)
    if not found:
        raise refusals[0]
    return found


def _data_parallel(space: Space, _: Wished) -> Iterator[Work]:
    yield data_parallel(space.tiles, space.k_tiles)


def _stripe(space: Space, overrides: Wished) -> Iterator[Work]:
    for slices in _wished(overrides, "k_parallel", _even_slices(space)):
        units = space.tiles * slices
        targets = space.targets(THREADGROUPS_PER_CORE)
        # At least one, so that the strategy can be had for every product.
        counts = [target for target in targets if target < units] or [units]
        for count in _wished(overrides, "num_threadgroups", counts):
            yield Work(
                strategy="stripe",
                tiles=space.tiles,
                k_tiles=space.k_tiles,
                threadgroups=count,
                slices=slices,
                partition=overrides.get("partition", "balanced"),
            )


def _split_k(space: Space, overrides: Wished) -> Iterator[Work]:
    for slices in _slices(space, overrides):
        if (
            slices == 1
            and "strategy" not in overrides
            and "k_parallel" not in overrides
        ):
            continue  # that is data_parallel
        yield Work(
            strategy="split_k",
            tiles=space.tiles,
            k_tiles=space.k_tiles,
            threadgroups=space.tiles * slices,
            slices=slices,
        )


def _slices(space: Space, overrides: Wished) -> list[int]:
    """Returns the slices of k that give every target a unit each."""
    slices = {
        min(-(-target // space.tiles), space.k_tiles)
        for target in space.targets(THREADGROUPS_PER_CORE)
    }
    return _wished(overrides, "k_parallel", sorted({1, *slices}))


def _even_slices(space: Space) -> list[int]:
    """Returns the fewest slices of k of which every target has the same number.

    A target that needs slices too short for a split has the slices of `_slices`.
    """
    most = max(space.k_tiles * space.trips // SHORTEST_TRIPS, 1)
    slices = {1}
    for target in space.targets(STREAMS_PER_CORE):
        even = target // gcd(target, space.tiles)
        least = min(-(-target // space.tiles), space.k_tiles)
        slices.add(even if even <= most else least)
    return sorted(slices)


def _stream_k(space: Space, overrides: Wished) -> Iterator[Work]:
    yield from _streams("stream_k", space, 0, overrides)


def _hybrid(space: Space, overrides: Wished) -> Iterator[Work]:
    """Yields whole waves of tiles, and the rest with one wave more as streams."""
    wholes = {
        (space.tiles // target - 1) * target
        for target in space.targets(STREAMS_PER_CORE)
        if space.tiles % target
    }
    fitting = sorted(whole for whole in wholes if whole > 0)
    if "strategy" in overrides and not fitting:
        fitting = [space.tiles // 2]
    for whole in _wished(overrides, "whole", fitting):
        yield from _streams("hybrid", space, whole, overrides)


def _streams(
    strategy: Strategy, space: Space, whole: int, overrides: Wished
) -> Iterator[Work]:
    minimum = overrides.get("minimum", -(-MINIMUM_TRIPS // space.trips))
    total = (space.tiles - whole) * space.k_tiles
    targets = space.targets(STREAMS_PER_CORE)
    counts = [target for target in targets if target <= total // max(minimum, 1)]
    if "strategy" in overrides and not counts:
        counts = [min(space.cores, max(total, 1))]
    for count in _wished(
        overrides, "num_threadgroups", [whole + each for each in counts]
    ):
        yield Work(
            strategy=strategy,
            tiles=space.tiles,
            k_tiles=space.k_tiles,
            threadgroups=count,
            whole=whole,
            slices=space.k_tiles,
            minimum=minimum,
            groups=_wished(overrides, "groups", [_groups(space, whole, count)])[0],
        )


def _groups(space: Space, whole: int, threadgroups: int) -> int:
    """Returns the groups of ranges that read the same k of x at a time.

    What one second-level cache holds needs no order.
    """
    if space.x_bytes <= LEAST_CACHE or threadgroups <= whole:
        return 1
    return locality_groups(space.tiles - whole, threadgroups - whole)


def _hytis(space: Space, overrides: Wished) -> Iterator[Wide]:
    """Yields as many wide tiles as load all cores alike, then narrow ones."""
    if space.batch > 1:
        if "strategy" in overrides:
            raise ValueError(f"hytis takes one weight, got batch={space.batch}")
        return
    widths = [
        width for width in WIDTHS if width < space.n_tiles and space.widest % width == 0
    ]
    if "strategy" in overrides and not widths:
        widths = [WIDTHS[0]]
    for width in _wished(overrides, "simdgroups_n", widths):
        most = (space.n_tiles - 1) // width
        columns = most * space.m_tiles // space.cores * space.cores // space.m_tiles
        if "strategy" in overrides and columns == 0:
            columns = max(most, 1)
        wholes = [columns * space.m_tiles] if columns else []
        for whole in _wished(overrides, "whole", wholes):
            narrow = space.n_tiles - whole // space.m_tiles * width
            if narrow < 1:
                raise ValueError(
                    f"whole={whole} tiles of simdgroups_n={width} leave no narrow "
                    f"ones, there are {space.n_tiles} across the columns"
                )
            yield (
                Work(
                    strategy="hytis",
                    tiles=whole + narrow * space.m_tiles,
                    k_tiles=space.k_tiles,
                    threadgroups=whole + narrow * space.m_tiles,
                    whole=whole,
                ),
                width,
            )


def _wished(overrides: Wished, field: str, otherwise: list[int]) -> list[int]:
    return [overrides[field]] if field in overrides else otherwise


WAYS: dict[Strategy, Callable[[Space, Wished], Iterator[Work] | Iterator[Wide]]] = {
    "data_parallel": _data_parallel,
    "stripe": _stripe,
    "split_k": _split_k,
    "stream_k": _stream_k,
    "hybrid": _hybrid,
    "hytis": _hytis,
}
"""How each strategy cuts."""
