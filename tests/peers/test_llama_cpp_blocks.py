"""llama.cpp's kernels of blocks: products, rows and copies, traced, against float64."""

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from peers.llama_cpp import Llama, arguments, sizes
from peers.test_llama_cpp_kernels import close

pytestmark = pytest.mark.peer

Array = npt.NDArray[Any]


def blocks(llama: Llama, kind: str, n: int, k: int) -> Array:
    """Returns random blocks of a GGUF type [n, bytes] with finite scales."""
    name = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[name]
    found = llama.random.integers(0, 256, (n, k // elements, size), np.uint8)
    scales = {"Q4_0": [0], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}[kind]
    for at in scales:
        half = llama.random.uniform(0.001, 0.01, (n, k // elements, 1)).astype(
            np.float16
        )
        found[..., at : at + 2] = half.view(np.uint8)
    return found.reshape(n, -1)


def dense(weight: Array, kind: str) -> Array:
    """Returns what the blocks mean, float64 [n, k]."""
    if kind == "F16":
        return weight.astype(float)
    return gguf.dequantize(weight, gguf.GGMLQuantizationType[kind]).astype(float)


def product_fields(weight: Array, k: int, x: Array, y: Array) -> dict[str, int]:
    weights = np.empty((weight.shape[0], k), np.float16)
    row = weight.nbytes // weight.shape[0]
    fields = {**sizes("0", weights, row), **sizes("1", x), **sizes("", y)}
    return {**fields, "r2": 1, "r3": 1}


MATRIX_VECTOR = {"Q4_0": 4, "Q8_0": 4, "Q4_K": 4, "Q6_K": 1}
"""Rows of a simdgroup, of which a threadgroup has two."""


def matrix_vector(llama: Llama, kind: str, n: int) -> tuple[Array, Array]:
    """Returns two products with a weight of n rows, and what they are in float64."""
    k, rows = 512, 2
    weight, x = blocks(llama, kind, n, k), llama.normal(rows, k)
    y = np.empty((rows, n), np.float32)
    fields = product_fields(weight, k, x, y)
    given = {"args": arguments("mul_mv", **fields), "src0": weight, "src1": x}
    groups = (-(-n // (2 * MATRIX_VECTOR[kind])), rows, 1)
    name = f"mul_mv_{kind.replace('Q', 'q')}_f32"
    result = llama.run(name, given, y, groups, (32, 2, 1))
    return result, x.astype(float) @ dense(weight, kind).T


@pytest.mark.parametrize("kind", MATRIX_VECTOR)
def test_matrix_vector_products(llama: Llama, kind: str) -> None:
    close(*matrix_vector(llama, kind, n=32))


def matrix_product(
    llama: Llama, kind: str, shape: tuple[int, int, int]
) -> tuple[Array, Array]:
    """Returns a product with a weight [n, k], and what it is in float64."""
    n, rows, k = shape
    if kind == "F16":
        weight = llama.normal(n, k).astype(np.float16)
    else:
        weight = blocks(llama, kind, n, k)
    x, y = llama.normal(rows, k), np.empty((rows, n), np.float32)
    fields = product_fields(weight, k, x, y)
    given = {"args": arguments("mul_mm", **fields), "src0": weight, "src1": x}
    groups = (-(-rows // 32), -(-n // 64), 1)
    name = f"mul_mm_{kind.replace('Q', 'q').replace('F', 'f')}_f32"
    result = llama.run(name, given, y, groups, (128, 1, 1), memory=8192)
    # Weights are rounded to half before the product.
    half = dense(weight, kind).astype(np.float16).astype(float)
    return result, x.astype(float) @ half.T


@pytest.mark.parametrize("shape", [(64, 32, 256), (68, 37, 512)], ids=str)
@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q8_0", "Q4_K"])
def test_matrix_products(llama: Llama, kind: str, shape: tuple[int, int, int]) -> None:
    result, expected = matrix_product(llama, kind, shape)

    close(result, expected, 1e-5)


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q4_K"])
def test_get_rows(llama: Llama, kind: str) -> None:
    table = llama.normal(9, 256) if kind == "F32" else blocks(llama, kind, 9, 256)
    chosen = np.array([3, 0, 8, 3], np.int32)
    y = np.empty((4, 256), np.float32)
    fields = {**sizes("0", y, table.nbytes // 9), **sizes("1", chosen), **sizes("", y)}
    given = {"args": arguments("get_rows", **fields), "src0": table, "src1": chosen}

    name = f"get_rows_{kind.replace('Q', 'q').replace('F', 'f')}"
    result = llama.run(name, given, y, (4, 1, 1), (32, 1, 1))

    close(result, (table if kind == "F32" else dense(table, kind))[chosen])


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_copies(llama: Llama, kind: str) -> None:
    x = llama.normal(3, 96)
    y = np.empty((3, 96), np.float16)
    if kind != "f16":
        y = np.empty((3, {"q8_0": 102, "q4_0": 54}[kind]), np.uint8)
    fields = {**sizes("0", x), **sizes("", np.empty((3, 96), y.dtype), y.nbytes // 3)}
    given = {"args": arguments("cpy", **fields), "src0": x}

    result = llama.run(f"cpy_f32_{kind}", given, y, (3, 1, 1), (32, 1, 1))

    got = result.astype(float) if kind == "f16" else dense(result, kind.upper())
    close(got, x, {"f16": 1e-3, "q8_0": 5e-3, "q4_0": 0.1}[kind])
