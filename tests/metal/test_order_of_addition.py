"""Kernels add in ascending k: within a simdgroup, a split and a tile."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_marlin.backends import launch, planner, selection
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from support import drawn_arrays, orders, strategies
from support.drawn_arrays import run
from support.grids import drawn
from support.ragged_problems import RAGGED, in_float32

pytestmark = pytest.mark.skipif(
    selection.backend() == "stock", reason="nothing here runs Metal kernels"
)


@pytest.mark.parametrize("problem", RAGGED.values(), ids=RAGGED)
def test_all_strategies_add_in_ascending_k(problem: Problem) -> None:
    problem = in_float32(problem)
    x, weight = orders.one_in_each_trip(problem), orders.ones(problem)
    for plan in strategies.one_of_each(problem):
        expected = orders.promised(plan)

        for seed in range(2):
            with drawn_arrays.another_schedule(seed):
                y = run(plan, x, weight)

            np.testing.assert_array_equal(np.array(y), expected)


@drawn(
    5,
    30,
    plan=strategies.runnable_plans(dtypes=st.just("float32"), atomic=False).filter(
        lambda plan: plan.subtract
    ),
)
def test_every_plan_adds_in_ascending_k(plan: Plan) -> None:
    problem = plan.problem

    y = run(plan, orders.one_in_each_trip(problem), orders.ones(problem))

    np.testing.assert_array_equal(np.array(y), orders.promised(plan))


@drawn(
    6,
    30,
    plan=strategies.runnable_plans(
        dtypes=st.just("float32"), atomic=False, batches=strategies.BATCHES
    ).filter(lambda plan: plan.subtract),
    seed=st.integers(0, 2**31),
)
def test_every_plan_of_a_batch_adds_in_ascending_k(plan: Plan, seed: int) -> None:
    problem = plan.problem

    with drawn_arrays.another_schedule(seed):
        y = run(plan, orders.one_in_each_trip(problem), orders.ones(problem))

    np.testing.assert_array_equal(np.array(y), orders.promised(plan))


def test_partial_sums_are_added_in_ascending_k() -> None:
    problem = Problem(m=3, n=40, k=512, dtype="float32", scale_dtype="float32")
    plan = planner.make(problem, strategy="split_k", k_parallel=7)
    random = np.random.default_rng(0)
    size = plan.workspace_shape
    assert size[0] == 7
    partials = random.normal(size=size) * 10.0 ** random.integers(-3, 4, size)

    y = launch.reduction(plan)(mx.array(partials.astype(np.float32)))

    expected = np.zeros(size[1:], np.float32)
    for partial in partials.astype(np.float32):
        expected += partial
    np.testing.assert_array_equal(np.array(y), expected)
