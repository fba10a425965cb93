"""Cost of the main loop of `gemm_tensor`: memory, tensor units, and feeding them.

*Feeding* is what comes between the words of a weight and a tensor operation: loads,
decoding, scales, and waiting for one another. Published kernels of this design reach
neither the bandwidth nor the rate of the tensor units, though their instructions take a
third of the time, so feeding is a rate that is fitted to their times (docs/m5.md).
"""

from functools import lru_cache

from mlx_marlin.backends.metal.cost.counts import loop_cost
from mlx_marlin.backends.metal.cost.main_loop import (
    WEIGHTS_PER_TRIP,
    MainLoop,
    padded_weights,
)
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.limits import TENSOR_FRAGMENTS_M
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import FRAGMENT, step_k
from mlx_marlin.weights.formats import DTYPE_BYTES, TILE_N

OPERATION_ROWS = FRAGMENT * TENSOR_FRAGMENTS_M
"""Rows of x of a tensor operation, and of a simdgroup."""
FEEDING = 3.3
"""Time of an iteration over that of its counted issue slots. Fitted to four published
times of similar kernels on an M5 Max (docs/m5.md), not measured with this kernel."""


@lru_cache(maxsize=1024)
def tensor_loop(problem: Problem, device: Device) -> MainLoop:
    """Returns the cost of the main loop of `gemm_tensor`.

    Slots are those of `gemm_register` with 16 rows, which decodes the same words, adds
    up the same activations and scales as many sums.

    Args:
        problem: The product.
        device: The chip to plan for.
    """
    counts = loop_cost(problem.mode, problem.bits, problem.group_size, problem.layout)
    weights = padded_weights(problem)
    readers = -(-problem.m // OPERATION_ROWS)
    counted = counts.fragments[TENSOR_FRAGMENTS_M - 1][0]
    slots = FEEDING * counted * readers * weights / WEIGHTS_PER_TRIP
    size = problem.format.scale_bytes(problem.group_size, problem.scale_dtype)
    parameters = 4 * size / step_k(problem.group_size)
    of_x = OPERATION_ROWS / TILE_N * DTYPE_BYTES[problem.dtype]
    lane_bytes = readers * weights * (problem.bits / 8 + parameters + of_x)
    matrix = (
        2 * OPERATION_ROWS * readers * weights / (device.clocks * device.matrix_flops)
    )
    return MainLoop(
        bytes=problem.bytes,
        slots=slots,
        lane_bytes=lane_bytes,
        matrix=matrix,
    )
