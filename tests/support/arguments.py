"""Weights and activations that the tests of calls share."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_marlin.products import packing
from mlx_marlin.products.packing import pack
from mlx_marlin.weights.packed_weight import PackedWeight

K, N = 128, 40


def weight(
    n: int = N,
    k: int = K,
    *,
    dtype: mx.Dtype = mx.float32,
    batch: int = 0,
    **format: Any,
) -> tuple[mx.array, ...]:
    """Quantizes a weight; `batch` of them if there is to be one."""
    shape = (batch, n, k) if batch else (n, k)
    w = mx.random.normal(shape, key=mx.random.key(n * k)).astype(dtype)
    return mx.quantize(w, **format)


def activations(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape))).astype(dtype)


def packed_unread(*arrays: mx.array) -> PackedWeight:
    """Packs without comparing, for constants: no import of a test evaluates an array.

    A process that has evaluated one cannot be forked, which `mutants.python` does.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_is_same", lambda *_, **__: None)
        patch.setattr(packing, "_is_begun", lambda *_: None)
        return pack(*arrays)


W, SCALES, BIASES = weight()
PACKED = packed_unread(W, SCALES, BIASES)
X = activations(3, K)
FP4, FP4_SCALES = weight(mode="mxfp4")
