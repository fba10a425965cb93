"""Prediction and choice of plans that decode the weight first, then `mx.matmul`."""

from mlx_marlin.backends.metal.cost.rates import (
    SCHEDULERS_PER_CORE,
    level_seconds,
    memory_seconds,
)
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.stock.slots import matrix_slots
from mlx_marlin.planning.dequantize_plan import (
    LEAST_ROWS,
    DequantizePlan,
    dequantize_plan,
)
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import FRAGMENT
from mlx_marlin.weights.formats import DTYPE_BYTES

EFFICIENCY = 0.9
"""Share of the matrix rate that `mx.matmul` reaches. With it the model gives the 9 %
over the quantized product that were reported for an M4 Max."""


def dequantize_seconds(problem: Problem, device: Device) -> float:
    """Returns the predicted seconds of decoding the weight and multiplying it.

    These are two dispatches, the second of which waits for the first.
    """
    weight = problem.n * problem.k * DTYPE_BYTES[problem.dtype]
    operands = problem.activation_bytes + problem.output_bytes
    decode = memory_seconds(problem.weight_bytes + weight, device)
    multiply = max(
        memory_seconds(weight + operands, device), _arithmetic(problem, device)
    )
    return decode + multiply + 2 * level_seconds(device)


def _arithmetic(problem: Problem, device: Device) -> float:
    if device.has_tensor_units and problem.dtype != "float32":
        return problem.flops / (device.clocks * device.matrix_flops)
    products = problem.flops / (2 * FRAGMENT**3)
    slots = products * matrix_slots(device)
    return slots / (SCHEDULERS_PER_CORE * device.clocks * EFFICIENCY)


def dequantize_if_faster(
    problem: Problem, device: Device, others: float
) -> DequantizePlan | None:
    """Returns such a plan if it is predicted to take less than `others`, else None.

    `others`: predicted seconds of the best alternative.
    """
    plain = problem.epilogue == PLAIN and problem.batch == 1
    if problem.m < LEAST_ROWS or not plain or problem.invariant:
        return None
    if dequantize_seconds(problem, device) >= others:
        return None
    return dequantize_plan(problem)
