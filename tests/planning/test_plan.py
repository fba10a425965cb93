"""A plan covers its product exactly once, for every way to spread it."""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_marlin.backends import planner
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning.dequantize_plan import (
    MOST_TEMPORARY,
    DequantizePlan,
    dequantize_plan,
)
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.plan import Plan, Tile
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.planning.work.decompositions import data_parallel
from mlx_marlin.planning.work.work import Work
from mlx_marlin.weights.formats import DTYPE_BYTES
from support.parts_of_plans import corner, k_range, product_of
from support.strategies import ANY_FORMAT, plans, problems

SMALL = problems(
    max_m=20, max_n=70, max_k=768, formats=ANY_FORMAT, batches=st.integers(1, 3)
)


def plan_of(m: int, n: int, k: int, *, group_size: int = 64, **fields: Any) -> Plan:
    """Returns a plan with one 8-row fragment and a tile each, fields replaced."""
    problem = Problem(m=m, n=n, k=k, group_size=group_size)
    tile = Tile(m=8, k=max(64, group_size))
    defaults = {
        "problem": problem,
        "kernel": "gemm_register",
        "tile": tile,
        "fragments_m": 1,
        "work": data_parallel(-(-m // 8) * -(-n // 32), -(-k // tile.k)),
    }
    return MetalPlan(**{**defaults, **fields})


@given(plans(of=SMALL))
@settings(max_examples=100)
def test_every_multiply_is_done_exactly_once(plan: Plan) -> None:
    problem, step = plan.problem, 32  # the smallest group: no cut is finer
    seen: Counter[tuple[int, int, int, int]] = Counter()
    for threadgroup in range(plan.num_threadgroups):
        for split in plan.work.splits(threadgroup):
            k_start, k_stop = k_range(plan, split)
            assert k_start % step == k_stop % step == 0
            row, col = corner(plan, split.tile)
            last = col + plan.columns_of(split.tile)
            seen.update(
                product(
                    [product_of(plan, split.tile)],
                    range(row, min(row + plan.tile.m, problem.m)),
                    range(col, min(last, problem.n)),
                    range(k_start, k_stop, step),
                )
            )

    sizes = map(range, (problem.batch, problem.m, problem.n))
    assert seen == Counter(product(*sizes, range(0, problem.k, step)))


@given(plans())
def test_splits_begin_where_a_trip_and_a_group_begin(plan: Plan) -> None:
    for threadgroup in range(plan.num_threadgroups):
        for split in plan.work.splits(threadgroup):
            k_start, k_stop = k_range(plan, split)
            assert 0 <= k_start < k_stop <= plan.problem.k
            assert k_start % plan.problem.group_size == k_start % 64 == 0
            assert (split.k_idx + split.k_tile_count == split.k_tiles) == (
                k_stop == plan.problem.k
            )


@given(plans())
def test_tiles_are_wide_first_and_cover_the_columns(plan: Plan) -> None:
    first_row = [tile for tile in range(plan.work.tiles) if corner(plan, tile)[0] == 0]
    at = 0
    for tile in first_row:
        assert corner(plan, tile)[1] == at
        at += plan.columns_of(tile)

    assert plan.problem.n <= at < plan.problem.n + 32 * plan.simdgroups_n
    widths = [plan.columns_of(tile) for tile in first_row]
    assert widths == sorted(widths, reverse=True)
    assert set(widths) <= {32, 32 * plan.simdgroups_n}


@given(plans())
def test_sums_have_room_and_dispatches_are_counted(plan: Plan) -> None:
    problem, rows = plan.problem, (plan.problem.m, plan.problem.n)
    plain = problem.dtype == "float32"
    if plan.reduction == "none":
        expected = 1, (1, *rows), 0
    elif plan.reduction == "workspace":
        slots = plan.work.slots
        assert slots > 1
        expected = 2, (slots, *rows), 4 * slots * rows[0] * rows[1]
    else:
        # One that zeroes the sums, and one that converts them.
        expected = (2 if plain else 3), (1, *rows), 4 * rows[0] * rows[1]

    assert plan.is_split == plan.work.is_split == (plan.reduction != "none")
    counted = plan.dispatches, plan.workspace_shape, plan.workspace_bytes
    assert counted == expected


def test_atomic_sums_with_an_epilogue_are_finished_after_them() -> None:
    work = Work(strategy="split_k", tiles=1, k_tiles=2, threadgroups=2, slices=2)
    sums = Problem(m=8, n=32, k=128, dtype="float32", scale_dtype="float32")
    plan = plan_of(8, 32, 128, work=work, reduction="atomic", problem=sums)
    fused = replace(plan, problem=replace(sums, epilogue=Epilogue(bias=True)))

    assert (plan.needs_second_pass, plan.dispatches) == (False, 2)
    assert (fused.needs_second_pass, fused.dispatches) == (True, 3)


@given(plans())
def test_a_plan_is_whole_where_each_threadgroup_has_its_tile_and_no_other(
    plan: Plan,
) -> None:
    own = all(
        [(split.tile, split.requires_fixup) for split in plan.work.splits(index)]
        == [(index, False)]
        for index in range(plan.num_threadgroups)
    )

    # Ranges that happen to be tiles are not known to be.
    assert own or not plan.is_whole
    assert not plan.is_whole or not plan.is_split
    assert plan.is_whole == (plan.strategy in ("data_parallel", "hytis"))


@given(plans())
def test_a_plan_fits_the_hardware_and_explains_itself_in_a_line(plan: Plan) -> None:
    text = plan.explain()

    assert 32 <= plan.threads == 32 * plan.simdgroups <= 256
    assert 0 < plan.threadgroup_bytes <= 32768
    assert "\n" not in text
    assert text.startswith(f"{plan.kernel} {plan.tile.m}x32x{plan.tile.k}, ")
    assert f"{plan.strategy} over {plan.num_threadgroups} threadgroups" in text
    assert ("workspace" in text) == (plan.reduction == "workspace")
    assert ("last bits differ" in text) == (plan.reduction == "atomic")


def test_a_plan_has_one_simdgroup_and_no_stages_if_it_is_not_told_otherwise() -> None:
    plan = plan_of(8, 64, 128)

    assert (plan.simdgroups, plan.simdgroup_grid) == (1, (1, 1, 1))
    assert (plan.reduction, plan.buffers, plan.loaders) == ("none", 0, 0)
    assert plan.variant == "gemm_register 8 rows, 1x1x1 simdgroups"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"buffers": 1}, ", 1 buffer"),
        ({"buffers": 2, "loaders": 1}, ", 2 buffers, 1 loader"),
    ],
)
def test_a_plan_tells_its_stages(fields: Any, words: str) -> None:
    plan = planner.make(
        Problem(m=64, n=256, k=1024), kernel="gemm_staged", simdgroups_k=1, **fields
    )

    rows = plan.tile.m // plan.simdgroup_grid[0]
    groups = "x".join(map(str, plan.simdgroup_grid))
    assert plan.variant == f"gemm_staged {rows} rows, {groups} simdgroups{words}"
    assert f"simdgroups (m x k){words}, " in plan.explain()


def test_simdgroups_of_other_back_ends_lie_along_n_and_k() -> None:
    plan = planner.choose(Problem(m=8, n=512, k=1024), named("NVIDIA H200"))
    n, k = plan.simdgroups_n, plan.simdgroups_k

    assert plan.simdgroup_grid == (1, n, k)
    assert f" {n}x{k} simdgroups (n x k), " in plan.explain()


@pytest.mark.parametrize(
    ("reduction", "passes"),  # each written and read; atomic sums are zeroed before
    [("workspace", 3), ("atomic", 4)],
)
def test_sums_of_slices_are_written_and_read(reduction: str, passes: int) -> None:
    work = Work(strategy="split_k", tiles=4, k_tiles=6, threadgroups=12, slices=3)
    plan = plan_of(8, 128, 384, work=work, reduction=reduction)

    assert plan.workspace_traffic == 2 * passes * 8 * 128 * 4
    assert plan_of(8, 128, 384).workspace_traffic == 0


STREAM = Work(
    strategy="stream_k",
    tiles=128,
    k_tiles=64,
    threadgroups=160,
    slices=64,
    minimum=8,
    groups=4,
)
HYBRID = replace(STREAM, strategy="hybrid", threadgroups=100, whole=80)
SPLIT_K = Work(strategy="split_k", tiles=128, k_tiles=64, threadgroups=512, slices=4)
STRIPE = replace(SPLIT_K, strategy="stripe", threadgroups=160)


@pytest.mark.parametrize(
    ("work", "reduction", "words"),
    [
        (
            STRIPE,
            "workspace",
            "stripe over 160 threadgroups (balanced, 4 slices of k, at most 64 k tiles "
            "each, 0 idle), workspace 256 KB, 2 slots",
        ),
        (
            SPLIT_K,
            "workspace",
            "split_k over 512 threadgroups (4 slices of k, at most 16 k tiles each, "
            "0 idle), workspace 512 KB, 4 slots",
        ),
        (
            STREAM,
            "workspace",
            "stream_k over 160 threadgroups (at least 8 k tiles a split, 4 groups, at "
            "most 52 k tiles each, 0 idle), workspace 384 KB, 3 slots",
        ),
        (
            HYBRID,
            "atomic",
            "hybrid over 100 threadgroups (80 tiles whole, at least 8 k tiles a split, "
            "4 groups, at most 154 k tiles each, 0 idle), atomic sums: the last bits "
            "differ from run to run",
        ),
        (
            data_parallel(128, 64),
            "none",
            "data_parallel over 128 threadgroups (at most 64 k tiles each, 0 idle)",
        ),
    ],
)
def test_the_line_counts_what_runs(work: Work, reduction: str, words: str) -> None:
    plan = plan_of(8, 4096, 4096, simdgroups_k=8, work=work, reduction=reduction)

    assert plan.explain() == (
        f"gemm_register 8x32x64, 1x8 simdgroups (m x k), 128 tiles of 64 k tiles, "
        f"{words}"
    )


def test_the_line_says_what_is_wide() -> None:
    work = replace(data_parallel(68, 64), strategy="hytis", whole=60)
    plan = plan_of(8, 4096, 4096, simdgroups_k=4, simdgroups_n=2, work=work)

    assert "hytis over 68 threadgroups (60 tiles 64 wide, at most" in plan.explain()
    assert (plan.wide_columns, plan.wide_n, plan.n_tiles) == (60, 64, 68)
    assert corner(plan, 59) == (0, 59 * 64)
    assert corner(plan, 60) == (0, 60 * 64)
    assert corner(plan, 61) == (0, 60 * 64 + 32)


def test_slices_are_whole_groups_where_equal_division_is_not() -> None:
    # 4096 / 3 is neither a multiple of the tile nor of the group.
    work = Work(strategy="split_k", tiles=1, k_tiles=64, threadgroups=3, slices=3)
    plan = plan_of(8, 32, 4096, work=work, reduction="workspace")

    slices = [
        k_range(plan, split) for index in range(3) for split in work.splits(index)
    ]
    assert slices == [(0, 1344), (1344, 2688), (2688, 4096)]


def test_a_last_slice_may_end_inside_a_tile_of_k() -> None:
    work = Work(strategy="split_k", tiles=1, k_tiles=3, threadgroups=3, slices=3)
    plan = plan_of(8, 32, 160, group_size=32, work=work, reduction="workspace")

    assert [k_range(plan, split) for split in work.splits(2)] == [(128, 160)]


TWO_SLICES = Work(strategy="split_k", tiles=4, k_tiles=2, threadgroups=8, slices=2)
WIDE = replace(data_parallel(3, 2), strategy="hytis", whole=1)
GEMV: dict[str, Any] = {
    **{"kernel": "gemv", "fragments_m": 0, "tile": Tile(m=2)},
    "problem": Problem(m=2, n=128, k=128),
}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kernel": "gemm"}, ["kernel='gemm'", "gemm_register"]),
        ({"reduction": "tree"}, ["reduction='tree'", "workspace"]),
        ({"kernel": "gemv"}, ["at most 5 rows", "m=8"]),
        ({"fragments_m": 4, "tile": Tile(m=32)}, ["fragments_m=4", "(1, 2)"]),
        ({"tile": Tile(m=16)}, ["tiles of 8 rows", "tile.m=16"]),
        ({"tile": Tile(m=8, n=64)}, ["32 and 64", "got 64 and 64"]),
        ({"tile": Tile(m=8, k=128)}, ["32 and 64", "got 32 and 128"]),
        ({"simdgroups_k": 0}, ["simdgroups_k=0", "at least 1"]),
        ({"simdgroups_k": 9}, ["simdgroups_k=9", "more than 8"]),
        ({"work": data_parallel(5, 2)}, ["4 tiles of 2", "got work with 5 of 2"]),
        ({"work": data_parallel(4, 3)}, ["4 tiles of 2", "got work with 4 of 3"]),
        ({"reduction": "workspace"}, ["reduction='workspace'", "are not split"]),
        ({"work": TWO_SLICES}, ["reduction='none'", "tiles are split"]),
        ({"simdgroups_n": 2, "simdgroups_k": 2}, ["simdgroups_n=2", "must be 1"]),
        ({"simdgroups_n": 0}, ["simdgroups_n=0", "must be 1"]),
        ({"work": WIDE}, ["simdgroups_n=1", "hytis"]),
        (
            {"work": WIDE, "simdgroups_n": 2, "simdgroups_k": 3},
            ["simdgroups_n=2", "simdgroups_k=3"],
        ),
        ({"work": WIDE, "simdgroups_n": 4, "simdgroups_k": 4}, ["whole=1", "n=128"]),
        (
            {"work": WIDE, "simdgroups_n": 2, "simdgroups_k": 2, "tile": Tile(m=16)}
            | {"fragments_m": 2, "problem": Problem(m=32, n=128, k=128)},
            ["whole=1", "columns of 2 tiles"],
        ),
        ({**GEMV, "tile": Tile(m=3)}, ["all m=2 rows", "tile.m=3"]),
        ({**GEMV, "fragments_m": 1}, ["fragments_m=0", "fragments_m=1"]),
        ({**GEMV, "simdgroups_m": 2}, ["simdgroups_m=1", "simdgroups_m=2"]),
    ],
)
def test_nonsense_is_refused_with_the_values(
    fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked
        plan_of(8, 128, 128, **fields)

    for word in words:
        assert word in str(caught.value)


def test_a_workspace_that_32_bits_cannot_count_is_refused() -> None:
    work = Work(
        strategy="split_k", tiles=2**12, k_tiles=64, threadgroups=2**17, slices=32
    )

    with pytest.raises(ValueError, match=r"k_parallel=32 .* \(32, 1024, 131072\)"):
        plan_of(
            2**10,
            2**17,
            4096,
            work=replace(work, tiles=2**19, threadgroups=2**24),
            reduction="workspace",
        )


INVARIANT = Problem(m=8, n=128, k=128, invariant=True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"operand": "offset"}, "operand='offset'"),
        (
            {"work": replace(TWO_SLICES, strategy="stripe"), "reduction": "workspace"},
            "strategy='stripe'",
        ),
        ({"work": TWO_SLICES, "reduction": "atomic"}, "reduction='atomic'"),
        ({**GEMV, "problem": replace(INVARIANT, m=2)}, "kernel='gemv'"),
    ],
)
def test_an_invariant_plan_is_one_that_every_m_can_have(
    fields: dict[str, Any], words: str
) -> None:
    allowed: dict[str, Any] = {"problem": INVARIANT, "operand": "exact"}
    split: dict[str, Any] = {"work": TWO_SLICES, "reduction": "workspace"}
    assert plan_of(8, 128, 128, **allowed).problem.invariant
    assert plan_of(8, 128, 128, **allowed, **split).problem.invariant

    with pytest.raises(ValueError, match=words):
        plan_of(8, 128, 128, **{**allowed, **fields})


BOTH_WAYS = pytest.mark.parametrize("transposed", [True, False])


@BOTH_WAYS
@given(problem=problems(max_n=300, max_k=1024, formats=ANY_FORMAT), times=st.data())
def test_chunks_of_a_decoded_weight_cover_it_exactly_once(
    transposed: bool, problem: Problem, times: st.DataObject
) -> None:
    side = 32 if transposed else 64
    chunk = side * times.draw(st.integers(1, 5))
    plan = DequantizePlan(problem=problem, transposed=transposed, chunk=chunk)

    ends = [0]
    for row, rows, first_k, length in plan.chunks:
        begin, size = (row, rows) if transposed else (first_k, length)
        # Along the other side, which is added up, each has everything.
        assert (first_k, length) == (0, problem.k) or not transposed
        assert (row, rows) == (0, problem.n) or transposed
        assert begin == ends[-1]
        assert begin % side == 0
        assert 0 < size <= chunk
        ends.append(begin + size)
    assert ends[-1] == plan.columns == (problem.n if transposed else problem.k)
    assert len(plan.chunks) == -(-plan.columns // chunk)
    _, rows, _, length = plan.chunks[0]
    assert plan.temporary_bytes == rows * length * DTYPE_BYTES[problem.dtype]


@BOTH_WAYS
@given(problem=problems(max_n=300_000, max_k=300_000, formats=ANY_FORMAT))
def test_decoded_weights_take_as_few_chunks_as_their_memory_allows(
    transposed: bool, problem: Problem
) -> None:
    plan = dequantize_plan(problem, transposed=transposed)

    side = 32 if transposed else 64
    across = problem.k if transposed else problem.n
    column = across * DTYPE_BYTES[problem.dtype]
    assert plan.temporary_bytes <= max(MOST_TEMPORARY, side * column)
    assert plan.chunk < plan.columns + side
    if len(plan.chunks) > 1:
        assert (plan.chunk + side) * column > MOST_TEMPORARY


@pytest.mark.parametrize(
    ("transposed", "chunk", "side"),
    [(True, 0, 32), (True, 48, 32), (True, -32, 32), (False, 32, 64), (False, 96, 64)],
)
def test_a_chunk_that_is_no_multiple_of_a_tile_is_refused(
    transposed: bool, chunk: int, side: int
) -> None:
    problem = Problem(m=100, n=128, k=128)

    with pytest.raises(ValueError, match=f"chunk={chunk} .* multiple of {side}"):
        DequantizePlan(problem=problem, transposed=transposed, chunk=chunk)


def test_a_decoded_weight_explains_itself_in_a_line() -> None:
    problem = Problem(m=100, n=4096, k=4096)

    assert dequantize_plan(problem).explain() == (
        "decoded once to float16 (32.0 MiB), mx.matmul"
    )
    assert DequantizePlan(problem=problem, chunk=2048).explain() == (
        "decoded once to float16 (16.0 MiB in 2 chunks), mx.matmul"
    )


@pytest.mark.parametrize(("m", "simdgroups_m"), [(16, 1), (25, 1), (24, 2)])
def test_three_fragments_have_one_tile_of_17_to_24_rows(
    m: int, simdgroups_m: int
) -> None:
    tile = Tile(m=24 * simdgroups_m)
    whole = data_parallel(2, 2)
    allowed: dict[str, Any] = {"fragments_m": 3, "tile": Tile(m=24), "work": whole}
    assert plan_of(17, 64, 128, **allowed).tile.m == 24

    with pytest.raises(ValueError, match="17 to 24 rows"):
        plan_of(m, 64, 128, fragments_m=3, simdgroups_m=simdgroups_m, tile=tile)


@pytest.mark.parametrize(
    ("operand", "fields", "words"),
    [
        ("wide", {}, "is not one of"),
        ("least_offset", {"dtype": "bfloat16"}, "is for float16"),
        ("bfloat", {"dtype": "float16"}, "is for bfloat16"),
        ("bfloat", {"dtype": "bfloat16", "bits": 8}, "at most 6 bits"),
        ("half_by_float", {"dtype": "float32"}, "is for bfloat16"),
        ("half_by_float", {"dtype": "bfloat16", "group_size": 16}, "groups of 32"),
        ("bfloat", {"dtype": "bfloat16", "mode": "mxfp4"}, "groups of 32"),
    ],
)
def test_forms_of_codes_are_those_of_their_operands(
    operand: str, fields: dict[str, Any], words: str
) -> None:
    form = {"layout": "marlin", "dtype": "float16", **fields}
    problem = problem_of(8, 64, 128, **form)

    with pytest.raises(ValueError, match=words):
        plan_of(8, 64, 128, problem=problem, operand=operand)
