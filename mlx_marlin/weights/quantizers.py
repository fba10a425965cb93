"""Quantizers that `mx.quantize` does not have, and what the codes of all stand for."""

import mlx.core as mx

from mlx_marlin.weights import super_blocks
from mlx_marlin.weights.bit_streams import codes_of_words, words_of_codes
from mlx_marlin.weights.formats import format_of


def affine(
    w: mx.array, group_size: int, bits: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Quantizes by the rule of `mx.quantize`, for any group size.

    The extremum of a group with the larger magnitude, and zero, are exact. With one
    bit, the two codes are the minimum and the maximum.
    """
    groups = w.astype(mx.float32).reshape(*w.shape[:-1], -1, group_size)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    is_low = mx.abs(low) > mx.abs(high)
    largest_code = 2**bits - 1
    step = mx.maximum((high - low) / largest_code, 1e-7)
    step = mx.where(is_low, step, -step)
    edge = mx.where(is_low, low, high)
    zero = mx.round(edge / step)
    bias = mx.where(zero == 0, 0, edge)
    step = mx.where(zero == 0, step, edge / zero)
    if bits == 1:
        step, bias = mx.maximum(high - low, 1e-7), low
    codes = mx.clip(mx.round((groups - bias) / step), 0, largest_code)
    words = words_of_codes(codes.astype(mx.uint8).reshape(w.shape), bits)
    return words, step.squeeze(-1).astype(w.dtype), bias.squeeze(-1).astype(w.dtype)


def symmetric(w: mx.array, group_size: int, bits: int) -> tuple[mx.array, mx.array]:
    """Quantizes symmetrically around an exact zero.

    The value of largest magnitude gets the most negative code, so the scale has the
    opposite sign of this value.
    """
    zero = 2 ** (bits - 1)
    groups = w.astype(mx.float32).reshape(*w.shape[:-1], -1, group_size)
    largest = mx.take_along_axis(
        groups, mx.abs(groups).argmax(-1, keepdims=True), axis=-1
    )
    scales = (largest / -zero).astype(w.dtype)
    divisor = mx.where(scales == 0, 1, scales).astype(mx.float32)
    codes = mx.clip(mx.round(groups / divisor) + zero, 0, 2 * zero - 1)
    words = words_of_codes(codes.astype(mx.uint8).reshape(w.shape), bits)
    return words, scales.squeeze(-1)


def zero_point(
    w: mx.array, group_size: int, bits: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Returns codes, scales and whole zero points: scale * (code - zero point).

    The range of a group is widened to contain zero, which has a code of its own.
    """
    most = 2**bits - 1
    groups = w.astype(mx.float32).reshape(*w.shape[:-1], -1, group_size)
    low = mx.minimum(groups.min(-1, keepdims=True), 0)
    high = mx.maximum(groups.max(-1, keepdims=True), 0)
    scales = ((high - low) / most).astype(w.dtype)
    divisor = mx.where(scales == 0, 1, scales).astype(mx.float32)
    zeros = mx.clip(mx.round(-low / divisor), 0, most)
    codes = mx.clip(mx.round(groups / divisor + zeros), 0, most)
    words = words_of_codes(codes.astype(mx.uint8).reshape(w.shape), bits)
    return words, scales.squeeze(-1), zeros.squeeze(-1).astype(w.dtype)


def decoded(
    words: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    *,
    group_size: int,
    bits: int,
    mode: str,
    global_scale: mx.array | None = None,
    codebook: mx.array | None = None,
    dtype: mx.Dtype = mx.float32,
) -> mx.array:
    """Returns the values of codes in MLX's layout, computed in `dtype`, [..., n, k].

    `words`: codes, uint32 [..., n, k * bits / 32].
    `scales`: scales [..., n, k / group_size].
    `biases`: biases of "affine", zero points of "zero_point", None for other modes.
    """
    format = format_of(mode, bits)
    if format.has_super_blocks:
        scales, biases = super_blocks.float_parameters(scales, format, group_size)
        mode = "symmetric" if biases is None else "affine"
    if scales.dtype == mx.uint8:
        return mx.dequantize(
            words,
            scales,
            None,
            group_size,
            bits,
            mode,
            global_scale=global_scale,
            dtype=mx.float32,
        ).astype(dtype)
    places = codes_of_words(words, bits)
    if codebook is not None:
        factors = mx.repeat(scales.astype(dtype), group_size, axis=-1)
        return factors * codebook.astype(dtype)[places]
    groups = places.astype(dtype).reshape(*scales.shape, group_size)
    wide = scales.astype(dtype)[..., None]
    if mode == "symmetric":
        values = wide * (groups - 2.0 ** (bits - 1))
    else:
        assert biases is not None
        second = biases.astype(dtype)[..., None]
        is_affine = mode == "affine"
        values = wide * groups + second if is_affine else wide * (groups - second)
    return values.reshape(places.shape)
