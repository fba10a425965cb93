"""The divisions of a product's work that a search compares, by strategy."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from mlx_marlin.planning.work.work import Partition, Work, locality_groups

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

WideWork = tuple[Work, int]
"""Work, and the number of tiles side by side in its wide tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileGrid:
    """The tiles to divide and the number of cores to divide them among."""

    m_tiles: int  # Tiles along the rows of a product
    n_tiles: int  # Tiles along the columns of a product
    batch: int  # Number of products
    k_tiles: int  # K tiles of a tile
    trips: int  # Main-loop iterations of a k tile
    cores: int  # GPU cores
    # Simdgroups along k, or their upper bound. The width of a wide tile must divide it
    widest: int
    x_bytes: int  # Bytes of the activations

    @property
    def tiles(self) -> int:
        """Tiles of the result."""
        return self.batch * self.m_tiles * self.n_tiles


def data_parallel(tiles: int, k_tiles: int) -> Work:
    """Returns work in which every threadgroup computes one whole tile."""
    return Work(
        strategy="data_parallel",
        tiles=tiles,
        k_tiles=k_tiles,
        threadgroups=tiles,
        whole=tiles,
    )


def works(grid: TileGrid) -> Iterator[WideWork]:
    """Yields the divisions of the work that a search compares, at least one.

    A generator that is given fields yields the divisions that have them. With
    `forced`, it yields at least one where its strategy is possible.
    """
    yield data_parallel(grid.tiles, grid.k_tiles), 1
    yield from stripes(grid)
    yield from slices_of_k(grid)
    yield from streams(grid)
    yield from hybrids(grid)
    yield from wide_tiles(grid)


def whole_tiles(grid: TileGrid, *, forced: bool = False) -> Iterator[WideWork]:
    """Yields the only division of `data_parallel`."""
    yield data_parallel(grid.tiles, grid.k_tiles), 1


def stripes(
    grid: TileGrid,
    *,
    k_parallel: int | None = None,
    num_threadgroups: int | None = None,
    partition: Partition = "balanced",
    forced: bool = False,
) -> Iterator[WideWork]:
    """Yields the divisions of `stripe`."""
    for slices in _even_slices(grid) if k_parallel is None else [k_parallel]:
        units = grid.tiles * slices
        targets = [grid.cores * count for count in THREADGROUPS_PER_CORE]
        # At least one, so that the strategy exists for every product.
        counts = [target for target in targets if target < units] or [units]
        for count in counts if num_threadgroups is None else [num_threadgroups]:
            work = Work(
                strategy="stripe",
                tiles=grid.tiles,
                k_tiles=grid.k_tiles,
                threadgroups=count,
                slices=slices,
                partition=partition,
            )
            yield work, 1


def slices_of_k(
    grid: TileGrid, *, k_parallel: int | None = None, forced: bool = False
) -> Iterator[WideWork]:
    """Yields the divisions of `split_k`: each target has one unit per threadgroup."""
    counts = {
        min(-(-grid.cores * each // grid.tiles), grid.k_tiles)
        for each in THREADGROUPS_PER_CORE
    }
    # One slice is equal to `data_parallel`.
    counts = counts | {1} if forced else counts - {1}
    for slices in sorted(counts) if k_parallel is None else [k_parallel]:
        work = Work(
            strategy="split_k",
            tiles=grid.tiles,
            k_tiles=grid.k_tiles,
            threadgroups=grid.tiles * slices,
            slices=slices,
        )
        yield work, 1


def _even_slices(grid: TileGrid) -> list[int]:
    """Returns the smallest slice counts that load a target's threadgroups equally.

    If such slices would be too short, a target gets the slice count of `slices_of_k`.
    """
    most = max(grid.k_tiles * grid.trips // SHORTEST_TRIPS, 1)
    slices = {1}
    for per_core in STREAMS_PER_CORE:
        target = grid.cores * per_core
        even = target // gcd(target, grid.tiles)
        least = min(-(-target // grid.tiles), grid.k_tiles)
        slices.add(even if even <= most else least)
    return sorted(slices)


def hybrids(
    grid: TileGrid,
    *,
    whole: int | None = None,
    num_threadgroups: int | None = None,
    minimum: int | None = None,
    groups: int | None = None,
    forced: bool = False,
) -> Iterator[WideWork]:
    """Yields full waves of whole tiles, with the last wave and the rest as streams."""
    tiles, targets = grid.tiles, [grid.cores * count for count in STREAMS_PER_CORE]
    uneven = [each for each in targets if tiles > 2 * each and tiles % each]
    fitting = sorted({(tiles // each - 1) * each for each in uneven})
    if forced and not fitting:
        fitting = [tiles // 2]
    for count in fitting if whole is None else [whole]:
        yield from streams(
            grid,
            whole=count,
            num_threadgroups=num_threadgroups,
            minimum=minimum,
            groups=groups,
            forced=forced,
        )


def streams(
    grid: TileGrid,
    *,
    whole: int | None = None,
    num_threadgroups: int | None = None,
    minimum: int | None = None,
    groups: int | None = None,
    forced: bool = False,
) -> Iterator[WideWork]:
    """Yields the divisions of `stream_k`, or with `whole` some of `hybrid`."""
    first = whole or 0
    minimum = -(-MINIMUM_TRIPS // grid.trips) if minimum is None else minimum
    total = (grid.tiles - first) * grid.k_tiles
    targets = [grid.cores * count for count in STREAMS_PER_CORE]
    counts = [target for target in targets if target <= total // max(minimum, 1)]
    if forced and not counts:
        counts = [min(grid.cores, max(total, 1))]
    if num_threadgroups is not None:
        counts = [num_threadgroups - first]
    for count in counts:
        work = Work(
            strategy="stream_k" if whole is None else "hybrid",
            tiles=grid.tiles,
            k_tiles=grid.k_tiles,
            threadgroups=first + count,
            whole=first,
            slices=grid.k_tiles,
            minimum=minimum,
            groups=_groups(grid, first, count) if groups is None else groups,
        )
        yield work, 1


def _groups(grid: TileGrid, whole: int, streams: int) -> int:
    """Returns the number of groups of ranges that read the same k of x together.

    Activations that fit in the L2 cache need no grouping.
    """
    if grid.x_bytes <= LEAST_CACHE or min(grid.tiles - whole, streams) <= 0:
        return 1
    return locality_groups(grid.tiles - whole, streams)


def wide_tiles(
    grid: TileGrid,
    *,
    simdgroups_n: int | None = None,
    whole: int | None = None,
    forced: bool = False,
) -> Iterator[WideWork]:
    """Yields the most wide tiles that load all cores equally, then narrow ones."""
    if grid.batch > 1:
        if forced:
            raise ValueError(f"hytis takes one weight, got batch={grid.batch}")
        return
    widths = [
        width for width in WIDTHS if width < grid.n_tiles and grid.widest % width == 0
    ]
    if forced and not widths:
        widths = [WIDTHS[0]]
    for width in widths if simdgroups_n is None else [simdgroups_n]:
        most = (grid.n_tiles - 1) // width
        columns = most * grid.m_tiles // grid.cores * grid.cores // grid.m_tiles
        if forced and columns == 0:
            columns = max(most, 1)
        wholes = [columns * grid.m_tiles] if columns else []
        for count in wholes if whole is None else [whole]:
            yield _wide_work(grid, width, count), width


def _wide_work(grid: TileGrid, width: int, whole: int) -> Work:
    narrow = grid.n_tiles - whole // grid.m_tiles * width
    if narrow < 1:
        raise ValueError(
            f"whole={whole} tiles of simdgroups_n={width} leave no narrow "
            f"ones, there are {grid.n_tiles} across the columns"
        )
    tiles = whole + narrow * grid.m_tiles
    return Work(
        strategy="hytis",
        tiles=tiles,
        k_tiles=grid.k_tiles,
        threadgroups=tiles,
        whole=whole,
    )
