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


def magnitude(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *, group_size: int
) -> float:
    """Returns the Frobenius norm that the product has for terms of random sign.

    Errors are measured against this: where terms cancel, the product itself says
    nothing about how exactly it can be summed.
    """
    weight = decoded(w, scales, biases, group_size=group_size)
    return float(np.sqrt((exact(x) ** 2 @ weight.T**2).sum()))


def error(actual: mx.array, expected: Floats, magnitude: float | None = None) -> float:
    """Returns the Frobenius error relative to a magnitude, or to what is expected."""
    difference = np.linalg.norm(exact(actual) - expected)
    scale = np.linalg.norm(expected) if magnitude is None else magnitude
    return float(difference / max(scale, np.finfo(float).tiny))


def assert_close(
    actual: mx.array,
    stock: mx.array,
    x: mx.array,
    native: tuple[mx.array, ...],
    *,
    group_size: int,
    offset_codes: bool = False,
) -> None:
    """Checks a product against float64, and against twice the error of stock MLX's.

    Args:
        actual: The result to judge.
        stock: The same product by `mx.quantized_matmul` in the same dtype.
        x: The activations.
        native: Codes, scales and biases.
        group_size: Weights that share a scale.
        offset_codes: Whether 64 + q was summed instead of q. In float32 that shows:
            the terms are up to ten times larger, and so may their rounding be.
    """
    name = str(actual.dtype).removeprefix("mlx.core.")
    factor = 10 if offset_codes and actual.dtype == mx.float32 else 1
    expected = product(x, *native, group_size=group_size)
    scale = magnitude(x, *native, group_size=group_size)
    ours, theirs = error(actual, expected, scale), error(stock, expected, scale)
    assert actual.shape == expected.shape
    assert actual.dtype == stock.dtype
    assert ours < factor * TOLERANCES[name]
    # Short sums may be exact by luck: a few units in float32's last place are granted.
    assert ours <= factor * (2 * theirs + 3e-7)
