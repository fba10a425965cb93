"""A plan covers its product exactly once, for every way to spread it."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import plans, problems

from mlx_marlin import scheduler
from mlx_marlin.plan import (
    MOST_UNEVEN,
    Plan,
    Tile,
    run_balanced,
    run_ceil,
    tile_position,
)
from mlx_marlin.problem import Problem

SMALL = problems(max_m=20, max_n=70, max_k=768)
UNITS = st.integers(1, 2000)
THREADGROUPS = st.integers(1, 300)


def runs(plan: Plan) -> list[range]:
    """Returns the units of each threadgroup."""
    return [range(*plan.range(index)) for index in range(plan.num_threadgroups)]


def plan_of(m: int, n: int, k: int, *, group_size: int = 64, **fields: object) -> Plan:
    """Returns a plan with one 8-row fragment, fields replaced."""
    defaults = {
        "problem": Problem(m=m, n=n, k=k, group_size=group_size),
        "kernel": "gemm_register",
        "tile": Tile(m=8),
        "fragments_m": 1,
        "num_threadgroups": 5,
    }
    return Plan(**{**defaults, **fields})  # type: ignore[arg-type]


@given(plans(of=SMALL))
def test_every_multiply_is_done_exactly_once(plan: Plan) -> None:
    problem, step = plan.problem, 32  # the smallest group: no cut is finer
    seen: Counter[tuple[int, int, int]] = Counter()
    for index in (index for run in runs(plan) for index in run):
        unit = plan.unit(index)
        assert unit.k_start % step == unit.k_stop % step == 0
        row, col = unit.tile_row * plan.tile.m, unit.tile_col * plan.tile.n
        seen.update(
            product(
                range(row, min(row + plan.tile.m, problem.m)),
                range(col, min(col + plan.tile.n, problem.n)),
                range(unit.k_start, unit.k_stop, step),
            )
        )

    every = product(range(problem.m), range(problem.n), range(0, problem.k, step))
    assert seen == Counter(every)


@given(plans())
def test_runs_are_contiguous_and_cover_the_units_once(plan: Plan) -> None:
    units = [index for run in runs(plan) for index in run]

    assert units == list(range(plan.units))


@given(plans())
def test_the_owner_of_a_unit_is_the_threadgroup_that_has_it(plan: Plan) -> None:
    for threadgroup, run in enumerate(runs(plan)):
        for unit in run:
            assert plan.owner(unit) == threadgroup


@given(plans())
def test_counted_loads_are_those_of_the_runs(plan: Plan) -> None:
    counts = [len(run) for run in runs(plan)]
    busy = [count for count in counts if count]

    assert plan.units_per_threadgroup == (min(busy), max(busy))
    assert plan.idle == counts.count(0)


@given(plans())
def test_slices_ascend_and_start_on_whole_groups_and_tiles(plan: Plan) -> None:
    tile = [plan.unit(split) for split in range(plan.k_parallel)]

    assert [unit.split for unit in tile] == list(range(plan.k_parallel))
    assert tile[0].k_start == 0
    assert tile[-1].k_stop == plan.problem.k
    for before, after in pairwise(tile):
        assert before.k_stop == after.k_start
        assert after.k_start % plan.problem.group_size == 0
        assert after.k_start % plan.tile.k == 0
    lengths = [-(-(unit.k_stop - unit.k_start) // plan.cut) for unit in tile]
    assert min(lengths) >= 1
    assert max(lengths) - min(lengths) <= 1


@given(plans())
def test_a_second_dispatch_and_a_workspace_come_with_a_split_only(plan: Plan) -> None:
    split = plan.k_parallel > 1

    assert plan.is_split == split
    assert plan.dispatches == 1 + split
    shape = (plan.k_parallel, plan.problem.m, plan.problem.n)
    assert plan.workspace_shape == shape
    assert plan.workspace_bytes == (4 * shape[0] * shape[1] * shape[2] if split else 0)


@given(plans())
def test_a_threadgroup_fits_the_hardware(plan: Plan) -> None:
    assert 32 <= plan.threads <= 256
    assert plan.threads == 32 * plan.simdgroups_m * plan.simdgroups_k
    assert 0 < plan.threadgroup_bytes <= 32768


@given(plans())
def test_a_plan_explains_itself_in_a_line(plan: Plan) -> None:
    text = plan.explain()

    assert "\n" not in text
    assert text.startswith(f"{plan.kernel} {plan.tile.m}x32x64, ")
    assert f"over {plan.num_threadgroups} threadgroups" in text
    assert ("workspace" in text) == plan.is_split


def test_the_line_of_a_split_plan_counts_what_runs() -> None:
    plan = plan_of(8, 4096, 4096, simdgroups_k=8, k_parallel=4, num_threadgroups=160)

    assert plan.explain() == (
        "gemm_register 8x32x64, 1x8 simdgroups (m x k), 128 tiles, 4 slices of k, "
        "stripe over 160 threadgroups (balanced, 3-4 units each, 0 idle), "
        "workspace 512 KB"
    )


@given(UNITS, THREADGROUPS)
def test_balanced_runs_differ_by_at_most_one_unit(
    units: int, threadgroups: int
) -> None:
    counts = [
        end - begin
        for begin, end in (
            run_balanced(units, threadgroups, index) for index in range(threadgroups)
        )
    ]

    assert sum(counts) == units
    assert max(counts) - min(counts) <= 1


@given(st.data(), st.integers(1, 2**31 - 1), st.integers(1, MOST_UNEVEN))
def test_the_shaders_cut_alike_in_32_bits(
    data: st.DataObject, total: int, parts: int
) -> None:
    part = data.draw(st.integers(0, parts - 1))
    quotient, rest = divmod(total, parts)

    # As `balanced_cut` in work.metal computes it, on unsigned 32-bit integers.
    wrapped = (part * quotient + part * rest % 2**32 // parts) % 2**32

    assert wrapped == run_balanced(total, parts, part)[0]


def test_more_uneven_parts_than_32_bits_can_cut_are_refused() -> None:
    problem = Problem(m=1, n=32 * 100_000, k=64)
    even = scheduler.make(problem, num_threadgroups=100_000)

    with pytest.raises(ValueError, match="num_threadgroups=70000 does not divide"):
        replace(even, strategy="stripe", num_threadgroups=70_000)


@given(UNITS, THREADGROUPS)
def test_ceil_runs_are_those_of_the_stripe_formula(
    units: int, threadgroups: int
) -> None:
    work_per_threadgroup = math.ceil(units / threadgroups)
    for index in range(threadgroups):
        start = index * work_per_threadgroup
        end = min(start + work_per_threadgroup, units)
        begin_here, end_here = run_ceil(units, threadgroups, index)

        assert list(range(begin_here, end_here)) == list(range(start, end))


def test_twelve_tiles_on_five_idle_one_threadgroup_with_ceil_and_none_balanced() -> (
    None
):
    # 48 x 64 in 16 x 16 tiles: 3 rows and 4 columns of tiles.
    ceil = [run_ceil(12, 5, index) for index in range(5)]
    balanced = [run_balanced(12, 5, index) for index in range(5)]

    assert ceil == [(0, 3), (3, 6), (6, 9), (9, 12), (12, 12)]
    assert [end - begin for begin, end in balanced] == [2, 2, 3, 2, 3]
    columns = [[tile_position(tile, 3) for tile in range(*run)] for run in ceil]
    assert columns[:4] == [[(row, col) for row in range(3)] for col in range(4)]


def test_nine_tiles_on_five_make_the_picture_of_marlin() -> None:
    owner = {
        tile_position(tile, 3): index
        for index in range(5)
        for tile in range(*run_ceil(9, 5, index))
    }

    picture = [[owner[row, col] for col in range(3)] for row in range(3)]
    assert picture == [[0, 1, 3], [0, 2, 3], [1, 2, 4]]


def test_seven_tiles_on_five_take_two_turns_either_way() -> None:
    ceil = [run_ceil(7, 5, index) for index in range(5)]
    balanced = [run_balanced(7, 5, index) for index in range(5)]

    assert [end - begin for begin, end in ceil] == [2, 2, 2, 1, 0]
    assert [end - begin for begin, end in balanced] == [1, 1, 2, 1, 2]


def test_ceil_idles_half_the_threadgroups_just_above_a_multiple() -> None:
    plan = plan_of(8, 322 * 32, 64, partition="ceil", num_threadgroups=320)

    assert plan.idle == 320 - 161
    assert replace(plan, partition="balanced").idle == 0


def test_slices_are_whole_groups_where_equal_division_is_not() -> None:
    # 4096 / 3 is neither a multiple of the tile nor of the group.
    plan = plan_of(8, 32, 4096, k_parallel=3)

    slices = [(plan.unit(i).k_start, plan.unit(i).k_stop) for i in range(3)]
    assert slices == [(0, 1344), (1344, 2688), (2688, 4096)]


def test_a_last_slice_may_end_inside_a_tile_of_k() -> None:
    plan = plan_of(8, 32, 160, group_size=32, k_parallel=3)

    assert (plan.unit(2).k_start, plan.unit(2).k_stop) == (128, 160)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kernel": "gemm"}, ["kernel='gemm'", "gemm_register"]),
        ({"strategy": "stream_k"}, ["strategy='stream_k'", "stripe"]),
        ({"partition": "floor"}, ["partition='floor'", "balanced"]),
        ({"kernel": "gemv"}, ["at most 5 rows", "m=8"]),
        ({"fragments_m": 3, "tile": Tile(m=24)}, ["fragments_m=3", "(1, 2)"]),
        ({"tile": Tile(m=16)}, ["tiles of 8 rows", "tile.m=16"]),
        ({"tile": Tile(m=8, n=64)}, ["32 and 64", "got 64 and 64"]),
        ({"tile": Tile(m=8, k=128)}, ["32 and 64", "got 32 and 128"]),
        ({"simdgroups_k": 0}, ["simdgroups_k=0", "at least 1"]),
        ({"simdgroups_k": 9}, ["simdgroups_k=9", "more than 8"]),
        ({"k_parallel": 0}, ["k_parallel=0", "between 1 and 2"]),
        ({"k_parallel": 3}, ["k_parallel=3", "between 1 and 2"]),
        ({"num_threadgroups": 0}, ["num_threadgroups=0", "at least 1"]),
        ({"strategy": "data_parallel"}, ["4 tiles", "num_threadgroups=5"]),
        (
            {"strategy": "data_parallel", "k_parallel": 2, "num_threadgroups": 8},
            ["does not split k", "k_parallel=2"],
        ),
    ],
)
def test_nonsense_is_refused_with_the_values(
    fields: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked
        plan_of(8, 128, 128, **fields)

    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tile": Tile(m=3)}, ["all m=2 rows", "tile.m=3"]),
        ({"fragments_m": 1}, ["fragments_m=0", "fragments_m=1"]),
        ({"simdgroups_m": 2}, ["simdgroups_m=1", "simdgroups_m=2"]),
    ],
)
def test_a_gemv_plan_has_all_rows_in_one_tile(
    fields: dict[str, object], words: list[str]
) -> None:
    gemv = {"kernel": "gemv", "tile": Tile(m=2), "fragments_m": 0}
    assert plan_of(2, 128, 128, **gemv).m_tiles == 1

    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked
        plan_of(2, 128, 128, **{**gemv, **fields})

    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("sides", [{"m": 0}, {"m": 8, "n": 12}, {"m": 8, "k": 0}])
def test_a_tile_is_made_of_fragments(sides: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        Tile(**sides)
