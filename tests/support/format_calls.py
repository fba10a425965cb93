"""Weights of every scheme, and comparisons with what MLX computes."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin.products.packing import quantize
from mlx_marlin.weights.formats import FORMATS, PACKED_GROUPS
from support import oracles
from support.format_cases import OF_MLX, SUPER_BLOCKS

N, K = 48, 128
X = mx.random.normal((2, 3, K), key=mx.random.key(1)).astype(mx.float16)
W = (mx.random.normal((N, K), key=mx.random.key(2)) / 8).astype(mx.float16)
LAYOUTS = ("mlx", "marlin")

ONE_EACH = [
    (mode, bits, sizes[i % len(sizes)])
    for i, ((mode, bits), format) in enumerate(FORMATS.items())
    if (sizes := format.group_sizes or format.packed_group_sizes)
]
"""Every format, with one of its group sizes."""
of_mlx = pytest.mark.parametrize(
    ("mode", "bits", "group_size"), [each for each in ONE_EACH if each in OF_MLX]
)
FLOATING = [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
NOT_IN_MLX = [
    *(("affine", 3, size) for size in PACKED_GROUPS),
    *(("symmetric", 8, size) for size in PACKED_GROUPS),
    *(("zero_point", 5, size) for size in PACKED_GROUPS),
    *(("symmetric", 4, 64), ("zero_point", 4, 64), ("codebook", 4, 64)),
    *(each for each in ONE_EACH if each[0] in SUPER_BLOCKS),
]
"""Formats that only packed weights have, which are unpacked for stock MLX."""
FEW = [("affine", 3, 64), ("affine", 8, 32), *FLOATING]
few = pytest.mark.parametrize(("mode", "bits", "group_size"), FEW)
floating = pytest.mark.parametrize(("mode", "bits", "group_size"), FLOATING)
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def options_of(mode: str, bits: int, group_size: int) -> dict[str, Any]:
    return {"group_size": group_size, "bits": bits, "mode": mode}


def native(options: dict[str, Any], dtype: mx.Dtype = mx.float16) -> list[mx.array]:
    return [*mx.quantize(W.astype(dtype), **options)]


def assert_close(actual: mx.array, expected: mx.array, rtol: float = 5e-3) -> None:
    """Compares with stock MLX, which rounds weights to half: no test of exactness."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    ours, theirs = oracles.exact(actual), oracles.exact(expected)
    assert np.linalg.norm(theirs) > 0
    assert np.linalg.norm(ours - theirs) <= rtol * np.linalg.norm(theirs)


def quantized_layer(options: dict[str, Any], bias: bool = True) -> nn.QuantizedLinear:
    linear = nn.Linear(K, N, bias=bias)
    linear.weight = W
    if bias:
        linear.bias = mx.random.normal((N,), key=mx.random.key(3)).astype(mx.float16)
    return nn.QuantizedLinear.from_linear(linear, **options)


def quantized_as(mode: str) -> tuple[mx.array, ...]:
    return mlx_marlin.unpack(quantize(W, mode=mode))


Loss = Callable[..., mx.array]


def loss(product: Callable[..., mx.array], *fixed: Any, **options: Any) -> Loss:
    """Returns a loss that is not linear in x."""
    return lambda x: (product(x, *fixed, **options).astype(mx.float32) ** 2).mean()
