"""Weights of any codes, and the bits that they have after packing."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_marlin.products.packing import pack
from mlx_marlin.weights.formats import CHANNEL, format_of
from mlx_marlin.weights.packed_weight import PackedWeight
from support import format_cases
from support.format_cases import GROUPED, SUPER_BLOCKS, Weight, words_of_record
from support.oracles import Floats

SEEDS = st.integers(0, 2**32 - 1)
FORMAT = ("mode", "bits", "group_size")
grouped = pytest.mark.parametrize(FORMAT, GROUPED)
of_groups = pytest.mark.parametrize(
    FORMAT, [each for each in GROUPED if each[0] not in SUPER_BLOCKS]
)
"""Without super-blocks."""


def any_bits(
    mode: str = "affine",
    bits: int = 4,
    group_size: int = 64,
    *,
    n: int,
    k: int,
    dtype: str = "float16",
    seed: int = 0,
) -> Weight:
    """Makes a weight of random words; scales of any sign, one group in four zero."""
    draw = np.random.default_rng(seed)
    group_size = k if group_size == CHANNEL else group_size
    words = draw.integers(0, 2**32, (n, k * bits // 32), dtype=np.uint32)
    shape = (n, k // group_size)
    zero = draw.integers(0, 4, shape) == 0
    format = format_of(mode, bits)
    if format.codes == "floating":
        octets = np.where(zero, 0, draw.integers(0, 256, shape)).astype(np.uint8)
        return Weight(mode, bits, group_size, (mx.array(words), mx.array(octets)))
    if format.has_super_blocks:
        record = draw.integers(0, 2**16, (n, k // 256 * words_of_record(mode, bits)))
        arrays = mx.array(words), mx.array(record.astype(np.uint16))
        return Weight(mode, bits, group_size, arrays)
    stored = [draw.normal(size=shape), draw.normal(size=shape) * 8]
    if mode == "zero_point":
        stored[1] = draw.integers(0, 2**bits, shape).astype(float)
    floats = (
        mx.array(np.where(zero, 0, each).astype(np.float32)).astype(getattr(mx, dtype))
        for each in stored[: format.parameters]
    )
    return Weight(mode, bits, group_size, (mx.array(words), *floats))


def packed_of(weight: Weight) -> PackedWeight:
    return pack(*weight.native, **weight.options)


def packed_weights(
    grouped: tuple[str, int, int],
    *batch: int,
    n: int,
    k: int,
    dtype: str = "float32",
) -> tuple[PackedWeight, Floats]:
    """Makes a weight or a batch of different ones, and what they are in float64."""
    weight = format_cases.any_weight(
        *grouped, math.prod(batch) * n, k, dtype=dtype, seed=n
    )
    native = [each.reshape(*batch, n, -1) for each in weight.native]
    return pack(*native, **weight.options), weight.decoded.reshape(*batch, n, k)


def assert_same_bits(actual: mx.array, expected: mx.array) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    same = mx.array_equal(actual.view(mx.uint8), expected.view(mx.uint8))
    assert same, "shape and dtype agree, the bits do not"


def weights(seed: int, dtype: mx.Dtype) -> mx.array:
    """Makes [24, 256] with constant, one-signed, zero and tiny groups among them."""
    w = np.random.default_rng(seed).normal(size=(24, 256)).astype(np.float32)
    w[0] = 0
    w[1] = 0.37
    w[2] = -5
    w[3] = np.abs(w[3])
    w[4] = -np.abs(w[4])
    w[5, :64] *= 1e-3
    return mx.array(w).astype(dtype)
