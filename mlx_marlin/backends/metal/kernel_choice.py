"""Which kernel computes so many rows, by the registers that a thread has."""

from mlx_marlin.backends.metal.cost.residency import product_registers
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.limits import GEMV_ROWS
from mlx_marlin.backends.metal.operands import operand_of
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import Kernel


def default_kernel(problem: Problem, device: Device) -> Kernel:
    """Returns the kernel with fewer issue slots: dot products for a few rows.

    They are matrices where the rows would take more registers than a thread has, unless
    there is a norm, which only `gemv` has. `gemm_tensor` is compared with this kernel
    where there are tensor units.
    """
    few = problem.m <= GEMV_ROWS[problem.dtype] and not problem.invariant
    if few and (problem.norm is not None or has_registers(problem, device, 0)):
        return "gemv"
    return "gemm_register"


def has_registers(
    problem: Problem,
    device: Device,
    fragments_m: int,
    operand: CodeForm | None = None,
    has_ranges: bool = False,
) -> bool:
    """Returns whether a thread has the registers of `product_registers`."""
    if operand is None:
        operand = operand_of(problem, device, fragments_m)
    count = product_registers(problem, fragments_m, operand, has_ranges)
    return count <= device.core.thread_registers
