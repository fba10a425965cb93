"""References that share no code with the package: NumPy and float64 only."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TOLERANCES = {"float16": 1e-3, "bfloat16": 6e-3, "float32": 1e-6}
"""Most relative Frobenius error against exactly decoded weights in float64."""
MANY = 256
"""Elements from which on luck evens out."""
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-23}
"""Relative error of rounding to a dtype, with room for a sum that ends between two."""
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126}
"""Absolute error below the normal numbers."""


def exact(array: mx.array) -> Floats:
    """Returns an MLX array of any float type as float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def codes(w: mx.array) -> NDArray[np.int64]:
    """Returns the 4-bit codes [..., n, k] of MLX's words, low nibble first."""
    words = np.array(w).astype(np.int64)
    shifts = 4 * np.arange(8)
    return ((words[..., None] >> shifts) & 15).reshape(*words.shape[:-1], -1)


def decoded(
    w: mx.array, scales: mx.array, biases: mx.array, *, group_size: int
) -> Floats:
    """Returns the weight [..., n, k] that codes, scales and biases stand for."""
    scale = np.repeat(exact(scales), group_size, axis=-1)
    bias = np.repeat(exact(biases), group_size, axis=-1)
    return scale * codes(w) + bias


def product(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *, group_size: int
) -> Floats:
    """Returns x @ weight.T, [..., n], in float64."""
    weight = decoded(w, scales, biases, group_size=group_size)
    return exact(x) @ weight.swapaxes(-1, -2)


def softmax(x: Floats) -> Floats:
    """Returns the shares of the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def attention(
    q: Floats, k: Floats, v: Floats, mask: Floats | float = 0.0, *, causal: bool = False
) -> Floats:
    """Returns the attention of q [..., heads, rows, size] to keys of fewer heads."""
    k, v = (np.repeat(each, q.shape[-3] // k.shape[-3], axis=-3) for each in (k, v))
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5 + mask
    if causal:
        rows, keys = scores.shape[-2:]
        scores = np.where(np.tri(rows, keys, keys - rows), scores, -np.inf)
    return softmax(scores) @ v


def error(actual: mx.array, expected: Floats) -> float:
    """Returns the relative Frobenius error; NaN where anything is not a number."""
    difference = np.linalg.norm(exact(actual) - expected)
    return float(difference / max(np.linalg.norm(expected), np.finfo(float).tiny))


def allowed(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    group_size: int,
    offset: int,
) -> Floats:
    """Returns how far each element of a float32 sum may lie from the product.

    Four units in the last place of the sum of the magnitudes of all that is added: a
    sum of random roundings stays far below its terms' total, a short one may use them.
    """
    scale = np.repeat(np.abs(exact(scales)), group_size, axis=-1)
    bias = np.repeat(np.abs(exact(biases)), group_size, axis=-1)
    terms = scale * (offset + codes(w)) + bias
    return 4 * 2.0**-24 * (np.abs(exact(x)) @ terms.swapaxes(-1, -2))


def assert_close(
    actual: mx.array,
    stock: mx.array,
    x: mx.array,
    native: tuple[mx.array, ...],
    *,
    group_size: int,
    offset: int = 0,
) -> None:
    """Checks a product against float64 and, if large, against stock MLX's error.

    Every element is within the error of a float32 sum and of rounding to its dtype.
    Few elements may be exact by luck, so the comparisons of whole results need many. In
    float32 the first bound says it all: an offset of the codes shows, and so does that
    a group's scale and bias are applied to sums, where stock MLX decodes, then adds.
    """
    name = str(actual.dtype).removeprefix("mlx.core.")
    expected = product(x, *native, group_size=group_size)
    sums = allowed(x, *native, group_size=group_size, offset=offset)
    rounding = ROUNDING[name] * np.abs(expected) + SMALLEST[name]
    assert actual.shape == expected.shape
    assert actual.dtype == stock.dtype
    assert np.all(np.abs(exact(actual) - expected) <= sums + rounding)
    if expected.size >= MANY and not (offset and name == "float32"):
        assert error(actual, expected) < TOLERANCES[name]
    if expected.size >= MANY and name != "float32":
        assert error(actual, expected) <= 2 * error(stock, expected)
