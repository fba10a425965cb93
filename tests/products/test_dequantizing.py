"""A plain weight is what the codes and scales say, rounded once."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin import pack
from mlx_marlin.products.reference.weight import dequantize
from mlx_marlin.weights.bit_streams import words_of_codes
from support import format_cases, oracles
from support.packed_codes import packed_of
from support.profiles import sampled
from support.strategies import Grouped

SUPER_BLOCKS = [
    each for each in format_cases.GROUPED if each[0] in format_cases.SUPER_BLOCKS
]
N, K = 40, 256
DTYPES = (mx.float16, mx.bfloat16, mx.float32)


@sampled(40)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("mode", ["affine", "symmetric", "zero_point"])
@pytest.mark.parametrize("group_size", [16, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_integer_codes_are_scaled_and_rounded_once(
    dtype: mx.Dtype, group_size: int, mode: str, bits: int
) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (N, K), np.uint8)
    groups = (N, K // group_size)
    # Few digits, so that float64 holds every sum and product exactly.
    scales = rng.integers(-64, 64, groups) / 256
    third = rng.integers(0, 2**bits, groups).astype(np.float64)
    third = {"affine": third / 64, "symmetric": None, "zero_point": third}[mode]
    packed = pack(
        words_of_codes(mx.array(codes), bits),
        mx.array(scales).astype(mx.float16),
        None if third is None else mx.array(third).astype(mx.float16),
        group_size=group_size,
        bits=bits,
        mode=mode,
    )
    wide = np.repeat(scales, group_size, axis=1)
    if mode == "affine":
        exact = wide * codes + np.repeat(third, group_size, axis=1)
    elif mode == "symmetric":
        exact = wide * (codes - 2.0 ** (bits - 1))
    else:
        exact = wide * (codes - np.repeat(third, group_size, axis=1))

    got = dequantize(packed, dtype)

    assert got.dtype == dtype
    expected = mx.array(exact.astype(np.float32)).astype(dtype)
    assert mx.array_equal(got, expected)


@sampled(7)
@pytest.mark.parametrize("grouped", [*SUPER_BLOCKS, ("codebook", 4, 64)], ids=str)
@pytest.mark.parametrize("dtype", oracles.ROUNDING)
def test_super_blocks_and_codebooks_are_decoded_and_rounded_once(
    grouped: Grouped, dtype: str
) -> None:
    weight = format_cases.any_weight(*grouped, 45, 512, dtype="float16", seed=0)

    w = dequantize(packed_of(weight), getattr(mx, dtype))

    # Float32 rounds both terms of a weight: the codes of 6 bits have an offset.
    scale, value, bias = map(np.abs, weight.parts)
    terms = 2.0**-23 * (scale * (value + 32) + bias)
    rounding = oracles.ROUNDING[dtype] * np.abs(weight.decoded)
    off = np.abs(oracles.exact(w) - weight.decoded)
    assert np.all(off <= terms + rounding + oracles.SMALLEST[dtype])


@pytest.mark.parametrize(
    ("mode", "scale"), [("mxfp4", None), ("mxfp8", None), ("nvfp4", None), ("nvfp4", 3)]
)
def test_small_floats_are_decoded_as_mlx_does(mode: str, scale: int | None) -> None:
    w = mx.random.normal((N, K), key=mx.random.key(0))
    total = None if scale is None else mx.array([float(scale)])
    words, scales = mx.quantize(w, mode=mode, global_scale=total)
    packed = pack(words, scales, mode=mode, global_scale=total)
    expected = mx.dequantize(words, scales, mode=mode, global_scale=total)

    got = dequantize(packed)

    # With a global scale MLX returns float32, whatever dtype is asked for.
    assert got.dtype == mx.bfloat16
    assert mx.array_equal(got, expected.astype(mx.bfloat16))


def test_a_batch_keeps_its_shape() -> None:
    w = mx.random.normal((3, 32, 128), key=mx.random.key(0))
    parts = mx.quantize(w)
    assert mx.array_equal(dequantize(pack(*parts)), mx.dequantize(*parts))


def test_other_dtypes_and_weights_are_refused() -> None:
    packed = pack(*mx.quantize(mx.zeros((32, 64))))
    with pytest.raises(ValueError, match="dtype"):
        dequantize(packed, mx.int8)
    with pytest.raises(TypeError, match="dtype"):
        dequantize(packed, "float16")
    with pytest.raises(TypeError, match="packed must be a PackedWeight, got array"):
        dequantize(mx.zeros((32, 64)))
