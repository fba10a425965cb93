"""Which kernel computes so many rows, and what its simdgroups multiply.

docs/design.md draws the forms of a code. Each is exact; they differ in issue slots, in
registers, and in the rounding of the sums that an offset is part of.
"""

from typing import get_args

from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.kernel_limits import (
    GEMV_ROWS,
    TENSOR_KERNEL,
    product_registers,
)
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import Kernel

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
    count = product_registers(problem, fragments_m, operand, has_ranges)
    return count <= device.core.thread_registers
