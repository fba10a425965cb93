"""All work is done once, in order, by whom the plan says: every way to cut it."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, product
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_marlin.planning.work.tiles import Split, tile_position
from mlx_marlin.planning.work.work import (
    MOST_GROUPS,
    PARTITIONS,
    Partition,
    Work,
    balanced_cut,
    ceil_cut,
    locality_groups,
)
from support.profiles import drawn
from support.strategies import works

SMALL = works()
STREAMS = works(strategies=("stream_k", "hybrid"))

Owners = NDArray[np.int64]


def splits_of_tiles(work: Work) -> dict[int, list[tuple[int, Split]]]:
    """Returns (threadgroup, split) of every tile, by tile, in ascending k."""
    found: dict[int, list[tuple[int, Split]]] = defaultdict(list)
    for threadgroup in range(work.threadgroups):
        for split in work.splits(threadgroup):
            found[split.tile].append((threadgroup, split))
    for splits in found.values():
        splits.sort(key=lambda each: each[1].k_idx)
    return found


def owners_of(work: Work) -> Owners:
    """Paints who has each k tile of each tile, [tiles, k_tiles]; fails on a second."""
    owners = np.full((work.tiles, work.k_tiles), -1)
    for tile, splits in splits_of_tiles(work).items():
        for threadgroup, split in splits:
            part = owners[tile, split.k_idx : split.k_idx + split.k_tile_count]
            assert part.size == split.k_tile_count >= 1
            assert np.all(part == -1)
            part[:] = threadgroup
    return owners


def counts_of(work: Work) -> list[int]:
    """Returns the k tiles of each threadgroup, counted where they are painted."""
    painted = owners_of(work).ravel()
    return [int(each) for each in np.bincount(painted, minlength=work.threadgroups)]


@drawn(100, work=SMALL)
def test_every_k_tile_of_every_tile_is_in_exactly_one_split(work: Work) -> None:
    owners = owners_of(work)

    assert np.all(owners >= 0)
    assert np.all(owners < work.threadgroups)


@drawn(100, work=SMALL)
def test_ranges_stand_in_the_line_one_after_the_other(work: Work) -> None:
    spaces: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for threadgroup in range(work.threadgroups):
        begin, end = work.range(threadgroup)
        assert begin <= end
        whole = threadgroup < work.whole
        group = -1 if whole else (threadgroup - work.whole) % work.groups
        spaces[group].append((begin, end))

    line = []
    for _, ranges in sorted(spaces.items()):
        busy = [each for each in ranges if each[0] < each[1]]
        # Who idles comes last, except where short ranges snapped away.
        line += sorted(busy)
        assert busy == sorted(busy)
    assert [end for _, end in line[:-1]] == [begin for begin, _ in line[1:]]
    assert (line[0][0], line[-1][1]) == (0, work.total)


@drawn(100, work=works(strategies=("stripe", "split_k")))
def test_balanced_ranges_of_units_differ_by_at_most_one(work: Work) -> None:
    if work.partition == "ceil":
        work = replace(work, partition="balanced")
    # Where slices begin in a tile, by division of rationals.
    starts = [floor(part * work.k_tiles / work.slices) for part in range(work.slices)]
    units = [
        sum(
            split.k_idx <= start < split.k_idx + split.k_tile_count
            for split in work.splits(threadgroup)
            for start in starts
        )
        for threadgroup in range(work.threadgroups)
    ]

    busy = units[: work.tiles * work.slices]
    assert sum(busy) == work.tiles * work.slices
    assert max(busy) - min(busy) <= 1
    assert not any(units[len(busy) :])


@drawn(100, work=STREAMS)
def test_a_stream_is_cut_within_one_minimum_of_its_even_share(work: Work) -> None:
    tail = work.tiles - work.whole
    space = tail // work.groups * work.k_tiles
    most = (work.threadgroups - work.whole) // work.groups
    ranges = max(min(most, space // work.minimum), 1)
    least = min(work.minimum, work.k_tiles)

    for member in range(ranges):
        for group in range(work.groups):
            index = work.whole + member * work.groups + group
            begin, end = work.range(index)
            start = (work.whole * work.k_tiles) + group * space
            assert abs(begin - start - floor(member * space / ranges)) < least
            assert abs(end - start - floor((member + 1) * space / ranges)) < least
            if work.minimum == 1:
                assert abs(end - begin - space / ranges) < 1


@drawn(100, work=SMALL)
def test_the_splits_of_a_tile_are_counted_in_ascending_k_and_know_their_roles(
    work: Work,
) -> None:
    least = min(work.minimum, work.k_tiles)
    found = splits_of_tiles(work)

    for tile in range(work.tiles):
        owners, splits = zip(*found[tile], strict=True)
        assert work.threadgroups_of(tile) == [*owners]
        assert [split.slot for split in splits] == [*range(len(splits))]
        assert len(splits) <= work.slots
        assert all(split.k_tile_count >= least for split in splits)
        assert all(split.requires_fixup == (len(splits) > 1) for split in splits)
        begins = [split.k_idx == 0 for split in splits]
        ends = [split.k_idx + split.k_tile_count == split.k_tiles for split in splits]
        others = [False] * (len(splits) - 1)
        assert (begins, ends) == ([True, *others], [*others, True])


@drawn(100, work=SMALL, data=st.data())
def test_the_owner_of_a_k_tile_is_the_range_that_has_it(
    work: Work, data: st.DataObject
) -> None:
    if not (space := (work.tiles - work.whole) // work.groups * work.k_tiles):
        return  # every tile is whole, there are no ranges
    position = data.draw(st.integers(0, space - 1))

    member = work.owner(position)

    assert work.cut(member) <= position < work.cut(member + 1)
    first = work.whole * work.k_tiles
    begin, end = work.range(work.whole + member * work.groups)
    assert begin <= first + position < end


def check_counts(work: Work) -> None:
    """Compares the counts of work with those of its painted threadgroups."""
    counts = counts_of(work)
    of_tiles = [*map(len, splits_of_tiles(work).values())]
    of_threadgroups = [len([*work.splits(each)]) for each in range(work.threadgroups)]

    assert work.total == sum(counts)
    assert work.idle == counts.count(0)
    assert 0 <= work.longest - max(counts) <= (work.k_tiles % work.slices > 0)
    longest_of_tail = max(counts[work.whole :], default=0)
    assert 0 <= work.longest_of_tail - longest_of_tail <= 1
    assert work.pieces >= sum(of_tiles)
    assert not work.is_single or max(of_threadgroups) == 1
    assert work.is_split or max(of_tiles) == work.slots == 1
    if work.minimum == 1:
        assert work.pieces == sum(of_tiles)
        assert work.is_single == (max(of_threadgroups) == 1)
        assert work.is_split == (max(of_tiles) > 1)
        assert work.slots <= max(of_tiles) + 1


@drawn(100, work=SMALL)
def test_counts_are_those_of_the_painted_work(work: Work) -> None:
    check_counts(work)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_counts_of_few_stripes_are_those_of_the_painted_work(
    partition: Partition,
) -> None:
    for tiles, k_tiles, threadgroups in product(range(1, 5), range(1, 5), range(1, 8)):
        for slices in range(1, k_tiles + 1):
            check_counts(
                Work(
                    strategy="stripe",
                    tiles=tiles,
                    k_tiles=k_tiles,
                    threadgroups=threadgroups,
                    slices=slices,
                    partition=partition,
                )
            )


@drawn(100, work=STREAMS)
def test_groups_take_every_nth_tile_and_are_cut_alike(work: Work) -> None:
    owners = owners_of(work)
    tail = owners[work.whole :]
    shapes = []
    for group in range(work.groups):
        own = tail[group :: work.groups]
        # A threadgroup's number tells its group, round and round.
        assert np.all((own - work.whole) % work.groups == group)
        shapes.append((own - work.whole) // work.groups)
    assert all(np.array_equal(shapes[0], each) for each in shapes)
    assert np.array_equal(
        owners[: work.whole],
        np.repeat(np.arange(work.whole)[:, None], work.k_tiles, axis=1),
    )


@drawn(100, tiles=st.integers(1, 500), threadgroups=st.integers(1, 500))
def test_locality_groups_are_the_most_that_divide_both(
    tiles: int, threadgroups: int
) -> None:
    dividing = [
        each
        for each in range(1, 9)
        if tiles / each == tiles // each and threadgroups / each == threadgroups // each
    ]

    assert locality_groups(tiles, threadgroups) == max(dividing)
    assert MOST_GROUPS == 8


def stripe(tiles: int, threadgroups: int, partition: str) -> Work:
    return Work(
        strategy="stripe",
        tiles=tiles,
        k_tiles=1,
        threadgroups=threadgroups,
        partition=partition,  # type: ignore[arg-type]
    )


def test_twelve_tiles_on_five_idle_one_threadgroup_with_ceil_and_none_balanced() -> (
    None
):
    # 48 x 64 in 16 x 16 tiles: 3 rows and 4 columns of tiles.
    by_ceil, balanced = stripe(12, 5, "ceil"), stripe(12, 5, "balanced")

    ranges = [by_ceil.range(index) for index in range(5)]
    assert ranges == [(0, 3), (3, 6), (6, 9), (9, 12), (12, 12)]
    assert (by_ceil.idle, balanced.idle) == (1, 0)
    assert counts_of(balanced) == [2, 2, 3, 2, 3]
    columns = [[tile_position(tile, 3) for tile in range(*run)] for run in ranges]
    assert columns[:4] == [[(row, col) for row in range(3)] for col in range(4)]


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ("ceil", [[0, 1, 3], [0, 2, 3], [1, 2, 4]]),
        ("balanced", [[0, 2, 3], [1, 2, 4], [1, 3, 4]]),
    ],
)
def test_nine_tiles_on_five_make_the_picture(
    partition: str, expected: list[list[int]]
) -> None:
    owners = owners_of(stripe(9, 5, partition)).ravel()

    picture = [[0] * 3 for _ in range(3)]
    for tile, owner in enumerate(owners.tolist()):
        row, col = tile_position(tile, 3)
        picture[row][col] = owner

    assert picture == expected


def test_ceil_idles_half_the_threadgroups_just_above_a_multiple() -> None:
    assert stripe(322, 320, "ceil").idle == 320 - 161
    assert stripe(322, 320, "balanced").idle == 0


def test_the_picture_of_the_first_lines() -> None:
    work = Work(strategy="stream_k", tiles=3, k_tiles=4, threadgroups=4, slices=4)

    assert owners_of(work).tolist() == [[0, 0, 0, 1], [1, 1, 2, 2], [2, 3, 3, 3]]


def test_three_tiles_of_ninety_k_tiles_on_four_units() -> None:
    work = Work(strategy="stream_k", tiles=3, k_tiles=90, threadgroups=4, slices=90)

    cuts = [work.cut(member) for member in range(5)]
    # Not one of the roundings decides, but that they cover and are even.
    assert (cuts[0], cuts[-1]) == (0, 270)
    assert all(abs(end - begin - 67.5) < 1 for begin, end in pairwise(cuts))
    assert cuts == [0, 67, 135, 202, 270]
    roles = [
        [
            (
                split.tile,
                split.k_idx,
                split.k_tile_count,
                split.slot,
                split.requires_fixup,
            )
            for split in work.splits(threadgroup)
        ]
        for threadgroup in range(4)
    ]
    assert roles == [
        [(0, 0, 67, 0, True)],
        [(0, 67, 23, 1, True), (1, 0, 45, 0, True)],
        [(1, 45, 45, 1, True), (2, 0, 22, 0, True)],
        [(2, 22, 68, 1, True)],
    ]
    assert work.pieces == 6


def test_a_cut_near_a_border_moves_to_the_nearer_one() -> None:
    work = Work(
        strategy="stream_k", tiles=3, k_tiles=16, threadgroups=5, slices=16, minimum=8
    )

    # floor(i * 48 / 5) = 0, 9, 19, 28, 38, 48: only 8 k tiles from both borders is far.
    assert [work.cut(member) for member in range(6)] == [0, 16, 16, 32, 32, 48]
    assert (work.idle, work.longest) == (2, 16)


def test_even_parts_that_end_with_tiles_split_none() -> None:
    by_ceil = replace(stripe(7, 4, "ceil"), k_tiles=2, slices=2)

    # 14 slices: 4, 4, 4 and 2, or 3, 4, 3 and 4.
    assert (by_ceil.is_split, by_ceil.pieces) == (False, 7)
    assert replace(by_ceil, partition="balanced").is_split


@drawn(100, units=st.integers(1, 2000), parts=st.integers(1, 300))
def test_ceil_cuts_are_those_of_the_stripe_formula(units: int, parts: int) -> None:
    cuts = [ceil_cut(part, parts, units) for part in range(parts + 1)]

    assert cuts == [min(part * ceil(units / parts), units) for part in range(parts + 1)]


@drawn(100, total=st.integers(1, 10_000), parts=st.integers(1, 300))
def test_balanced_cuts_differ_by_at_most_one(total: int, parts: int) -> None:
    cuts = [balanced_cut(part, parts, total) for part in range(parts + 1)]
    lengths = [end - begin for begin, end in pairwise(cuts)]

    assert (cuts[0], cuts[-1]) == (0, total)
    assert max(lengths) - min(lengths) <= 1


@drawn(30, work=SMALL)
def test_work_is_shown_as_the_call_that_makes_it(work: Work) -> None:
    assert eval(repr(work), {"Work": Work}) == work
    assert "total" not in repr(work)


def test_tiles_too_short_for_two_splits_are_not_split() -> None:
    short, long = (
        Work(
            strategy="stream_k",
            tiles=3,
            k_tiles=k_tiles,
            threadgroups=2,
            slices=k_tiles,
            minimum=2,
        )
        for k_tiles in (3, 4)
    )
    assert (short.is_split, long.is_split) == (False, True)
