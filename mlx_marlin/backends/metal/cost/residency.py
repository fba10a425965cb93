"""Registers of a thread, and how many threadgroups of a plan are resident on a core.

The limits of a thread (`Core.thread_registers`) are published for Apple's compiler and
count 32 bits. Our counts are those of an open compiler for the first Apple generation,
in halves of 16 bits: the most that are alive at once. So the comparison is assumed
until Apple's compiler has counted. The formula is at most 13 halves below the counts of
46 formats (docs/lab/2026-11-26-measured.md).
"""

from mlx_marlin.backends.metal.cost.counts import loop_cost
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experts.plan import MAX_DOT_ROWS, MetalGatherPlan
from mlx_marlin.backends.metal.limits import NORM_ROWS
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning.device import Residency
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import SIMD_WIDTH

TENSOR_REGISTERS = {2: 82, 4: 112}
"""32-bit registers of `gemm_tensor` by fragments_m, by a hand count (docs/m5.md). With
2: operands take 24, a group's sums 16, all sums 16, words, scales and biases 16, and
addresses 10. With 4, when words are no longer needed: decoded weights of a step take
32, x 8, a group's sums 16, all sums 32, scales and biases 8, sums of x 4, and
addresses 12."""
FLOAT_HALVES = {
    "float16": {0: 0, 1: 0, 2: 0},
    "bfloat16": {0: 16, 1: 14, 2: 30},
    "float32": {0: 16, 1: 18, 2: 40},
}
"""Additional halves if x is not half, by dtype and fragments_m; 0 is per row of the dot
products (counted)."""
NORM_HALVES = {1: 42, 2: 28}
"""Additional halves of the dot products with an RMSNorm, whose x is float32, by rows
(counted: 34 to 48, 20 to 34)."""
RANGE_HALVES = {0: 14, 1: 18, 2: 18}
"""Additional halves if a threadgroup has a range instead of one whole tile, by
fragments_m (counted: 12 to 18)."""
PAIR_HALVES = 2
"""Additional halves of a gated epilogue, and per row of a batch (counted)."""
GATHER_HALVES = {"marlin": {1: 32, 2: 48}, "mlx": {1: 44, 2: 60}}
"""Additional halves of the gather kernel, by layout and fragments_m (counted)."""
DOT_HALVES = {1: 32, 2: 12}
"""Further ones if it has two rows of dot products, by fragments_m (counted)."""
DOT_ROW_HALVES = 28
"""Halves of a row of these (counted)."""
EXPERT_EPILOGUE_HALVES = {"gate": 12, "bias": 10}
"""Additional halves of the epilogue of experts (counted)."""
LIMITS = ("launched threadgroups", "threadgroup memory", "registers", "threads")
"""What limits the resident threadgroups, in the order of `resident_threadgroups`."""


def registers(plan: MetalPlan | MetalGatherPlan) -> int:
    """Returns the 32-bit registers of a thread of a plan's first kernel.

    `gemm_staged` counts as `gemm_register`.
    """
    if isinstance(plan, MetalGatherPlan):
        return _whole(_halves_of_experts(plan))
    if plan.has_tensor_operations:
        return TENSOR_REGISTERS[plan.fragments_m]
    return product_registers(plan.problem, plan.fragments_m, not plan.is_whole)


def fits(plan: MetalPlan | MetalGatherPlan, device: Device) -> bool:
    """Returns whether the registers of a plan are within the limit of a device."""
    return registers(plan) <= device.core.thread_registers


def product_registers(
    problem: Problem, fragments_m: int, has_ranges: bool = False
) -> int:
    """Returns the 32-bit registers of a thread of `gemv` or `gemm_register`.

    Args:
        problem: The product.
        fragments_m: Row fragments of x that a simdgroup holds; 0 for dot products.
        has_ranges: Whether a threadgroup has a range instead of one whole tile.
    """
    rows = 1 if fragments_m else problem.m
    halves = _halves_of_loop(problem, fragments_m) + RANGE_HALVES[fragments_m] * (
        has_ranges
    )
    pairs = problem.epilogue.gated + (problem.batch > 1) * rows
    return _whole(halves + PAIR_HALVES * pairs)


def _halves_of_loop(problem: Problem, fragments_m: int) -> int:
    counts = loop_cost(problem.mode, problem.bits, problem.group_size, problem.layout)
    dtype = problem.dtype
    if fragments_m:
        # The counts of such formats are those of float32 fragments.
        added = 0 if problem.widens else FLOAT_HALVES[dtype][fragments_m]
        return counts.registers[fragments_m - 1] + added
    base, per_row = counts.row_registers
    norm = 0
    if problem.norm is not None:
        norm, dtype = NORM_HALVES[min(problem.m, NORM_ROWS)], "float32"
    return base + (per_row + FLOAT_HALVES[dtype][0]) * problem.m + norm


def _halves_of_experts(plan: MetalGatherPlan) -> int:
    fragments_m, gather = plan.fragments_m, plan.gather
    halves = _halves_of_loop(plan.problem, fragments_m)
    halves += GATHER_HALVES[plan.problem.layout][fragments_m]
    if plan.dot_rows:
        fewer = MAX_DOT_ROWS - plan.dot_rows
        halves += max(DOT_HALVES[fragments_m] - DOT_ROW_HALVES * fewer, 0)
    halves += EXPERT_EPILOGUE_HALVES["gate"] * (gather.gate is not None)
    return halves + EXPERT_EPILOGUE_HALVES["bias"] * gather.bias


def _whole(halves: int) -> int:
    return -(-halves // 2)


def residency(plan: MetalPlan, device: Device) -> Residency:
    """Returns how many threadgroups of a plan are resident on a core."""
    limits = resident_threadgroups(plan, device)
    return Residency(
        simdgroups=plan.simdgroups,
        max_simdgroups=device.core.max_threads // SIMD_WIDTH,
        threadgroups=dict(zip(LIMITS, limits, strict=True)),
        assumed=_assumed(plan, device),
    )


def resident_threadgroups(plan: MetalPlan, device: Device) -> tuple[int, int, int, int]:
    """Returns the threadgroups of a core that each of `LIMITS` allows.

    Args:
        plan: The plan.
        device: The chip to plan for.
    """
    core, work = device.core, plan.work
    return (
        -(-(work.threadgroups - work.idle) // device.cores),
        core.threadgroup_bytes // plan.threadgroup_bytes,
        core.register_bytes // (4 * registers(plan)) // plan.threads,
        core.max_threads // plan.threads,
    )


def _assumed(plan: MetalPlan, device: Device) -> str:
    parts = [] if device.core.is_known else ["a core with the memory of an M2"]
    if plan.buffers:
        parts.append("registers as in gemm_register")
    return " and ".join(parts)
