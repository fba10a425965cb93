"""MLX's quantized kernels, cut from its downloaded headers, as the AGX aid takes them.

The aid compiles the functions that do the work; what surrounds them (complex numbers,
gathers, traits that OpenCL's address spaces break) is left out or replaced.
"""

import re
from functools import cache
from pathlib import Path

from benchmarks.agx import Text
from benchmarks.rival_calls import mlx_headers

VECTOR_PARTS = ("get_pack_factor", "get_bytes_per_pack", "load_vector", "qdot")
GRID = (
    "threadgroup_position_in_grid",
    "simdgroup_index_in_threadgroup",
    "thread_index_in_simdgroup",
)
OPERANDS = "w, scales, biases, x, y"
PRELUDE = """
constant constexpr int SIMD_SIZE = 32;
#define MLX_MTL_CONST static constant constexpr const
template <typename P> struct pointee;
template <typename V> struct pointee<__global V*> { typedef V type; };
template <typename V> struct pointee<__local V*> { typedef V type; };
template <typename P> using pointer_element_t = typename pointee<P>::type;
template <int v> struct Int {
  static constexpr __constant int value = v;
  MSL_MEMBER constexpr operator int() const { return v; }
};
"""
"""What the headers expect of Metal and of MLX's traits. Ours."""
_COMPLEX = re.compile(
    r"template <typename InT>\nstruct TransformNone<complex64_t.*?\n};\n", re.DOTALL
)
_DIRECTIVE = re.compile(r"#include.*|#pragma once|using namespace metal;")


def text(kernel: str, vectors: int, bits: int, metal: str) -> Text:
    """Returns one of MLX's kernels for groups of 64.

    Args:
        kernel: "qmv_fast", "qmv_wide", "qmm_t" or "qmm_t_splitk".
        vectors: Rows of x of a threadgroup of `qmv_wide`.
        bits: Bits of a code.
        metal: Metal's name of the dtype of x and scales.

    Raises:
        ValueError: If the kernel is another one.
    """
    if kernel not in ("qmv_fast", "qmv_wide", "qmm_t", "qmm_t_splitk"):
        raise ValueError(f"kernel={kernel!r}, expected one of MLX's for few rows")
    is_matrix = kernel.startswith("qmm")
    types = ((name, metal) for name in ("scales", "biases", "x"))
    return Text(
        inputs=[("w", "uint32_t"), *types, *((name, "int&") for name in "KNM")],
        outputs=[("y", metal)],
        source=_matrix_call(bits) if is_matrix else _call(kernel, vectors, bits),
        header=_matrix_header() if is_matrix else _vector_header(kernel),
        template={"T": metal},
        threadgroup=(128 if is_matrix else 64, 1, 1),
    )


def _call(kernel: str, vectors: int, bits: int) -> str:
    if kernel == "qmv_fast":
        values, sizes = f"T, 64, {bits}", "K, N"
    else:
        values, sizes = f"T, 64, {bits}, {vectors}, 8", "K, N, M"
    return f"{kernel}_impl<{values}>({OPERANDS}, {sizes}, {', '.join(GRID)});"


def _matrix_call(bits: int) -> str:
    grid = ", ".join((GRID[0], "thread_index_in_threadgroup", *GRID[1:]))
    return (
        "threadgroup T x_tile[32 * 40];\nthreadgroup T w_tile[32 * 40];\n"
        f"qmm_t_impl<T, 64, {bits}, true>({OPERANDS}, x_tile, w_tile, K, N, M, K, "
        f"{grid});"
    )


@cache
def _vector_header(kernel: str) -> str:
    return PRELUDE + _cut(*VECTOR_PARTS, "dequantize", f"{kernel}_impl")


@cache
def _matrix_header() -> str:
    mma = _read("steel/gemm/mma.h")
    first = mma.index("namespace mlx")
    # Its last definition is a form for complex numbers.
    last = mma.rindex("template <", 0, mma.index("struct BlockMMA<"))
    parts = (
        PRELUDE,
        _read("steel/defines.h"),
        _read("steel/gemm/transforms.h"),
        _COMPLEX.sub("", mma[first:last]) + "}}",
        _read("steel/gemm/loader.h"),
        _cut(*VECTOR_PARTS[:2], "dequantize"),
        _loader(),
        _cut("qmm_t_impl"),
    )
    return "\n".join(parts)


def _loader() -> str:
    whole = _read("quantized.h")
    name = whole.index("struct QuantizedBlockLoader")
    end = whole.index("\n};\n", name)
    return whole[whole.rindex("template", 0, name) : end] + "\n};\n"


def _cut(*names: str) -> str:
    folder = mlx_headers.downloaded()
    return "".join(mlx_headers.function(folder, "quantized.h", name) for name in names)


def _read(name: str) -> str:
    folder: Path = mlx_headers.downloaded()
    return _DIRECTIVE.sub("", (folder / name).read_text())
