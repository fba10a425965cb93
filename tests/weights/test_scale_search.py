"""The scale search never rounds worse than what it starts from."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_marlin.weights import quantizers, scale_search
from mlx_marlin.weights.bit_streams import codes_of_words

WIDTHS = (2, 3, 4, 5, 6, 8)
DTYPES = (mx.float16, mx.bfloat16, mx.float32)


def drawn(seed: int, group_size: int, dtype: mx.Dtype) -> mx.array:
    """Rows of outliers, of one sign, of one value and of zeros among normal ones."""
    w = mx.random.normal((7, 4 * group_size), key=mx.random.key(seed))
    w[0, ::17] *= 8
    w[1] = mx.abs(w[1]) + 1
    w[2] = -0.125
    w[3] = 0
    return w.astype(dtype)


def squared(groups: mx.array, decoded: mx.array) -> mx.array:
    return mx.square(groups - decoded).sum(-1)


CALLS = given(
    seed=st.integers(0, 2**31),
    bits=st.sampled_from(WIDTHS),
    group_size=st.sampled_from((16, 32, 64, 128)),
    dtype=st.sampled_from(DTYPES),
)
EXAMPLES = settings(max_examples=25, deadline=None)


@EXAMPLES
@CALLS
@pytest.mark.parametrize("mode", ["affine", "symmetric", "zero_point"])
def test_no_group_is_worse_than_rounded_to_nearest(
    mode: str, seed: int, bits: int, group_size: int, dtype: mx.Dtype
) -> None:
    w = drawn(seed, group_size, dtype)
    groups = w.astype(mx.float32).reshape(7, -1, group_size)
    words, *stored = getattr(quantizers, mode)(w, group_size, bits)
    nearest = codes_of_words(words, bits).reshape(groups.shape).astype(mx.float32)
    start, *third = (part[..., None].astype(mx.float32) for part in stored)
    zero = third[0] if third else mx.full(start.shape, 2.0 ** (bits - 1))

    if mode == "affine":
        codes, *found = scale_search.affine(groups, bits, dtype, (start, zero))
        before = start * nearest + zero
    else:
        codes, *found = scale_search.around_zero(groups, bits, dtype, start, zero)
        before = start * (nearest - zero)

    assert codes.dtype == mx.uint8
    assert {part.dtype for part in found} == {dtype}
    assert codes.max().item() < 2**bits
    scale, *bias = (part.astype(mx.float32) for part in found)
    decoded = (
        scale * codes + bias[0] if bias else scale * (codes.astype(mx.float32) - zero)
    )
    most = squared(groups, before) * (1 + 1e-5) + 1e-12
    assert mx.all(squared(groups, decoded) <= most)


@EXAMPLES
@CALLS
def test_zero_points_are_whole_numbers_of_the_codes(
    seed: int, bits: int, group_size: int, dtype: mx.Dtype
) -> None:
    w = drawn(seed, group_size, dtype)
    words, scales, zeros = quantizers.zero_point(w, group_size, bits)
    assert (scales.dtype, zeros.dtype) == (dtype, dtype)
    assert mx.array_equal(zeros, mx.round(zeros))
    assert mx.all((zeros >= 0) & (zeros < 2**bits))
    groups = w.astype(mx.float32).reshape(7, -1, group_size)
    codes = codes_of_words(words, bits).reshape(groups.shape).astype(mx.float32)
    step = scales[..., None].astype(mx.float32)
    decoded = step * (codes - zeros[..., None].astype(mx.float32))
    # Half a step, and half a step more at the ends, where the zero point is rounded;
    # the scale is rounded too, by 2^-9 at most, which the largest code multiplies.
    bound = step * (1 + 2**bits * 2.0**-8) + 1e-6
    assert mx.all(mx.abs(groups - decoded) <= bound)
    zeros_of_weight = mx.where(groups == 0, decoded, 0)
    assert not mx.any(zeros_of_weight)


@pytest.mark.parametrize("bits", [2, 4])
def test_outliers_no_longer_decide_the_scale(bits: int) -> None:
    w = mx.random.normal((64, 512), key=mx.random.key(0))
    groups = w.reshape(64, -1, 128)
    words, scales, biases = quantizers.affine(w, 128, bits)
    nearest = codes_of_words(words, bits).reshape(groups.shape).astype(mx.float32)
    before = squared(groups, scales[..., None] * nearest + biases[..., None]).sum()

    codes, scale, bias = scale_search.affine(
        groups, bits, mx.float32, (scales[..., None], biases[..., None])
    )

    after = squared(groups, scale * codes + bias).sum()
    assert after < 0.9 * before
