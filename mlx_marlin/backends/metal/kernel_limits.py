"""Kernels of the Metal back end: their limits, registers and residency.

The limits of a thread (`Core.thread_registers`) are published for Apple's compiler and
count 32 bits. Our counts are those of an open compiler for the first Apple generation,
in halves of 16 bits: the most that are alive at once, because what it allocates fills
its own classes. So the comparison is assumed until Apple's compiler has counted.
"""

from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.main_loop import loop_cost
from mlx_marlin.planning.device import Residency
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import SIMD_WIDTH, Kernel
from mlx_marlin.weights.formats import TILE_N

TENSOR_KERNEL: Kernel = "gemm_tensor"
"""The kernel with tensor operations."""
KERNELS: tuple[Kernel, ...] = ("gemv", "gemm_register", "gemm_staged", TENSOR_KERNEL)

FRAGMENTS_M = (1, 2)
"""Row fragments of x that a simdgroup holds in plans that the model chooses."""
THREE_FRAGMENTS_M = 3
"""Row fragments of `gemm_register` that only a race tries: one tile of 17 to 24 rows. A
Mac has to show whether fewer slots outweigh half as many simdgroups."""
TENSOR_FRAGMENTS_M = (2, 4)
"""The same of `gemm_tensor`: one operation of 16 rows of x, or two that share decoded
weights."""
OPERATION_FRAGMENTS = min(TENSOR_FRAGMENTS_M)
"""Row fragments of x of a tensor operation."""
TENSOR_ROUND_ROWS = 8
"""Rows of a simdgroup of `gemm_tensor` whose sums are in scratch at a time."""
MAX_SIMDGROUPS = 8
"""Simdgroups of a threadgroup: with 256 threads no kernel is short of registers."""
MAX_SIMDGROUPS_M = 4
"""Most simdgroups along m: tiles of up to 64 rows, which leave room for two along k."""
THREADGROUP_LIMIT = 32768
"""Bytes of threadgroup memory that a threadgroup may use."""
GEMV_ROWS = {"float16": 5, "bfloat16": 4, "float32": 3}
"""Most rows of `gemv`, by dtype; more 4-byte values of x need too many registers."""
NORM_ROWS = 2
"""Most rows of an RMSNorm before `gemv`: at 4 rows its registers spill (counted)."""
MAX_DOT_ROWS = 2
"""Limit of the rows of a tile that are dot products. Two take 8 to 34 more 16-bit
registers than matrices alone, which leaves room for 16 simdgroups on a core; each
further row takes 28 (counted)."""


TENSOR_REGISTERS = {2: 82, 4: 112}
"""32-bit registers of `gemm_tensor` by fragments_m, by a hand count (docs/m5.md). With
2: operands take 24, a group's sums 16, all sums 16, words, scales and biases 16, and
addresses 10. With 4, when words are no longer needed: decoded weights of a step take
32, x 8, a group's sums 16, all sums 32, scales and biases 8, sums of x 4, and
addresses 12."""
NORM_HALVES = {1: 44, 2: 34}
"""Additional halves of the dot products with an RMSNorm, whose x is float32, by rows
(counted: 34 to 48, 26 to 40)."""
RANGE_HALVES = {0: 14, 1: 18, 2: 18, 3: 18}
"""Additional halves if a threadgroup has a range instead of one whole tile, by
fragments_m (counted: 12 to 18)."""
RAGGED_HALVES = 12
"""Additional halves if the last tile of a weight in MLX's layout is not full: lanes
then have the offsets of four rows (counted: 0 to 24)."""
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


def product_registers(
    problem: Problem, fragments_m: int, operand: CodeForm, has_ranges: bool = False
) -> int:
    """Returns the 32-bit registers of a thread of `gemv` or `gemm_register`."""
    rows = 1 if fragments_m else problem.m
    halves = _halves_of_loop(problem, fragments_m, operand)
    halves += has_ranges * RANGE_HALVES[fragments_m]
    if problem.layout == "mlx" and problem.columns % TILE_N:
        halves += RAGGED_HALVES
    pairs = problem.epilogue.gated + (problem.batch > 1) * rows
    return -(-(halves + PAIR_HALVES * pairs) // 2)


def _halves_of_loop(problem: Problem, fragments_m: int, operand: CodeForm) -> int:
    counts = loop_cost(problem.mode, problem.bits, problem.group_size, problem.layout)
    dtype = problem.dtype
    if fragments_m:
        return counts.of_fragments(fragments_m, operand, dtype).registers
    if problem.norm is None:
        return counts.of_rows(problem.m, operand, dtype).registers
    norm = NORM_HALVES[min(problem.m, NORM_ROWS)]
    return counts.of_rows(problem.m, "exact", "float32").registers + norm


def expert_registers(
    gather: GatherProblem, fragments_m: int, dot_rows: int, operand: CodeForm
) -> int:
    """Returns the 32-bit registers of a thread of the kernel for experts."""
    problem = gather.problem
    halves = _halves_of_loop(problem, fragments_m, operand)
    halves += GATHER_HALVES[problem.layout][fragments_m]
    if dot_rows:
        fewer = MAX_DOT_ROWS - dot_rows
        halves += max(DOT_HALVES[fragments_m] - DOT_ROW_HALVES * fewer, 0)
    halves += EXPERT_EPILOGUE_HALVES["gate"] * (gather.gate is not None)
    return -(-(halves + EXPERT_EPILOGUE_HALVES["bias"] * gather.bias) // 2)


def residency(plan: Plan, registers: int, device: Device) -> Residency:
    """Returns how many threadgroups of a plan are resident on a core.

    `registers`: of a thread of its first kernel, of 32 bits.
    """
    limits = resident_threadgroups(plan, registers, device)
    return Residency(
        simdgroups=plan.simdgroups,
        max_simdgroups=device.core.max_threads // SIMD_WIDTH,
        threadgroups=dict(zip(LIMITS, limits, strict=True)),
        assumed=_assumed(plan, device),
    )


def resident_threadgroups(
    plan: Plan, registers: int, device: Device
) -> tuple[int, int, int, int]:
    """Returns the threadgroups of a core that each of `LIMITS` allows."""
    core, work = device.core, plan.work
    return (
        -(-(work.threadgroups - work.idle) // device.cores),
        core.threadgroup_bytes // plan.threadgroup_bytes,
        core.register_bytes // (4 * registers) // plan.threads,
        core.max_threads // plan.threads,
    )


def _assumed(plan: Plan, device: Device) -> str:
    parts = [] if device.core.is_known else ["a core with the memory of an M2"]
    if plan.buffers:
        parts.append("registers as in gemm_register")
    return " and ".join(parts)
