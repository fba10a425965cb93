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
from mlx_marlin.backends.metal.limits import OPERATION_FRAGMENTS
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import FRAGMENT, step_k
from mlx_marlin.weights.formats import DTYPE_BYTES, TILE_N

OPERATION_ROWS = FRAGMENT * OPERATION_FRAGMENTS
"""Rows of x of a tensor operation."""
FEEDING = 3.4
"""Time of an iteration over that of its counted issue slots. Fitted to four published
times of similar kernels on an M5 Max (docs/m5.md), not measured with this kernel."""


@lru_cache(maxsize=1024)
def tensor_loop(problem: Problem, fragments_m: int, device: Device) -> MainLoop:
    """Returns the cost of the main loop of `gemm_tensor`.

    Slots are those of `gemm_register` with 16 rows, which decodes the same words, adds
    up the same activations and scales as many sums. The second operation of a
    simdgroup decodes nothing: two more fragments cost twice what the second one of
    `gemm_register` does.
    """
    counts = loop_cost(problem.mode, problem.bits, problem.group_size, problem.layout)
    weights = padded_weights(problem)
    one, two = (counts.of_fragments(held, "offset", "float16").slots for held in (1, 2))
    operations = -(-problem.m // OPERATION_ROWS)
    decoders = -(-operations // (fragments_m // OPERATION_FRAGMENTS))
    counted = two * decoders + 2 * (two - one) * (operations - decoders)
    slots = FEEDING * counted * weights / WEIGHTS_PER_TRIP
    size = problem.format.scale_bytes(problem.group_size, problem.scale_dtype)
    parameters = 4 * size / step_k(problem.group_size)
    of_x = OPERATION_ROWS / TILE_N * DTYPE_BYTES[problem.dtype]
    of_w = problem.bits / 8 + parameters
    lane_bytes = weights * (decoders * of_w + operations * of_x)
    rows = OPERATION_ROWS * operations
    matrix = 2 * rows * weights / (device.clocks * device.matrix_flops)
    return MainLoop(
        bytes=problem.bytes,
        slots=slots,
        lane_bytes=lane_bytes,
        matrix=matrix,
    )
