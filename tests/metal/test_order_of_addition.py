"""Kernels add in ascending k: within a simdgroup, a split and a tile."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_marlin.backends import graph, planner, selection
from mlx_marlin.backends.devices import current, named
from mlx_marlin.backends.metal.experts import MetalGatherPlan
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from support import drawn_arrays, launches, orders, strategies
from support.drawn_arrays import run
from support.profiles import drawn, sampled
from support.ragged_problems import in_float32
from support.trace_mode import needs_kernels

pytestmark = [pytest.mark.metal, needs_kernels]


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
