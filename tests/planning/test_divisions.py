"""The divisions that a search compares are those of their rules, found by trying."""

from dataclasses import replace
from itertools import count, product
from math import ceil
from typing import Any

import pytest

from mlx_marlin.planning import explicit
from mlx_marlin.planning.work.decompositions import (
    TileGrid,
    hybrids,
    slices_of_k,
    streams,
    stripes,
    wide_tiles,
    works,
)
from mlx_marlin.planning.work.work import Work

GRIDS = [
    TileGrid(
        m_tiles=m, n_tiles=n, batch=b, k_tiles=k, trips=t, cores=c, widest=8, x_bytes=64
    )
    for m, n, b, k, t, c in product((1, 3), (1, 7, 40), (1, 2), (5, 64), (2,), (8,))
]


def test_slices_of_k_are_the_fewest_that_load_a_target() -> None:
    for grid in GRIDS:
        fewest = {
            next(
                (s for s in range(1, grid.k_tiles) if s * grid.tiles >= target),
                grid.k_tiles,
            )
            for target in (grid.cores * count for count in (1, 2, 4, 8, 16))
        }

        compared = [work for work, _ in slices_of_k(grid)]
        forced = [work for work, _ in slices_of_k(grid, forced=True)]

        assert [work.slices for work in compared] == sorted(fewest - {1}), grid
        assert [work.slices for work in forced] == sorted(fewest | {1}), grid
        assert {work.threadgroups // work.slices for work in forced} == {grid.tiles}, (
            grid
        )
        asked = [work.slices for work, _ in slices_of_k(grid, k_parallel=1)]
        assert asked == [1], grid


def test_streams_load_the_cores_evenly_with_runs_that_are_long_enough() -> None:
    for grid in GRIDS:
        minimum = ceil(8 / grid.trips)
        fitting = [
            threadgroups
            for threadgroups in (grid.cores, 2 * grid.cores, 4 * grid.cores)
            if threadgroups * minimum <= grid.tiles * grid.k_tiles
        ]

        found = [work.threadgroups for work, _ in streams(grid)]
        forced = [work.threadgroups for work, _ in streams(grid, forced=True)]

        assert found == fitting, grid
        assert forced == (fitting or [min(grid.cores, grid.tiles * grid.k_tiles)]), grid
        assert {work.minimum for work, _ in streams(grid)} <= {minimum}, grid


def test_hybrids_leave_the_last_wave_and_the_rest_to_streams() -> None:
    for grid in (grid for grid in GRIDS if grid.tiles > 1):
        wholes = {
            grid.tiles - grid.tiles % wave - wave
            for wave in (grid.cores, 2 * grid.cores, 4 * grid.cores)
            if grid.tiles % wave
        }

        found = {work.whole for work, _ in hybrids(grid, forced=True)}

        assert found == (
            {whole for whole in wholes if whole > 0} or {grid.tiles // 2}
        ), grid


def test_stripes_have_the_fewest_slices_that_load_a_target_evenly() -> None:
    for grid in GRIDS:
        longest = max(1, grid.k_tiles * grid.trips // 4)  # four trips a slice
        targets = [grid.cores * per_core for per_core in (1, 2, 4, 8, 16)]
        slices = {1}
        for target in targets[:3]:
            even = next(s for s in count(1) if s * grid.tiles % target == 0)
            fewest = next(s for s in count(1) if s * grid.tiles >= target)
            slices.add(even if even <= longest else min(fewest, grid.k_tiles))
        expected = [
            (each, target)
            for each in sorted(slices)
            for target in [target for target in targets if target < each * grid.tiles]
            or [each * grid.tiles]
        ]
        wished = Work(
            strategy="stripe",
            tiles=grid.tiles,
            k_tiles=grid.k_tiles,
            threadgroups=3,
            partition="ceil",
        )

        found = [(work.slices, work.threadgroups) for work, _ in stripes(grid)]
        asked = [*stripes(grid, k_parallel=1, num_threadgroups=3, partition="ceil")]

        assert found == expected, grid
        assert {work.partition for work, _ in stripes(grid)} == {"balanced"}, grid
        assert asked == [(wished, 1)], grid


@pytest.mark.parametrize("widest", [1, 2, 6, 8])
def test_wide_tiles_are_the_most_that_fill_the_cores_and_leave_narrow_ones(
    widest: int,
) -> None:
    for grid in (replace(g, widest=widest) for g in GRIDS if g.batch == 1):
        rows, across = grid.m_tiles, grid.n_tiles
        most = {w: max(c for c in range(across) if c * w < across) for w in (2, 4)}
        even = {
            w: max(
                c
                for c in range(most[w] + 1)
                if c * rows <= max(range(0, most[w] * rows + 1, grid.cores))
            )
            for w in (2, 4)
        }
        widths = [w for w in (2, 4) if w < across and widest % w == 0]

        found = {width: work for work, width in wide_tiles(grid)}

        assert [*found] == [w for w in widths if even[w]], grid
        for width, work in found.items():
            narrow = across - even[width] * width
            assert work == Work(
                strategy="hytis",
                tiles=(even[width] + narrow) * rows,
                k_tiles=grid.k_tiles,
                threadgroups=(even[width] + narrow) * rows,
                whole=even[width] * rows,
            )
        if across > 2:  # else no narrow tile is left
            forced = {w: work.whole for work, w in wide_tiles(grid, forced=True)}
            wished = {w: (even[w] or most[w]) * rows for w in widths or [2]}
            assert forced == wished, grid


def test_wide_tiles_of_a_batch_are_told_only_who_asks_for_them() -> None:
    several = next(grid for grid in GRIDS if grid.batch == 2)

    assert [*wide_tiles(several)] == []
    with pytest.raises(ValueError, match="hytis takes one weight, got batch=2"):
        list(wide_tiles(several, forced=True))


def test_what_is_given_of_a_division_is_kept() -> None:
    grid = replace(GRIDS[-1], m_tiles=1, n_tiles=6, batch=1, k_tiles=64)
    given: dict[str, Any] = {"num_threadgroups": 10, "minimum": 5, "groups": 2}
    stream = Work(
        strategy="stream_k",
        tiles=6,
        k_tiles=64,
        threadgroups=10,
        slices=64,
        minimum=5,
        groups=2,
    )

    assert [*streams(grid, **given)] == [(stream, 1)]
    partly = replace(stream, strategy="hybrid", whole=4)
    assert [*hybrids(grid, whole=4, **given)] == [(partly, 1)]
    (wide,) = wide_tiles(grid, simdgroups_n=3, whole=1)
    assert (wide[0].whole, wide[0].tiles, wide[1]) == (1, 4, 3)


@pytest.mark.parametrize(("bytes", "groups"), [(2**18, 1), (2**18 + 1, 4)])
def test_ranges_are_grouped_where_a_small_cache_cannot_hold_x(
    bytes: int, groups: int
) -> None:
    grid = replace(GRIDS[-1], m_tiles=1, n_tiles=16, batch=1, k_tiles=64, x_bytes=bytes)

    (work, _), *_ = streams(grid, num_threadgroups=20)
    (partly, _), *_ = streams(grid, whole=4, num_threadgroups=20)

    assert (work.groups, partly.groups) == (groups, groups)  # of 16 and 20; 12 and 16


def test_a_search_compares_every_strategy() -> None:
    for grid in (GRIDS[0], GRIDS[-1]):
        found = [*works(grid)]

        assert found == [
            *explicit.works(grid, {"strategy": "data_parallel"}),
            *stripes(grid),
            *slices_of_k(grid),
            *streams(grid),
            *hybrids(grid),
            *wide_tiles(grid),
        ]


@pytest.mark.parametrize("reduction", [None, "none", "workspace", "atomic"])
@pytest.mark.parametrize("strategy", [None, "split_k"])
@pytest.mark.parametrize("slices", [1, 2])
def test_a_reduction_alone_leaves_the_work_that_can_have_it(
    reduction: str | None, strategy: str | None, slices: int
) -> None:
    work = Work(
        strategy="split_k", tiles=3, k_tiles=4, threadgroups=3 * slices, slices=slices
    )
    given = {"reduction": reduction, "strategy": strategy}
    overrides: Any = {name: value for name, value in given.items() if value}

    expected = (
        strategy is not None
        or reduction is None
        or ((slices == 2) == (reduction != "none"))
    )

    assert explicit.can_meet(work, overrides) == expected
