"""Each mode quantizes by its rounding rule."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin.products.packing import quantize, unpack
from mlx_marlin.weights import quantizers
from support import oracles
from support.format_cases import Weight
from support.packed_codes import assert_same_bits, weights


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_asymmetric_scales_and_codes_are_those_of_mlx(
    group_size: int, bits: int, dtype: mx.Dtype
) -> None:
    w = weights(0, dtype)
    expected = mx.quantize(w, group_size=group_size, bits=bits)

    packed = unpack(quantize(w, group_size=group_size, bits=bits))
    ours = quantizers.affine(w, group_size, bits)

    for of_mlx, of_packed, by_us in zip(expected, packed, ours, strict=True):
        assert_same_bits(of_packed, of_mlx)
        assert_same_bits(by_us, of_mlx)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("mode", ["affine", "symmetric"])
def test_more_scales_round_less(mode: str, dtype: str) -> None:
    w = weights(3, getattr(mx, dtype))[3:]
    errors = []
    for group_size in (16, 32, 64, 128, 256, "channel"):
        packed = quantize(w, group_size=group_size, bits=4, mode=mode)
        of_k = w.shape[1] if group_size == "channel" else group_size
        assert packed.group_size == of_k
        weight = Weight(mode, 4, of_k, unpack(packed))
        assert weight.native[1].shape == (len(w), w.shape[1] // of_k)
        errors.append(oracles.error(mx.array(weight.decoded), oracles.exact(w)))

    assert errors[:5] == sorted(errors[:5])
    assert errors[0] < 0.8 * errors[4]
    assert errors[5] == errors[4]  # a row of 256


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_symmetric_codes_stand_for_whole_steps_around_an_exact_zero(
    bits: int, dtype: str
) -> None:
    for group_size in (32, 64, 128):
        w = weights(1, getattr(mx, dtype))

        packed = quantize(w, group_size=group_size, bits=bits, symmetric=True)

        assert (packed.mode, packed.dtype) == ("symmetric", w.dtype)
        weight = Weight("symmetric", bits, group_size, unpack(packed))
        assert len(weight.native) == 2  # no bias is stored
        scale, steps, _ = weight.parts
        np.testing.assert_array_equal(steps[0], 0)
        np.testing.assert_array_equal(weight.decoded[1:3], oracles.exact(w[1:3]))
        distance = np.abs(weight.decoded - oracles.exact(w))
        # A code rounds by half a step, and the scale by half a place for each step. The
        # largest of a group is exact and the far end may be one step short.
        scale_error = oracles.ROUNDING[dtype] * 2**bits
        step = np.abs(scale) * (1 + scale_error)
        assert (distance <= step).all()
        within = np.abs(oracles.exact(w)) <= (2 ** (bits - 1) - 1) * np.abs(scale)
        assert (distance <= (0.5 + 1e-6) * np.abs(scale))[within].all()


def test_symmetric_zeros_inside_a_group_stay_zero() -> None:
    w = mx.array(np.random.default_rng(5).normal(size=(4, 64)).astype(np.float32))
    w[:, ::3] = 0

    packed = quantize(w, symmetric=True)

    decoded = Weight("symmetric", 4, 64, unpack(packed)).decoded
    np.testing.assert_array_equal(decoded[:, ::3], 0)
    assert (decoded[:, 1::3] != 0).mean() > 0.8
    again = quantize(w, mode="symmetric")
    assert_same_bits(again.words, packed.words)
    assert_same_bits(again.scales, packed.scales)
