"""Problems that are tuned, and their exact products."""

from functools import cache

import mlx.core as mx
import numpy as np

from mlx_marlin.backends.metal.device import Device
from mlx_marlin.measure import operands
from mlx_marlin.measure.operands import Operands
from mlx_marlin.planning.problem import Problem
from support import oracles

M3_MAX = Device.named("M3 Max")

SMALL = Problem(m=4, n=64, k=256)

LARGE = Problem(m=8, n=4096, k=4096)


@cache
def exact_product_of(problem: Problem) -> mx.array:
    """Returns the product of the operands that are drawn for a problem."""
    return exact_product(operands.operands(problem, 1))


def exact_product(given: Operands) -> mx.array:
    y = oracles.product(given.x, *given.native, group_size=given.problem.group_size)
    return mx.array(y.astype(np.float32)).astype(getattr(mx, given.problem.dtype))
