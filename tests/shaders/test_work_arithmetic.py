"""The shaders' 32-bit arithmetic of work is Python's, for large sizes too."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.planning.work.work import MOST_THREADGROUPS, MOST_UNEVEN, Work
from support import shader_functions
from support.marks import needs_emulator


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

    assert_owned(work, positions)


@needs_emulator
@pytest.mark.parametrize(
    ("tiles", "ranges"), [(2**18 + 1, 65535), (2**17 + 5, 40_001), (2**20 + 3, 7)]
)
def test_a_guess_beyond_float32_finds_the_owner_too(tiles: int, ranges: int) -> None:
    work = Work(
        strategy="stream_k",
        tiles=tiles,
        k_tiles=1024,
        threadgroups=ranges,
        slices=1024,
        minimum=8,
    )
    assert work.total > 2**24
    cuts = [work.cut(member) for member in range(0, work.ranges, 1 + work.ranges // 30)]
    beside = (cut - 1 for cut in cuts if cut)

    assert_owned(work, [*cuts, *beside, work.total - 1])


def assert_owned(work: Work, positions: list[int]) -> None:
    """Checks who has k tiles, and where their ranges begin and end."""
    found = shader_functions.owners(work, positions)

    for position, (member, begin, end) in zip(positions, found, strict=True):
        assert member == work.owner(position)
        assert (begin, end) == (work.cut(member), work.cut(member + 1))
        assert begin <= position < end
