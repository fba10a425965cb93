"""The divisions of a product's work that a search compares, by strategy."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from mlx_marlin.planning.work import (
    Work,
    data_parallel,
)
from mlx_marlin.planning.work.division import (
    STRATEGIES,
    Strategy,
    locality_groups,
)

THREADGROUPS_PER_CORE = (1, 2, 4, 8, 16)
"""Target numbers of threadgroups per core for stripe and split_k."""
STREAMS_PER_CORE = (1, 2, 4)
"""Target numbers of threadgroups per core for runs of k tiles. These are even, so few
and long runs suffice."""
MINIMUM_TRIPS = 8
"""Main-loop iterations that a stream-K split should have: one for each of eight
simdgroups (CUTLASS uses 8 k tiles)."""
SHORTEST_TRIPS = 4
"""Main-loop iterations that a slice of k should have if runs of slices are even."""
LEAST_CACHE = 256 * 1024
"""Bytes of the smallest L2 cache reported for an M1 Pro; the sources disagree."""
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
"""The plan fields that a caller may override, by strategy."""
WORK_OVERRIDES = frozenset({"strategy"}).union(*ACCEPTED.values())
"""The plan fields that determine how work is divided."""

Overrides = Mapping[str, Any]
WideWork = tuple[Work, int]
"""Work, and the number of tiles side by side in its wide tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileGrid:
    """The tiles to divide and the number of cores to divide them among.

    Attributes:
        m_tiles: Tiles along the rows of a product.
        n_tiles: Tiles along the columns of a product.
        batch: Number of products.
        k_tiles: K tiles of a tile.
        trips: Main-loop iterations of a k tile.
        cores: GPU cores.
        widest: Simdgroups along k, or their upper bound. The width of a wide tile must
            divide it.
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
        """Returns numbers of threadgroups that load all cores equally."""
        return [self.cores * count for count in per_core]


def works(grid: TileGrid, overrides: Overrides) -> Iterator[WideWork]:
    """Yields the divisions of the work that satisfy the overrides, at least one.

    Raises:
        ValueError: If the given strategy, or else every strategy, rejects them.
    """
    given = overrides.get("strategy")
    if given is not None:
        yield from _of_strategy(given, grid, overrides)
        return
    fields = overrides.keys() & WORK_OVERRIDES
    fitting = [name for name in STRATEGIES if fields <= ACCEPTED[name]]
    if not fitting:
        raise ValueError(f"no strategy takes all of {', '.join(sorted(fields))}")
    if fields:
        yield from _of_any(fitting, grid, overrides)
        return
    for strategy in fitting:
        yield from _of_strategy(strategy, grid, overrides)


def _of_strategy(
    strategy: Strategy, grid: TileGrid, overrides: Overrides
) -> Iterator[WideWork]:
    if strategy not in GENERATORS:
        raise ValueError(f"strategy={strategy!r} is not one of {STRATEGIES}")
    others = overrides.keys() & WORK_OVERRIDES - ACCEPTED[strategy] - {"strategy"}
    for field in sorted(others):
        raise ValueError(f"{strategy} does not take {field}={overrides[field]!r}")
    for work in GENERATORS[strategy](grid, overrides):
        yield work if isinstance(work, tuple) else (work, 1)


def _of_any(
    fitting: list[Strategy], grid: TileGrid, overrides: Overrides
) -> list[WideWork]:
    """Returns the divisions of all strategies that accept the overrides.

    Raises:
        ValueError: If none does; the error is that of the first strategy.
    """
    found: list[WideWork] = []
    errors: list[ValueError] = []
    for strategy in fitting:
        try:
            found += _of_strategy(strategy, grid, {**overrides, "strategy": strategy})
        except ValueError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def _data_parallel(grid: TileGrid, _: Overrides) -> Iterator[Work]:
    yield data_parallel(grid.tiles, grid.k_tiles)


def _stripe(grid: TileGrid, overrides: Overrides) -> Iterator[Work]:
    for slices in _override(overrides, "k_parallel", _even_slices(grid)):
        units = grid.tiles * slices
        targets = grid.targets(THREADGROUPS_PER_CORE)
        # At least one, so that the strategy exists for every product.
        counts = [target for target in targets if target < units] or [units]
        for count in _override(overrides, "num_threadgroups", counts):
            yield Work(
                strategy="stripe",
                tiles=grid.tiles,
                k_tiles=grid.k_tiles,
                threadgroups=count,
                slices=slices,
                partition=overrides.get("partition", "balanced"),
            )


def _split_k(grid: TileGrid, overrides: Overrides) -> Iterator[Work]:
    for slices in _slices(grid, overrides):
        if (
            slices == 1
            and "strategy" not in overrides
            and "k_parallel" not in overrides
        ):
            continue  # equal to data_parallel
        yield Work(
            strategy="split_k",
            tiles=grid.tiles,
            k_tiles=grid.k_tiles,
            threadgroups=grid.tiles * slices,
            slices=slices,
        )


def _slices(grid: TileGrid, overrides: Overrides) -> list[int]:
    """Returns the slice counts that give each target one unit per threadgroup."""
    slices = {
        min(-(-target // grid.tiles), grid.k_tiles)
        for target in grid.targets(THREADGROUPS_PER_CORE)
    }
    return _override(overrides, "k_parallel", sorted({1, *slices}))


def _even_slices(grid: TileGrid) -> list[int]:
    """Returns the smallest slice counts that load a target's threadgroups equally.

    If such slices would be too short, a target gets the slice count of `_slices`.
    """
    most = max(grid.k_tiles * grid.trips // SHORTEST_TRIPS, 1)
    slices = {1}
    for target in grid.targets(STREAMS_PER_CORE):
        even = target // gcd(target, grid.tiles)
        least = min(-(-target // grid.tiles), grid.k_tiles)
        slices.add(even if even <= most else least)
    return sorted(slices)


def _stream_k(grid: TileGrid, overrides: Overrides) -> Iterator[Work]:
    yield from _streams("stream_k", grid, 0, overrides)


def _hybrid(grid: TileGrid, overrides: Overrides) -> Iterator[Work]:
    """Yields full waves of whole tiles, with the last wave and the rest as streams."""
    wholes = {
        (grid.tiles // target - 1) * target
        for target in grid.targets(STREAMS_PER_CORE)
        if grid.tiles % target
    }
    fitting = sorted(whole for whole in wholes if whole > 0)
    if "strategy" in overrides and not fitting:
        fitting = [grid.tiles // 2]
    for whole in _override(overrides, "whole", fitting):
        yield from _streams("hybrid", grid, whole, overrides)


def _streams(
    strategy: Strategy, grid: TileGrid, whole: int, overrides: Overrides
) -> Iterator[Work]:
    minimum = overrides.get("minimum", -(-MINIMUM_TRIPS // grid.trips))
    total = (grid.tiles - whole) * grid.k_tiles
    targets = grid.targets(STREAMS_PER_CORE)
    counts = [target for target in targets if target <= total // max(minimum, 1)]
    if "strategy" in overrides and not counts:
        counts = [min(grid.cores, max(total, 1))]
    for count in _override(
        overrides, "num_threadgroups", [whole + count for count in counts]
    ):
        yield Work(
            strategy=strategy,
            tiles=grid.tiles,
            k_tiles=grid.k_tiles,
            threadgroups=count,
            whole=whole,
            slices=grid.k_tiles,
            minimum=minimum,
            groups=_override(overrides, "groups", [_groups(grid, whole, count)])[0],
        )


def _groups(grid: TileGrid, whole: int, threadgroups: int) -> int:
    """Returns the number of groups of ranges that read the same k of x together.

    Activations that fit in the L2 cache need no grouping.
    """
    if grid.x_bytes <= LEAST_CACHE or threadgroups <= whole:
        return 1
    return locality_groups(grid.tiles - whole, threadgroups - whole)


def _hytis(grid: TileGrid, overrides: Overrides) -> Iterator[WideWork]:
    """Yields the most wide tiles that load all cores equally, then narrow ones."""
    if grid.batch > 1:
        if "strategy" in overrides:
            raise ValueError(f"hytis takes one weight, got batch={grid.batch}")
        return
    widths = [
        width for width in WIDTHS if width < grid.n_tiles and grid.widest % width == 0
    ]
    if "strategy" in overrides and not widths:
        widths = [WIDTHS[0]]
    for width in _override(overrides, "simdgroups_n", widths):
        most = (grid.n_tiles - 1) // width
        columns = most * grid.m_tiles // grid.cores * grid.cores // grid.m_tiles
        if "strategy" in overrides and columns == 0:
            columns = max(most, 1)
        wholes = [columns * grid.m_tiles] if columns else []
        for whole in _override(overrides, "whole", wholes):
            narrow = grid.n_tiles - whole // grid.m_tiles * width
            if narrow < 1:
                raise ValueError(
                    f"whole={whole} tiles of simdgroups_n={width} leave no narrow "
                    f"ones, there are {grid.n_tiles} across the columns"
                )
            yield (
                Work(
                    strategy="hytis",
                    tiles=whole + narrow * grid.m_tiles,
                    k_tiles=grid.k_tiles,
                    threadgroups=whole + narrow * grid.m_tiles,
                    whole=whole,
                ),
                width,
            )


def _override(overrides: Overrides, field: str, default: list[int]) -> list[int]:
    return [overrides[field]] if field in overrides else default


GENERATORS: dict[
    Strategy, Callable[[TileGrid, Overrides], Iterator[Work] | Iterator[WideWork]]
] = {
    "data_parallel": _data_parallel,
    "stripe": _stripe,
    "split_k": _split_k,
    "stream_k": _stream_k,
    "hybrid": _hybrid,
    "hytis": _hytis,
}
"""The generator of divisions of each strategy."""
