"""The products of the shaders against float64."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_marlin.backends import graph, planner
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import Reduction
from mlx_marlin.planning.work.work import STRATEGIES
from support import drawn_arrays, format_cases, launches, oracles, orders, strategies
from support.drawn_arrays import Native, run, stock
from support.parts_of_plans import corner, product_of
from support.profiles import drawn, sampled
from support.ragged_problems import RAGGED, RAGGED_BATCHES, in_float32
from support.trace_mode import needs_kernels

pytestmark = [pytest.mark.metal, needs_kernels]


@drawn(
    6,
    plan=strategies.runnable_plans(batches=st.integers(1, 3)),
    seed=st.integers(0, 2**16),
    offsets=st.tuples(*[st.integers(0, 9)] * 4),
)
def test_every_plan_computes_the_product(
    plan: Plan, seed: int, offsets: tuple[int, ...]
) -> None:
    x, native = drawn_arrays.arrays(plan.problem, seed=seed)

    y = run(plan, x, native)

    assert y.shape == plan.problem.result_shape
    assert_close_to_stock(y, plan, x, native)
    assert_integers_are_exact(plan, x, native, seed)
    if plan.reduction != "atomic":  # the same bits wherever and whenever
        operands = (x, *drawn_arrays.stored(plan.problem, native))
        views = map(drawn_arrays.shifted, operands, offsets)
        with drawn_arrays.another_schedule(seed):
            again = graph.product(plan)(*views)
            assert mx.array_equal(y, again)


def assert_close_to_stock(y: mx.array, plan: Plan, x: mx.array, native: Native) -> None:
    oracles.assert_close(
        y,
        stock(plan, x, native),
        x,
        native,
        group_size=plan.problem.group_size,
        offset=format_cases.offset_of(plan.problem.format, plan.operand),
    )


def assert_integers_are_exact(
    plan: Plan, x: mx.array, native: Native, seed: int
) -> None:
    """Products stay below 2**8 even for bfloat16: four terms a row, of -1, 0 or 1."""
    w, scales, biases = native
    draw = np.random.default_rng(seed)
    ones = np.zeros((x.size // x.shape[-1], x.shape[-1]), np.float32)
    for row in ones:
        row[draw.choice(row.size, 4, replace=False)] = draw.integers(-1, 2, 4)
    x = mx.array(ones).reshape(x.shape).astype(x.dtype)
    scales = mx.array(draw.choice([-2, -1, 1, 2], scales.shape)).astype(scales.dtype)
    biases = mx.array(draw.integers(-8, 9, biases.shape)).astype(biases.dtype)

    y = run(plan, x, (w, scales, biases))

    group_size = plan.problem.group_size
    expected = oracles.product(x, w, scales, biases, group_size=group_size)
    np.testing.assert_array_equal(oracles.exact(y), expected)


@sampled(3, 7)
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

    assert_close_to_stock(y, plan, x, native)


@sampled(2, 4)
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


@drawn(2, plan=strategies.runnable_plans(max_k=256, dtypes=st.just("float32")))
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


ANY = pytest.mark.parametrize(
    "problem",
    [*RAGGED.values(), *RAGGED_BATCHES.values()],
    ids=[*RAGGED, *RAGGED_BATCHES],
)


@sampled(1, 4)
@pytest.mark.parametrize("reduction", ["workspace", "atomic"])
@ANY
def test_all_strategies_give_the_same_integers_and_add_in_ascending_k(
    problem: Problem, reduction: Reduction
) -> None:
    halves, problem = problem, in_float32(problem)
    plans = strategies.one_of_each(problem, reduction=reduction)
    of_one = {"hytis"} if problem.batch > 1 else set()  # takes one weight
    assert {plan.strategy for plan in plans} == {*STRATEGIES} - of_one
    assert max(plan.work.slots for plan in plans) >= 3
    assert problem.batch == 1 or any(map(crosses, plans))
    x, native, expected = drawn_arrays.integer_arrays(problem)

    for plan in plans:
        with drawn_arrays.another_schedule(2, trace=problem.batch > 1):
            y = run(plan, x, native)
            ones = run(plan, orders.one_in_each_trip(problem), orders.ones(problem))

        np.testing.assert_array_equal(np.array(y), expected)
        if reduction == "workspace" and problem.batch == 1:
            plan_of_halves = replace(plan, problem=halves)
            x16, native16 = drawn_arrays.arrays(halves, seed=3)
            y16 = run(plan_of_halves, x16, native16)
            assert_close_to_stock(y16, plan_of_halves, x16, native16)
        if reduction == "workspace":
            orders.assert_promised(ones, plan)


def crosses(plan: Plan) -> bool:
    """Whether a threadgroup has k tiles of one product and of the next."""
    groups = range(plan.num_threadgroups)
    products = ({product_of(plan, s.tile) for s in plan.work.splits(g)} for g in groups)
    return any(len(each) > 1 for each in products)


@ANY
def test_a_reduce_reads_the_slots_that_were_written_and_no_other(
    problem: Problem,
) -> None:
    for plan in strategies.one_of_each(in_float32(problem)):
        if not plan.is_split:
            continue
        partials = np.full(plan.workspace_shape, np.nan, np.float32)
        expected = np.zeros(plan.workspace_shape[1:], np.float32)
        draw = np.random.default_rng(5)
        for threadgroup in range(plan.num_threadgroups):
            for split in plan.work.splits(threadgroup):
                row, col = corner(plan, split.tile)
                first = product_of(plan, split.tile) * problem.m
                rows = slice(first + row, first + min(row + plan.tile.m, problem.m))
                part = rows, slice(col, col + plan.tile.n)
                # Integers: in which order they are added does not matter here.
                values = draw.integers(-99, 100, expected[part].shape)
                partials[(split.slot, *part)] = values
                expected[part] += values

        y = launches.reduction(plan)(mx.array(partials))

        np.testing.assert_array_equal(
            np.array(y), expected.reshape(problem.result_shape)
        )
