"""Kernels of the Metal back end: limits, registers, residency, and forms of codes.

docs/design.md draws the forms of a code that a kernel multiplies. Each is exact; they
differ in issue slots, in registers, and in the rounding of the sums that an offset is
part of.

The limits of a thread (`Core.thread_registers`) are published for Apple's compiler and
count 32 bits. Our counts are those of an open compiler for the first Apple generation,
in halves of 16 bits: the most that are alive at once, because what it allocates fills
its own classes. So the comparison is assumed until Apple's compiler has counted.
"""

from typing import get_args

from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.main_loop import count
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
    if fragments_m or problem.norm is None:
        return count(problem, fragments_m, operand, rows=problem.m).registers
    norm = NORM_HALVES[min(problem.m, NORM_ROWS)]
    return count(problem, 0, "exact", "float32", problem.m).registers + norm


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


OPERANDS: tuple[CodeForm, ...] = get_args(CodeForm)
"""The forms of a code, as numbered in `lib/decode.metal`."""
BFLOAT_BITS = 6
"""Most bits of codes that are multiplied as bfloats: of the 8 significant bits of one,
the offset takes one."""
MIXED_BITS = 8
"""Bits of codes that are multiplied as halves by floats: a bfloat has 8 significant
bits, and such a code with its offset 9."""
PROBED = ("bfloat", "half_by_float")
"""Forms for which the guard has known answers of their own, and another form serves if
the GPU gives others."""


def operand_of(
    problem: Problem, device: Device, fragments_m: int, kernel: Kernel | None = None
) -> CodeForm:
    """Returns the form of codes that plans for a device have."""
    first, *others = forms(problem, fragments_m, kernel)
    return first if first != "bfloat" or device.core.has_bfloats else others[0]


def forms(
    problem: Problem, fragments_m: int, kernel: Kernel | None = None
) -> tuple[CodeForm, ...]:
    """Returns the forms of codes that plans may have: the best, then what replaces it.

    It is the cheapest whose error is small. With one fragment of half, the cheapest
    offset is as exact as a float32 sum. Two fragments share decoded codes, so the least
    offset costs them less than 1 %.
    """
    if kernel == TENSOR_KERNEL:
        # Tensor operations take half codes with bfloat16 activations. They need no more
        # than the 8 significant bits of a bfloat16 then.
        mixed = problem.dtype == "bfloat16" and problem.bits == MIXED_BITS
        return ("exact",) if mixed or _is_exact(problem) else ("offset",)
    if _is_exact(problem):
        return ("exact",)
    if fragments_m == 0 or problem.group_size == 16:
        return ("offset",)
    if problem.dtype == "float16":
        return ("least_offset",) if fragments_m > 1 else ("offset",)
    if kernel == "gemm_staged":
        return ("exact",)
    if problem.bits <= BFLOAT_BITS:
        return "bfloat", "exact"
    return ("half_by_float", "exact") if problem.bits == MIXED_BITS else ("exact",)


def dots_of(operand: CodeForm) -> CodeForm:
    """Returns the form in which the gather kernel's dot products have codes."""
    return "exact" if operand == "exact" else "offset"


def _is_exact(problem: Problem) -> bool:
    """Returns whether codes never have an offset.

    If x is float32, their conversion subtracts it at no cost. Floats and codebooks have
    none. Invariant rows must have the same form in one fragment and in two.
    """
    plain = not problem.format.has_offset
    return problem.invariant or plain or problem.dtype == "float32"


def operand_reason(problem: Problem, operand: CodeForm, kernel: Kernel) -> str | None:
    """Returns why a kernel cannot multiply codes of a form, or None."""
    if operand not in OPERANDS:
        return f"is not one of {OPERANDS}"
    if operand == "offset" and kernel == "gemv" and problem.dtype == "float32":
        return "of dot products is for float16 and bfloat16, got dtype='float32'"
    if operand in ("offset", "exact"):
        return None
    if kernel not in ("gemm_register", "gemm_staged"):
        return f"is for gemm_register, got kernel={kernel!r}"
    dtype = "float16" if operand == "least_offset" else "bfloat16"
    if problem.dtype != dtype:
        return f"is for {dtype} activations, got dtype={problem.dtype!r}"
    if operand in PROBED and kernel == "gemm_staged":
        return "is for gemm_register, got kernel='gemm_staged'"
    if not problem.format.has_offset or problem.group_size == 16:
        return (
            f"is for integers in groups of 32 and more, got mode={problem.mode!r}, "
            f"group_size={problem.group_size}"
        )
    if operand == "bfloat" and problem.bits > BFLOAT_BITS:
        return f"is for at most {BFLOAT_BITS} bits, got bits={problem.bits}"
    return None


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
    needed = product_registers(problem, fragments_m, operand, has_ranges)
    return needed <= device.core.thread_registers
