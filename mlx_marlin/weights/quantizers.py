"""Quantizers for modes and group sizes that `mx.quantize` does not have."""

import mlx.core as mx

from mlx_marlin.weights.bit_streams import words_of_codes


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
