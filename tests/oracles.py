"""References that share no code with the package: NumPy and float64 only."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TOLERANCES = {"float16": 1e-3, "bfloat16": 6e-3, "float32": 1e-6}
"""Most relative Frobenius error against exactly decoded weights in float64."""


def exact(array: mx.array) -> Floats:
    """Returns an MLX array of any float type as float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def codes(w: mx.array) -> NDArray[np.int64]:
    """Returns the 4-bit codes [n, k] of MLX's words [n, k / 8], low nibble first."""
    words = np.array(w).astype(np.int64)
    shifts = 4 * np.arange(8)
    return ((words[..., None] >> shifts) & 15).reshape(words.shape[0], -1)


def decoded(
    w: mx.array, scales: mx.array, biases: mx.array, *, group_size: int
) -> Floats:
    """Returns the weight [n, k] that codes, scales and biases stand for."""
    scale = np.repeat(exact(scales), group_size, axis=1)
    bias = np.repeat(exact(biases), group_size, axis=1)
    return scale * codes(w) + bias


def product(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *, group_size: int
) -> Floats:
    """Returns x @ weight.T, [..., n], in float64."""
    return exact(x) @ decoded(w, scales, biases, group_size=group_size).T


def error(actual: mx.array, expected: Floats) -> float:
    """Returns the relative Frobenius error; NaN where anything is not a number."""
    difference = np.linalg.norm(exact(actual) - expected)
    return float(difference / max(np.linalg.norm(expected), np.finfo(float).tiny))


def assert_close(
    actual: mx.array, expected: Floats, stock: mx.array, *, offset_codes: bool = False
) -> None:
    """Checks a product against float64, and against twice the error of stock MLX's.

    Args:
        actual: The result to judge.
        expected: The product in float64.
        stock: The same product by `mx.quantized_matmul` in the same dtype.
        offset_codes: Whether 64 + q was summed instead of q. In float32 that shows:
            the terms are up to ten times larger, and so may their rounding be.
    """
    name = str(actual.dtype).removeprefix("mlx.core.")
    factor = 10 if offset_codes and actual.dtype == mx.float32 else 1
    assert actual.shape == expected.shape
    assert actual.dtype == stock.dtype
    assert error(actual, expected) < factor * TOLERANCES[name]
    assert error(actual, expected) <= 2 * factor * error(stock, expected) + 1e-7
