"""mlx-dspark's kernels, out of its wheel: the fastest published ones of this kind.

The modules that hold them run as they stand; the kernels that they make are those of
the emulator. `skinny_qmm` multiplies a few rows by a quantized weight, on the matrix
units; `multirow_attn` is the attention of a few rows over a long cache.
"""

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import mlx.core as mx

import metal_emulator
from peers import downloads, emulated_modules

PACKAGE, VERSION = "mlx-dspark", "0.20.3"
WINDOW = {4: (5, 16), 8: (6, 16)}
"""Rows for which mlx-dspark calls `skinny_qmm`, by bits; the kernel takes any."""

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

# Its one function that knows x is bfloat16, for float16. Ours, only to count with.
_HALF_READER = """
inline float bf_at(uint w, int e) { return float(as_type<half2>(w)[e & 1]); }
"""


@cache
def module(name: str) -> ModuleType:
    """Returns one of its modules, whose kernels run in the emulator."""
    folder = downloads.files(PACKAGE, VERSION, "mlx_dspark/", ".py")
    return emulated_modules.load(f"mlx_dspark_{name}", folder / f"{name}.py")


Plan = tuple[list[tuple[str, Any]], Sequence[int], Sequence[int]]
"""Template arguments, grid and threadgroup."""


def plan(rows: int, n: int, k: int, bits: int, dtype: mx.Dtype) -> Plan:
    """Returns how mlx-dspark launches `skinny_qmm`."""
    result: Plan = module("skinny_qmm").plan(rows, n, k, bits, dtype)
    return result


def skinny_qmm(
    x: mx.array, weight: Sequence[mx.array], bits: int, planned: Plan | None = None
) -> mx.array:
    """Multiplies x [rows, k] by a weight [n, k] in groups of 64.

    A float16 x is read by our translation of the one function that reads x.
    """
    codes, scales, biases = weight
    rows, k = x.shape
    template, grid, threads = planned or plan(rows, codes.shape[0], k, bits, x.dtype)
    header, body = text(x.dtype)
    (y,) = _kernel(header, body)(
        inputs=[x, codes, scales, biases],
        template=template,
        grid=tuple(grid),
        threadgroup=tuple(threads),
        output_shapes=[(rows, codes.shape[0])],
        output_dtypes=[x.dtype],
    )
    return y


def text(dtype: mx.Dtype) -> tuple[str, str]:
    """Returns header and body of `skinny_qmm`."""
    found = module("skinny_qmm")
    header = found._HEADER if dtype == mx.bfloat16 else _HALF_READER
    return header, found._SRC


@cache
def _kernel(header: str, body: str) -> metal_emulator.MetalKernel:
    return metal_emulator.metal_kernel(
        name="dspark_skinny_qmm",
        input_names=["X", "Wq", "SC", "BI"],
        output_names=["OUT"],
        source=body,
        header=header,
    )
