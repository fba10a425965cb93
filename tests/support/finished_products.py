"""Products with an epilogue, against float64."""

import mlx.core as mx
import numpy as np

from mlx_marlin.backends import launch
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.products.packing import pack
from support import epilogues, oracles, strategies


def run(
    plan: Plan, x: mx.array, native: strategies.Native, finish: strategies.Native
) -> mx.array:
    weight = native
    if plan.problem.layout == "marlin":
        packed = pack(*native, group_size=plan.problem.group_size)
        weight = (packed.words, packed.scales, packed.scales)
    rest = () if plan.problem.epilogue == PLAIN else finish
    y = launch.product(plan)(x, *weight, *rest)
    mx.eval(y)
    return y


def assert_finished(plan: Plan, *, seed: int) -> None:
    problem = plan.problem
    x, native = strategies.arrays(problem, seed=seed)
    finish = strategies.finish_arrays(problem, seed=seed)

    y = run(plan, x, native, finish)

    total = oracles.product(x, *native, group_size=problem.group_size)
    expected = epilogues.finished(total, finish, problem.epilogue)
    assert y.shape == expected.shape
    assert y.dtype == getattr(mx, problem.dtype)
    off = np.abs(oracles.exact(y) - expected)
    assert np.all(off <= epilogues.allowed(plan, x, native, finish))
    if expected.size >= oracles.MANY and (plan.subtract or problem.dtype != "float32"):
        # The error function alone is 1e-7 off; sums that meet no activation are not.
        assert oracles.error(y, expected) < 2 * oracles.TOLERANCES[problem.dtype]


EVERYTHING = Epilogue(bias=True, activation="silu", multiply=True, residual=True)
