"""The products of the shaders against float64."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_marlin.backends import planner
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.division import STRATEGIES
from mlx_marlin.planning.work.tiles import Reduction
from support import drawn_arrays, format_cases, launches, oracles, strategies
from support.drawn_arrays import run, stock
from support.parts_of_plans import corner
from support.profiles import drawn, sampled
from support.ragged_problems import RAGGED, in_float32
from support.trace_mode import needs_kernels

pytestmark = [pytest.mark.metal, needs_kernels]


@drawn(5, 24, case=strategies.cases())
def test_every_plan_computes_the_product(case: strategies.Case) -> None:
    plan, x, native = case

    y = run(plan, x, native)

    oracles.assert_close(
        y,
        stock(plan, x, native),
        x,
        native,
        group_size=plan.problem.group_size,
        offset=format_cases.offset_of(plan.problem.format, plan.operand),
    )


@sampled(6)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("m", [1, 3, 7, 8, 9, 31, 33, 64])
def test_the_chosen_plan_computes_the_product(
    m: int, group_size: int, dtype: str, layout: str
) -> None:
    problem = Problem(
        m=m,
        n=70,
        k=3 * group_size,
        group_size=group_size,
        dtype=dtype,
        scale_dtype=dtype,
        layout=layout,
    )
    plan = planner.choose(problem, strategies.KNOWN_DEVICES[0])
    x, native = drawn_arrays.arrays(problem, seed=m)

    y = run(plan, x, native)

    oracles.assert_close(
        y,
        stock(plan, x, native),
        x,
        native,
        group_size=group_size,
        offset=format_cases.offset_of(plan.problem.format, plan.operand),
    )


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("m", [17, 20, 24])
def test_three_fragments_have_the_bits_of_two(m: int, dtype: str, layout: str) -> None:
    """The form of codes is the same, and so is each row's order of addition."""
    problem = Problem(m=m, n=70, k=320, dtype=dtype, scale_dtype=dtype, layout=layout)
    x, native = drawn_arrays.arrays(problem, seed=m)
    plans = [
        planner.make(
            problem,
            device=strategies.KNOWN_DEVICES[-1],
            kernel="gemm_register",
            fragments_m=fragments_m,
            simdgroups_k=2,
            strategy="data_parallel",
        )
        for fragments_m in (2, 3)
    ]
    assert [plan.tile.m for plan in plans] == [32, 24]

    two, three = (run(plan, x, native) for plan in plans)

    assert mx.array_equal(two, three)


@drawn(3, 20, case=strategies.cases(), data=st.data())
def test_integers_come_out_exactly(case: strategies.Case, data: st.DataObject) -> None:
    plan, x, (w, scales, biases) = case
    problem = plan.problem
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    # Products stay below 2**8 bits even for bfloat16: four terms a row, of -1, 0 or 1.
    ones = np.zeros(x.shape, np.float32)
    for row in ones:
        row[draw.choice(problem.k, 4, replace=False)] = draw.integers(-1, 2, 4)
    x = mx.array(ones).astype(x.dtype)
    scales = mx.array(draw.choice([-2, -1, 1, 2], scales.shape)).astype(scales.dtype)
    biases = mx.array(draw.integers(-8, 9, biases.shape)).astype(biases.dtype)

    y = run(plan, x, (w, scales, biases))

    expected = oracles.product(x, w, scales, biases, group_size=problem.group_size)
    np.testing.assert_array_equal(oracles.exact(y), expected)


@drawn(3, 20, plan=strategies.runnable_plans(max_k=256, dtypes=st.just("float32")))
def test_unit_activations_read_back_every_weight_bit_for_bit(plan: Plan) -> None:
    problem = plan.problem
    _, (w, *floats) = drawn_arrays.arrays(problem, seed=0)
    # With the precision of half, scale * q is exact in float32: one rounding is left.
    scales, biases = (each.astype(mx.float16).astype(mx.float32) for each in floats)
    native = w, scales, biases
    decoded = oracles.decoded(*native, group_size=problem.group_size)

    for first in range(0, problem.k, problem.m):
        unit = mx.array(np.eye(problem.m, problem.k, first, dtype=np.float32))
        y = run(plan, unit, native)

        expected = np.zeros((problem.m, problem.n), np.float32)
        columns = decoded[:, first : first + problem.m].T
        expected[: columns.shape[0]] = columns.astype(np.float32)
        np.testing.assert_array_equal(np.array(y), expected)


@drawn(3, 20, case=strategies.cases(atomic=False), seed=st.integers(0, 2**31))
def test_every_run_gives_the_same_bits(case: strategies.Case, seed: int) -> None:
    plan, x, native = case
    first = run(plan, x, native)

    with drawn_arrays.another_schedule(seed):
        second = run(plan, x, native)

    assert mx.array_equal(first, second)


@drawn(
    3,
    20,
    case=strategies.cases(atomic=False),
    offsets=st.tuples(*[st.integers(0, 9)] * 4),
)
def test_arrays_may_start_anywhere_in_their_buffers(
    case: strategies.Case, offsets: tuple[int, ...]
) -> None:
    plan, x, native = case
    arrays = (x, *native)
    shifted = [
        mx.concatenate([mx.zeros(offset, array.dtype), array.flatten()])[offset:]
        for offset, array in zip(offsets, arrays, strict=True)
    ]
    mx.eval(shifted)
    views = [
        view.reshape(array.shape) for view, array in zip(shifted, arrays, strict=True)
    ]

    y = run(plan, views[0], (views[1], views[2], views[3]))

    assert mx.array_equal(y, run(plan, x, native))


@sampled(1)
@pytest.mark.parametrize("m", [2, 12])
def test_a_threadgroup_may_have_many_units(m: int) -> None:
    """Its scratch is used again, so a unit must wait until the one before is stored."""
    problem = Problem(m=m, n=192, k=1024)
    plan = planner.make(
        problem, strategy="stripe", num_threadgroups=1, k_parallel=2, simdgroups_k=8
    )
    x, native = drawn_arrays.arrays(problem, seed=m)
    one_each = planner.make(problem, strategy="split_k", k_parallel=2)
    expected = run(one_each, x, native)

    for seed in range(8):
        with drawn_arrays.another_schedule(seed):
            y = run(plan, x, native)

        assert mx.allclose(y, expected, rtol=0, atol=0.01)


REDUCTIONS: tuple[Reduction, ...] = ("workspace", "atomic")


@sampled(1)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("problem", RAGGED.values(), ids=RAGGED)
def test_all_strategies_give_the_same_integers(
    problem: Problem, reduction: Reduction
) -> None:
    plans = strategies.one_of_each(in_float32(problem), reduction=reduction)
    assert {plan.strategy for plan in plans} == {*STRATEGIES}
    assert max(plan.work.slots for plan in plans) >= 3
    draw = np.random.default_rng(problem.n)
    x = mx.array(draw.integers(-8, 9, (problem.m, problem.k)).astype(np.float32))
    _, (w, *_) = drawn_arrays.arrays(in_float32(problem), seed=1)
    scales = mx.array(draw.integers(-4, 5, (problem.n, problem.groups)), mx.float32)
    biases = mx.array(draw.integers(-8, 9, (problem.n, problem.groups)), mx.float32)

    results = [np.array(run(plan, x, (w, scales, biases))) for plan in plans]

    for y in results:
        np.testing.assert_array_equal(y, results[0])
    expected = oracles.product(x, w, scales, biases, group_size=problem.group_size)
    np.testing.assert_array_equal(results[0], expected)


@sampled(1)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("problem", RAGGED.values(), ids=RAGGED)
def test_all_strategies_compute_the_product(
    problem: Problem, dtype: str, reduction: Reduction
) -> None:
    problem = replace(problem, dtype=dtype, scale_dtype=dtype)
    x, native = drawn_arrays.arrays(problem, seed=3)
    for plan in strategies.one_of_each(problem, reduction=reduction):
        oracles.assert_close(
            run(plan, x, native),
            stock(plan, x, native),
            x,
            native,
            group_size=problem.group_size,
        )


@pytest.mark.parametrize("problem", RAGGED.values(), ids=RAGGED)
def test_a_reduce_reads_the_slots_that_were_written_and_no_other(
    problem: Problem,
) -> None:
    for plan in strategies.one_of_each(in_float32(problem)):
        if not plan.is_split:
            continue
        partials = np.full(plan.workspace_shape, np.nan, np.float32)
        expected = np.zeros((problem.m, problem.n), np.float32)
        draw = np.random.default_rng(5)
        for threadgroup in range(plan.num_threadgroups):
            for split in plan.work.splits(threadgroup):
                row, col = corner(plan, split.tile)
                part = np.s_[row : row + plan.tile.m, col : col + plan.tile.n]
                # Integers: in which order they are added does not matter here.
                own = draw.integers(-99, 100, expected[part].shape)
                partials[split.slot][part] = own
                expected[part] += own

        y = launches.reduction(plan)(mx.array(partials))

        np.testing.assert_array_equal(np.array(y), expected)
