"""Rows have the same bits among any others, and all is added in ascending k."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.backends import graph, planner, selection
from mlx_marlin.backends.devices import current, named
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experts import MetalGatherPlan
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from support import drawn_arrays, launches, oracles, orders, strategies
from support.drawn_arrays import run, stock
from support.finished_products import EVERYTHING
from support.profiles import drawn, sampled
from support.ragged_problems import in_float32
from support.trace_mode import needs_kernels

pytestmark = [pytest.mark.metal, needs_kernels]

ROWS = (1, 5, 8, 9, 31, 64)
MOST = 70
SHAPES = ((70, 448, 64), (33, 2048, 128), (150, 11 * 32, 32), (640, 128, 64))
"""n, k and the size of a group."""
CHIPS = ("Apple M1", "Apple M3 Max", "Apple M2 Ultra")


def planned(problem: Problem, chip: Device) -> dict[int, Plan]:
    """Returns the plans of a problem for several numbers of rows."""
    asked = (replace(problem, m=m) for m in (*ROWS, MOST))
    return {each.m: planner.choose(each, chip) for each in asked}


def assert_rows_keep_their_bits(problem: Problem, chip: Device, seed: int) -> None:
    x, native = drawn_arrays.arrays(replace(problem, m=MOST), seed=seed)
    plans = planned(problem, chip)
    of_all = plans.pop(MOST)
    whole = run(of_all, x, native)

    y = stock(of_all, x, native)
    oracles.assert_close(whole, y, x, native, group_size=problem.group_size)
    for m, plan in plans.items():
        assert mx.array_equal(run(plan, x[:m], native), whole[:m]), plan.explain()
    last = plans[ROWS[-1]]
    assert mx.array_equal(run(last, x[-ROWS[-1] :], native), whole[-ROWS[-1] :])


@sampled(1)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    n: int, k: int, group_size: int, dtype: str, layout: str, chip: str
) -> None:
    problem = Problem(
        m=1,
        n=n,
        k=k,
        group_size=group_size,
        dtype=dtype,
        scale_dtype=dtype,
        layout=layout,
        invariant=True,
    )
    assert_rows_keep_their_bits(problem, Device.named(chip), seed=n)


def test_the_shapes_above_are_split_in_every_way_there_is() -> None:
    """So that a bit that depends on the cut would show."""
    found = set()
    for chip in map(Device.named, CHIPS):
        for n, k, size in SHAPES:
            problem = Problem(m=1, n=n, k=k, group_size=size, invariant=True)
            plan = planner.choose(problem, chip)
            found.add((plan.strategy, plan.simdgroups_k > 1))

    assert ("split_k", True) in found
    assert {strategy for strategy, _ in found} == {"split_k", "data_parallel"}


def test_an_epilogue_keeps_them_too() -> None:
    problem = Problem(
        m=MOST,
        n=70,
        k=448,
        invariant=True,
        epilogue=EVERYTHING,
    )
    x, native = drawn_arrays.arrays(problem, seed=1)
    bias, multiplier, residual = drawn_arrays.finish_arrays(problem, seed=2)
    plans = planned(problem, Device.named("Apple M1"))
    whole = run(plans.pop(MOST), x, native, bias, multiplier, residual)

    for m, plan in plans.items():
        y = run(plan, x[:m], native, bias, multiplier[:m], residual[:m])
        assert mx.array_equal(y, whole[:m])


@given(
    problem=strategies.problems(max_m=1, max_n=40_000, max_k=30_000),
    chip=strategies.devices(),
    rows=st.integers(1, 300),
)
def test_the_cut_of_k_does_not_depend_on_the_rows(
    problem: Problem, chip: Device, rows: int
) -> None:
    problem = replace(problem, invariant=True)

    one, several = (planner.choose(replace(problem, m=m), chip) for m in (1, rows))

    assert one.work.slices == several.work.slices
    assert one.simdgroups_k == several.simdgroups_k
    assert one.tile.k == several.tile.k
    assert one.work.k_tiles == several.work.k_tiles
    for plan in (one, several):
        assert plan.kernel == "gemm_register"
        assert plan.operand == "exact"
        assert plan.reduction != "atomic"
        assert plan.strategy in ("data_parallel", "split_k")


@drawn(
    4,
    plan=strategies.runnable_plans(
        dtypes=st.just("float32"), atomic=False, batches=st.integers(1, 3)
    ).filter(lambda plan: plan.operand == "exact"),
    seed=st.integers(0, 2**31),
)
def test_every_plan_adds_in_ascending_k(plan: Plan, seed: int) -> None:
    problem = plan.problem

    with drawn_arrays.another_schedule(seed):
        y = run(plan, orders.one_in_each_trip(problem), orders.ones(problem))

    orders.assert_promised(y, plan)


@sampled(2)
@pytest.mark.skipif(
    selection.backend() == "metal" and not current().has_tensor_units,
    reason="nothing here runs tensor operations",
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("way", [{"strategy": "data_parallel"}, {"k_parallel": 3}])
def test_tensor_operations_are_added_in_ascending_k(
    way: dict[str, object], dtype: str
) -> None:
    problem = Problem(m=27, n=70, k=23 * 64, dtype=dtype, scale_dtype=dtype)
    split = {"strategy": "split_k", "simdgroups_k": 4, **way}
    plan = planner.make(
        problem, device=named("Apple M5 Max"), kernel="gemm_tensor", **split
    )
    plan = replace(plan, operand="exact")

    y = run(plan, orders.one_in_each_trip(problem), orders.ones(problem))

    orders.assert_promised(y, plan)


@pytest.mark.parametrize("m", [2, 9])
def test_gate_and_up_are_added_in_ascending_k(m: int) -> None:
    problem = in_float32(Problem(m=m, n=80, k=23 * 64, epilogue=Epilogue(gated=True)))
    plan = planner.make(problem, strategy="data_parallel", simdgroups_k=6)
    plan = replace(plan, operand="exact")
    alone = replace(problem, n=40, epilogue=Epilogue())
    half = planner.make(alone, strategy="data_parallel", simdgroups_k=3)

    y = run(plan, orders.one_in_each_trip(problem), orders.ones(problem))

    np.testing.assert_array_equal(np.array(y), orders.promised(half) ** 2)


@pytest.mark.parametrize("dot_rows", [0, 2])
def test_products_of_experts_are_added_in_ascending_k(dot_rows: int) -> None:
    problem = in_float32(Problem(m=5, n=70, k=23 * 64))
    plan = MetalGatherPlan(
        gather=GatherProblem(problem=problem, experts=2, pairs_per_row=1),
        fragments_m=1,
        simdgroups_m=1,
        simdgroups_k=4,
        dot_rows=dot_rows,
        operand="exact",
    )
    weight = [mx.stack([each, each]) for each in orders.ones(problem)]
    chosen = mx.array([1, 0, 1, 1, 1], mx.uint32)

    y = graph.gather_product(plan)(orders.one_in_each_trip(problem), *weight, chosen)

    alone = planner.make(problem, strategy="data_parallel", simdgroups_k=4)
    orders.assert_promised(y.squeeze(1), alone)


def test_experts_are_added_in_their_order_and_then_to_the_residual() -> None:
    orders.check_sum_of_experts(launches.combine)
