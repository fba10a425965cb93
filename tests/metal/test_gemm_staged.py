"""`gemm_staged` against float64, in trace mode where the emulator runs it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.kernel_limits import PROBED
from mlx_marlin.backends.metal.plan import barriers
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import Reduction, step_k
from mlx_marlin.weights.formats import DTYPE_BYTES, LAYOUTS
from support import drawn_arrays, format_cases, oracles, orders, strategies
from support.drawn_arrays import another_schedule
from support.finished_products import EVERYTHING, assert_finished
from support.format_cases import Variant
from support.format_oracle import assert_close
from support.parts_of_plans import k_range
from support.profiles import sampled
from support.ragged_problems import in_float32
from support.trace_mode import emulator_only, needs_kernels

pytestmark = needs_kernels
STAGINGS = ((1, 0), (2, 0), (3, 0), (2, 1), (3, 2))
"""Buffers and loaders."""
by_staging = pytest.mark.parametrize(("buffers", "loaders"), STAGINGS)


def staged(plan: Plan, buffers: int, loaders: int, simdgroups_k: int = 2) -> Plan:
    return replace(
        plan,
        kernel="gemm_staged",
        simdgroups_k=simdgroups_k,
        buffers=buffers,
        loaders=loaders,
    )


def variants() -> Iterator[tuple[Variant, int, int, int]]:
    """Every format that a covering set has, and ways to stage it in turn.

    What is staged has the type of activations, so forms with others are exact instead.
    """
    ways = cycle((*way, rows) for rows in (1, 2) for way in STAGINGS)
    for variant in format_cases.VARIANTS:
        if variant.fragments:
            is_probed = variant.operand in PROBED
            staged = replace(variant, operand="exact") if is_probed else variant
            yield staged, *next(ways)


@sampled(2, 12)
@pytest.mark.parametrize(
    ("variant", "buffers", "loaders", "rows"), [*variants()], ids=str
)
def test_every_format_is_as_exact_as_promised_and_has_the_same_bits_twice(
    variant: Variant, buffers: int, loaders: int, rows: int
) -> None:
    m, n, k = 19, 75, 5 * variant.step
    body = variant.plan(m, n, k, threadgroups=7)
    # A tile of few rows has room for three buffers of float.
    fragments = 1 if buffers == 3 else variant.fragments
    overrides = PlanOverrides(kernel="gemm_staged", buffers=buffers, loaders=loaders)
    overrides["fragments_m"] = fragments
    if variant.dtype == "float16":
        fits = buffers < 3 or variant.group_size != 16  # three buffers with scales
        overrides["simdgroups_m"] = rows if fits else 1
    overrides["strategy"] = "stream_k" if variant.split else "data_parallel"
    if variant.split:
        overrides |= {"num_threadgroups": 7, "minimum": 1}
    plan = planner.make(body.problem, operand=variant.operand, **overrides)
    weight = variant.weight(n, k, seed=3)
    x = format_cases.activations(m, k, dtype=variant.dtype, seed=4)

    with another_schedule(1, trace=True):
        y = format_cases.run(plan, x, weight)
    with another_schedule(2, trace=True):
        again = format_cases.run(plan, x, weight)

    assert_close(y, x, weight, operand=variant.operand, dtype=variant.dtype)
    assert mx.array_equal(y, again)


RAGGED = Problem(m=11, n=150, k=11 * 64, group_size=32, layout="marlin")


@sampled(1)
@by_staging
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("reduction", ["workspace", "atomic"])
def test_all_strategies_give_the_same_integers_and_add_in_ascending_k(
    buffers: int, loaders: int, group_size: int, reduction: Reduction
) -> None:
    problem = in_float32(replace(RAGGED, group_size=group_size, k=11 * group_size))
    x, native, expected = drawn_arrays.integer_arrays(problem)
    along_k = 2 if group_size == 32 or buffers == 1 else 1
    for plan in strategies.one_of_each(problem, reduction=reduction):
        if plan.simdgroups_n > along_k:
            continue
        plan = staged(plan, buffers, loaders, along_k)
        with another_schedule(3, trace=True):
            y = drawn_arrays.run(plan, x, native)
            ones = drawn_arrays.run(
                plan, orders.one_in_each_trip(problem), orders.ones(problem)
            )

        np.testing.assert_array_equal(oracles.exact(y), expected)
        if reduction == "workspace":
            orders.assert_promised(ones, plan)


@sampled(1)
@by_staging
@pytest.mark.parametrize("reduction", ["none", "workspace"])
def test_an_epilogue_finishes_the_product(
    buffers: int, loaders: int, reduction: Reduction
) -> None:
    problem = Problem(m=19, n=70, k=448, epilogue=EVERYTHING)
    plan = planner.make(
        problem,
        kernel="gemm_staged",
        buffers=buffers,
        loaders=loaders,
        strategy="data_parallel" if reduction == "none" else "split_k",
        **({} if reduction == "none" else {"k_parallel": 3}),  # type: ignore[typeddict-item]
    )

    assert_finished(plan, seed=1)


@sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("m", [1, 8, 33, 70])
def test_what_is_made_on_a_wish_computes_the_product(
    m: int, dtype: str, layout: str
) -> None:
    problem = Problem(
        m=m, n=70, k=384, group_size=128, dtype=dtype, scale_dtype=dtype, layout=layout
    )
    plan = planner.make(problem, kernel="gemm_staged")
    weight = drawn_arrays.weight_of(problem, seed=m)
    x = format_cases.activations(m, problem.k, dtype=dtype, seed=m)

    y = format_cases.run(plan, x, weight)

    assert_close(y, x, weight, operand=plan.operand, dtype=dtype)


def stages(plan: Plan) -> Iterator[int]:
    """Yields the stages of every split."""
    step = step_k(plan.problem.group_size)
    for threadgroup in range(plan.num_threadgroups):
        for split in plan.work.splits(threadgroup):
            start, stop = k_range(plan, split)
            is_wide = plan.columns_of(split.tile) > plan.tile.n
            turns = plan.simdgroups_k // (plan.simdgroups_n if is_wide else 1)
            yield -(-(stop - start) // (step * turns))


@sampled(1)
@emulator_only
@by_staging
def test_barriers_memory_and_traffic_are_those_of_the_plan(
    buffers: int, loaders: int
) -> None:
    from metal_emulator import trace

    problem = replace(RAGGED, m=24, k=11 * 32)
    weight = drawn_arrays.weight_of(problem, seed=0)
    x = format_cases.activations(problem.m, problem.k, dtype=problem.dtype, seed=1)
    whole = planner.make(problem, strategy="data_parallel", simdgroups_k=2)
    assert (whole.fragments_m, whole.simdgroups_m, whole.m_tiles) == (2, 2, 1)
    streams = planner.make(
        problem, strategy="stream_k", num_threadgroups=7, minimum=1, simdgroups_k=2
    )
    wide = planner.make(problem, strategy="hytis", simdgroups_n=2, simdgroups_k=2)
    for plan in (whole, streams, wide):
        plan = staged(plan, buffers, loaders)

        found = trace(lambda plan=plan: format_cases.run(plan, x, weight))[0]

        # Two simdgroups multiply with the same words, that were read once.
        assert found.of("w").read_bytes == 160 * problem.k // 2
        assert found.of("w").repeated_read_bytes == 0
        # One wide tile has the columns of two, and stages x once.
        tiles = 5 - plan.wide_columns
        assert found.of("x").read_bytes == tiles * problem.activation_bytes
        # 24 rows are three fragments, 150 columns are 19, the last of five tiles has 3.
        steps = problem.k // 8
        assert found.count("matrix") == 3 * 19 * steps
        written, read = 5 * 4 + 3 * tiles, 2 * 19 + 3 * 5
        assert found.count("matrix memory") == (written + read) * steps
        ends = plan.work.pieces * (1 if plan.is_whole else 2)
        each = (barriers(count, buffers) for count in stages(plan))
        assert found.count("barrier") == sum(each) + ends
        assert found.threadgroup_bytes == plan.threadgroup_bytes
        scratch = found.of("scratch")
        assert scratch.bank_cycles == scratch.accesses
