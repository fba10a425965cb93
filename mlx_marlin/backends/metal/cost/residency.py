"""How many threadgroups of a plan are resident on a core at a time."""

from mlx_marlin.backends.metal.cost.main_loop import loop_of
from mlx_marlin.backends.metal.cost.tensor import REGISTERS
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning.device import Residency
from mlx_marlin.planning.work.tiles import SIMD_WIDTH

RANGE_REGISTERS = 14
"""Additional 16-bit registers if a threadgroup has a range instead of one whole tile
(counted: 12 to 16)."""
LIMITS = ("launched threadgroups", "threadgroup memory", "registers", "threads")
"""What limits the resident threadgroups, in the order of `resident_threadgroups`."""


def residency(plan: MetalPlan, device: Device) -> Residency:
    """Returns how many threadgroups of a plan are resident on a core."""
    limits = resident_threadgroups(plan, device, _registers(plan, device))
    return Residency(
        simdgroups=plan.simdgroups,
        max_simdgroups=device.core.max_threads // SIMD_WIDTH,
        threadgroups=dict(zip(LIMITS, limits, strict=True)),
        assumed=_assumed(plan, device),
    )


def _registers(plan: MetalPlan, device: Device) -> int:
    if plan.has_tensor_operations:
        return REGISTERS
    return loop_of(plan.problem, plan.fragments_m, plan.subtract, device).registers


def resident_threadgroups(
    plan: MetalPlan, device: Device, registers: int
) -> tuple[int, int, int, int]:
    """Returns the threadgroups of a core that each of `LIMITS` allows.

    Args:
        plan: The plan.
        device: The chip to plan for.
        registers: 16-bit registers of a thread if threadgroups have one whole tile.
    """
    core, work = device.core, plan.work
    registers += RANGE_REGISTERS * (not plan.is_whole)
    return (
        -(-(work.threadgroups - work.idle) // device.cores),
        core.threadgroup_bytes // plan.threadgroup_bytes,
        core.register_bytes // (2 * registers) // plan.threads,
        core.max_threads // plan.threads,
    )


def _assumed(plan: MetalPlan, device: Device) -> str:
    parts = [] if device.core.is_known else ["a core with the memory of an M2"]
    if plan.buffers:
        parts.append("registers as in gemm_register")
    return " and ".join(parts)
