"""Products with an epilogue, against float64."""

import mlx.core as mx
import numpy as np

from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.plan import Plan
from support import drawn_arrays, epilogues, oracles


def assert_finished(plan: Plan, *, seed: int) -> None:
    problem = plan.problem
    x, native = drawn_arrays.arrays(problem, seed=seed)
    finish = drawn_arrays.finish_arrays(problem, seed=seed)

    y = drawn_arrays.run(plan, x, native, *finish)

    total = oracles.product(x, *native, group_size=problem.group_size)
    expected = epilogues.finished(total, finish, problem.epilogue)
    assert y.shape == expected.shape
    assert y.dtype == getattr(mx, problem.dtype)
    off = np.abs(oracles.exact(y) - expected)
    assert np.all(off <= epilogues.allowed(plan, x, native, finish))
    has_offset = plan.operand != "exact" and problem.dtype == "float32"
    if expected.size >= oracles.MANY and not has_offset:
        # The error function alone is 1e-7 off; sums that meet no activation are not.
        assert oracles.error(y, expected) < 2 * oracles.TOLERANCES[problem.dtype]


EVERYTHING = Epilogue(bias=True, activation="silu", multiply=True, residual=True)
