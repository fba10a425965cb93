"""What happens to a product before it is stored, against float64."""

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_marlin.backends import planner
from mlx_marlin.planning.epilogue import ACTIVATIONS, Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import Reduction
from support import drawn_arrays, epilogues, oracles, strategies
from support.drawn_arrays import run
from support.finished_products import EVERYTHING, assert_finished
from support.profiles import drawn, sampled
from support.trace_mode import needs_kernels

pytestmark = [pytest.mark.metal, needs_kernels]


@drawn(
    4,
    plan=strategies.runnable_plans(
        max_k=384, epilogues=strategies.EPILOGUES, batches=st.integers(1, 3)
    ),
    seed=st.integers(0, 2**16),
)
def test_every_plan_finishes_its_product(plan: Plan, seed: int) -> None:
    assert_finished(plan, seed=seed)


ROWS = {"gemv": 3, "gemm_register": 11}
ROUTES: tuple[Reduction, ...] = ("none", "workspace", "atomic")


def plan_of(epilogue: Epilogue, m: int, route: Reduction, dtype: str) -> Plan:
    problem = Problem(
        m=m, n=70, k=448, dtype=dtype, scale_dtype=dtype, epilogue=epilogue
    )
    if route == "none":
        return planner.make(problem, strategy="data_parallel")
    return planner.make(
        problem, strategy="stream_k", num_threadgroups=7, minimum=2, reduction=route
    )


@sampled(3)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kernel", ROWS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_activation_on_each_way_to_the_result(
    activation: str, kernel: str, route: Reduction
) -> None:
    epilogue = replace(EVERYTHING, activation=activation)
    plan = plan_of(epilogue, ROWS[kernel], route, "float32")
    assert (plan.kernel, plan.reduction) == (kernel, route)

    assert_finished(plan, seed=1)


@sampled(1, 4)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "epilogue",
    [
        Epilogue(bias=True),
        Epilogue(activation="gelu"),
        Epilogue(multiply=True),
        Epilogue(residual=True),
        Epilogue(bias=True, residual=True),
        Epilogue(activation="silu", multiply=True),
    ],
    ids=Epilogue.explain,
)
def test_each_operand_alone(epilogue: Epilogue, dtype: str, route: Reduction) -> None:
    for m in ROWS.values():
        assert_finished(plan_of(epilogue, m, route, dtype), seed=2)


@sampled(3)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 2), (1, 7), (2, 4), (9, 1)])
def test_results_of_fewer_than_eight_elements(m: int, n: int, route: Reduction) -> None:
    """MLX would hand over their operands in another address space."""
    problem = Problem(m=m, n=n, k=256, epilogue=EVERYTHING)
    plan = planner.make(problem, strategy="data_parallel")
    if route != "none":
        plan = planner.make(problem, strategy="split_k", k_parallel=3, reduction=route)

    assert_finished(plan, seed=3)


@sampled(2)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_values_stay_numbers(activation: str, route: Reduction) -> None:
    """Where float64 has a number, nothing overflows on the way."""
    small, large = [0, 1e-30, 0.2, 0.6, 1, 2, 4], [30, 89, 1e3, 1e4, 7e12, 1e19, 1e30]
    sizes = np.array([*small, *large], np.float32)
    values = np.concatenate([sizes, -sizes])
    epilogue = Epilogue(bias=True, activation=activation)
    problem = Problem(
        m=2,
        n=values.size,
        k=256,
        dtype="float32",
        scale_dtype="float32",
        epilogue=epilogue,
    )
    plan = planner.make(problem, strategy="data_parallel")
    if route != "none":
        plan = planner.make(problem, strategy="split_k", k_parallel=3, reduction=route)
    _, native = drawn_arrays.arrays(problem, seed=0)
    x = mx.zeros((2, 256))
    result = mx.zeros((2, values.size))

    y = oracles.exact(run(plan, x, native, mx.array(values), result, result))

    expected = epilogues.activated(values.astype(float), activation)
    assert np.isfinite(expected).all()
    assert np.isfinite(y).all()
    share = epilogues.OF_ACTIVATION[activation] + 2.0**-22
    # A float32 denormal may become zero on the way.
    bound = share * np.abs(values) + 2.0**-126
    assert np.all(np.abs(y - expected) <= bound)


@sampled(2)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_zero_keeps_the_sign_that_float64_gives_it(
    activation: str, route: Reduction
) -> None:
    epilogue = Epilogue(activation=activation, multiply=True)
    plan = plan_of(epilogue, 3, route, "float32")
    _, native = drawn_arrays.arrays(plan.problem, seed=0)
    signs = np.where(np.arange(3 * 70) % 2, -1, 1).reshape(3, 70).astype(np.float32)
    finish = (mx.zeros(70), mx.array(signs), mx.array(signs))

    y = np.array(run(plan, mx.zeros((3, 448)), native, *finish))

    assert np.all(y == 0)
    np.testing.assert_array_equal(np.signbit(y), signs < 0)


@sampled(4)
@pytest.mark.parametrize("route", ROUTES[:2])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_nan_in_one_operand_is_in_its_results(
    activation: str, route: Reduction
) -> None:
    plan = plan_of(replace(EVERYTHING, activation=activation), 3, route, "float32")
    x, native = drawn_arrays.arrays(plan.problem, seed=7)
    operands = [x, *native[1:], *drawn_arrays.finish_arrays(plan.problem, seed=7)]
    clean = np.array(run(plan, x, native, *operands[3:]))
    for index, operand in enumerate(operands):
        given = [*operands]
        given[index] = operand + 0
        given[index][(..., 2, 5)[-operand.ndim :]] = mx.nan
        x, scales, biases, *finish = given

        y = np.array(run(plan, x, (native[0], scales, biases), *finish))

        total = oracles.product(x, native[0], scales, biases, group_size=64)
        expected = epilogues.finished(total, (*finish,), plan.problem.epilogue)
        assert np.isnan(expected).any()
        np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
        np.testing.assert_array_equal(y[~np.isnan(y)], clean[~np.isnan(y)])


@pytest.mark.parametrize("route", ROUTES)
def test_what_an_epilogue_leaves_out_is_not_read(route: Reduction) -> None:
    """Not a number in it would show."""
    plan = plan_of(Epilogue(bias=True), 3, route, "float16")
    x, native = drawn_arrays.arrays(plan.problem, seed=5)
    bias, *_ = drawn_arrays.finish_arrays(plan.problem, seed=5)
    unused = mx.full((8,), math.nan, mx.float16)

    y = run(plan, x, native, bias, unused, unused)

    assert not mx.any(mx.isnan(y)).item()
    result = mx.zeros((3, 70), mx.float16)
    if plan.reduction != "atomic":
        assert mx.array_equal(y, run(plan, x, native, bias, result, result))


def test_operands_may_start_anywhere_in_their_buffers() -> None:
    for route in ROUTES[:2]:
        plan = plan_of(EVERYTHING, 3, route, "float16")
        x, native = drawn_arrays.arrays(plan.problem, seed=6)
        finish = drawn_arrays.finish_arrays(plan.problem, seed=6)
        moved = map(drawn_arrays.shifted, finish, (1, 3, 5))

        y = run(plan, x, native, *moved)

        assert mx.array_equal(y, run(plan, x, native, *finish))
