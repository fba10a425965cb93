"""Products with a weight of any format, against float64."""

import mlx.core as mx
import numpy as np

from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.products.packing import pack
from mlx_marlin.products.reference.weight import stock_product
from mlx_marlin.weights.formats import format_of
from support import format_cases, oracles
from support.format_cases import Weight


def stock(x: mx.array, weight: Weight) -> mx.array:
    """Returns MLX's own product; of our own formats, of what they are to MLX."""
    if (weight.mode, weight.bits, weight.group_size) in format_cases.OF_MLX:
        return mx.quantized_matmul(x, *weight.native, **weight.options)
    return stock_product(x, pack(*weight.native, **weight.options), True)


def sum_of_magnitudes(x: mx.array, weight: Weight, offset: int) -> oracles.Floats:
    """Returns what is added for each element, every addend positive."""
    scale, value, bias = map(np.abs, weight.parts)
    return np.abs(oracles.exact(x)) @ (scale * (value + offset) + bias).T


def assert_close(
    y: mx.array, x: mx.array, weight: Weight, *, operand: CodeForm, dtype: str
) -> None:
    """Checks a product as `oracles.assert_close` does, for any format.

    Codes of E4M3 span 2^18, so one of them outweighs all others of its group, and every
    addition after it may round by as much.
    """
    units = 16 if weight.mode == "mxfp8" else 4
    offset = format_cases.offset_of(format_of(weight.mode, weight.bits), operand)
    expected = oracles.exact(x) @ weight.decoded.T
    sums = units * 2.0**-24 * sum_of_magnitudes(x, weight, offset)
    rounding = oracles.ROUNDING[dtype] * np.abs(expected) + oracles.SMALLEST[dtype]
    assert (y.shape, y.dtype) == (expected.shape, getattr(mx, dtype))
    assert np.all(np.abs(oracles.exact(y) - expected) <= sums + rounding)
    if expected.size < oracles.MANY:
        return
    if dtype == "float32":
        assert offset or oracles.error(y, expected) < oracles.TOLERANCES[dtype]
        return
    error = oracles.error(y, expected)
    assert error < oracles.TOLERANCES[dtype]
    assert error <= 2 * oracles.error(stock(x, weight), expected)
