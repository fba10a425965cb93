"""The shaders' 32-bit arithmetic of work is Python's, for large sizes too."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.planning.work.division import MOST_THREADGROUPS, MOST_UNEVEN
from mlx_marlin.planning.work.work import Work
from support import shader_functions
from support.marks import needs_emulator


class Guess:
    """A count of the steps that `range_owner` in `work.metal` takes."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.steps = 0

    @staticmethod
    def balanced_cut(part: int, parts: int, total: int) -> int:
        words = np.array([part, parts, total], np.uint32)
        part_, parts_, total_ = words[:1], words[1:2], words[2:]
        return int(
            (part_ * (total_ // parts_) + part_ * (total_ % parts_) // parts_)[0]
        )

    def cut(self, member: int) -> int:
        work = self.work
        units = work.group_tiles * work.slices
        if work.partition == "ceil":
            unit = min(member * -(-units // work.ranges), units)
        else:
            unit = self.balanced_cut(member, work.ranges, units)
        k_tile = self.balanced_cut(unit % work.slices, work.slices, work.k_tiles)
        if min(k_tile, work.k_tiles - k_tile) < work.minimum:
            k_tile = 0 if 2 * k_tile < work.k_tiles else work.k_tiles
        return unit // work.slices * work.k_tiles + k_tile

    def owner(self, position: int) -> int:
        work = self.work
        share = np.float32(position) / np.float32(work.group_tiles * work.k_tiles)
        guess = int(np.uint32(share * np.float32(work.ranges)))
        member = min(guess, work.ranges - 1)
        while self.cut(member) > position:
            member -= 1
            self.steps += 1
            assert member >= 0
        while self.cut(member + 1) <= position:
            member += 1
            self.steps += 1
            assert member < work.ranges
        return member


@st.composite
def _cuts(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draws part, parts and total: often parts whose product with total is large."""
    parts = draw(st.integers(1, MOST_UNEVEN) | st.just(MOST_UNEVEN))
    part = draw(st.integers(0, parts) | st.just(parts) | st.just(parts - 1))
    return part, parts, draw(st.integers(1, 2**31 - 1) | st.just(2**31 - 1))


@needs_emulator
@given(st.lists(_cuts(), min_size=1, max_size=shader_functions.LENGTH))
def test_the_shaders_cut_alike_in_32_bits(cuts: list[tuple[int, int, int]]) -> None:
    found = shader_functions.balanced_cuts(*zip(*cuts, strict=True))

    assert found == [part * total // parts for part, parts, total in cuts]


@st.composite
def _large_works(draw: st.DrawFn) -> Work:
    """Draws work of up to 2**31 k tiles, cut as finely as 32 bits allow."""
    k_tiles = draw(st.integers(1, 4096))
    tiles = draw(st.integers(2, min(2**26, (2**31 - 1) // k_tiles)))
    strategy = draw(st.sampled_from(["stripe", "stream_k", "hybrid"]))
    threadgroups = draw(st.integers(1, MOST_UNEVEN))
    if strategy == "stripe":
        return Work(
            strategy="stripe",
            tiles=tiles,
            k_tiles=k_tiles,
            threadgroups=threadgroups,
            slices=draw(st.integers(1, k_tiles)),
            partition=draw(st.sampled_from(["balanced", "ceil"])),
        )
    whole = draw(st.integers(1, tiles - 1)) if strategy == "hybrid" else 0
    most = max(MOST_THREADGROUPS, tiles * k_tiles)
    return Work(
        strategy="stream_k" if strategy == "stream_k" else "hybrid",
        tiles=tiles,
        k_tiles=k_tiles,
        threadgroups=whole + min(threadgroups, most - whole),
        whole=whole,
        slices=k_tiles,
        minimum=draw(st.integers(1, 16)),
    )


def _positions(work: Work) -> st.SearchStrategy[int]:
    """Draws k tiles of a group, often beside a cut."""
    last = work.group_tiles * work.k_tiles - 1
    beside = st.integers(0, work.ranges).flatmap(
        lambda member: st.integers(-1, 1).map(lambda by: work.cut(member) + by)
    )
    return st.integers(0, last) | beside.map(lambda each: min(max(each, 0), last))


@needs_emulator
@given(_large_works(), st.data())
def test_the_shaders_find_the_same_owner_from_a_rounded_guess(
    work: Work, data: st.DataObject
) -> None:
    positions = data.draw(
        st.lists(_positions(work), min_size=1, max_size=shader_functions.LENGTH)
    )

    found = shader_functions.owners(work, positions)

    for position, (member, begin, end) in zip(positions, found, strict=True):
        assert member == work.owner(position)
        assert (begin, end) == (work.cut(member), work.cut(member + 1))
        assert begin <= position < end


def _steps() -> list[tuple[Work, int]]:
    """Returns work of more k tiles than float32 counts, and its last k tile."""
    found = []
    for tiles, ranges in ((2**18 + 1, 65535), (2**17 + 5, 40_001), (2**20 + 3, 7)):
        work = Work(
            strategy="stream_k",
            tiles=tiles,
            k_tiles=1024,
            threadgroups=ranges,
            slices=1024,
            minimum=8,
        )
        found.append((work, work.total - 1))
    return found


@pytest.mark.parametrize(("work", "last"), _steps())
def test_a_guess_beyond_float32_is_a_few_steps_off(work: Work, last: int) -> None:
    assert last > 2**24
    positions = [last, *(work.cut(member) for member in range(0, work.ranges, 997))]
    for position in positions:
        for beside in (position - 1, position):
            if beside >= 0:
                guess = Guess(work)
                assert guess.owner(beside) == work.owner(beside)
                assert guess.steps <= 2
