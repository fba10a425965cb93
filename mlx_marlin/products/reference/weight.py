"""Products with native and packed weights, and plain weights, in MLX's operations."""

from io import StringIO

import mlx.core as mx

from mlx_marlin.products.packing import unpack
from mlx_marlin.weights import codebooks, layout, super_blocks
from mlx_marlin.weights.bit_streams import words_of_codes
from mlx_marlin.weights.dtypes import dtype_name, floating, result_dtype
from mlx_marlin.weights.formats import (
    DTYPE_BYTES,
    GROUPS,
    MODE_DEFAULTS,
    TILE_N,
    format_of,
)
from mlx_marlin.weights.packed_weight import PackedWeight
from mlx_marlin.weights.quantizers import decoded
from mlx_marlin.weights.tile_conversion import codes_at, deinterleave

LARGEST_NVFP4 = 6.0 * 448.0
"""The largest E2M1 times the largest E4M3: MLX divides global scales by it."""
NativeWeight = tuple[
    mx.array, mx.array, mx.array | None, tuple[int | None, int | None, str]
]
"""A weight in MLX's layout: codes, scales, biases if the mode has them, and group_size,
bits and mode as MLX takes them.

A layer builds it at every call, because training replaces its arrays; another class of
objects would cost the host more there.
"""


def stock_group_size(packed: PackedWeight) -> int | None:
    """Returns the group size that stock MLX uses for a weight, or None."""
    return stock_groups(packed.mode, packed.bits, packed.group_size)


def stock_groups(mode: str, bits: int, group_size: int) -> int | None:
    """Returns the group size that stock MLX uses for a format.

    Groups that are longer than MLX's are split.
    """
    if format_of(mode, bits).has_codebook:
        return None
    if group_size in format_of(mode, bits).group_sizes:
        return group_size
    return next((size for size in reversed(GROUPS) if group_size % size == 0), None)


def as_mlx(packed: PackedWeight, *, exact: bool = False) -> tuple[mx.array, ...]:
    """Returns codes, scales and biases with which stock MLX decodes the same weight.

    The groups have `stock_group_size`, or the weight's own size if that is None. Those
    of "k_quant" are float32. The global scale is not applied.

    `exact`: whether the scales and biases of "zero_point" and "symmetric" are float32,
    in which MLX decodes these weights exactly. Otherwise they have the scales' dtype,
    to which a bias is rounded.
    """
    words, scales, *rest = unpack(packed)
    if packed.mode == "k_quant":
        format = format_of(packed.mode, packed.bits)
        scales, biases = super_blocks.float_parameters(
            scales, format, packed.group_size
        )
        middle = 2.0 ** (packed.bits - 1)
        rest = [-middle * scales if biases is None else biases]
    elif exact and packed.mode not in MODE_DEFAULTS:
        scales = scales.astype(mx.float32)
    if packed.mode == "symmetric":
        rest = [-(2 ** (packed.bits - 1)) * scales]
    elif packed.mode == "zero_point":
        rest = [-scales * rest[0]]
    times = packed.group_size // (stock_group_size(packed) or packed.group_size)
    if times > 1:
        scales, *rest = (mx.repeat(array, times, axis=-1) for array in (scales, *rest))
    return settled(words, scales, *rest)


def mode_of_mlx(mode: str) -> str:
    """Returns the mode of the weight that `as_mlx` returns."""
    return mode if mode in MODE_DEFAULTS else "affine"


def rounds_biases(packed: PackedWeight) -> bool:
    """Returns whether a bias of `as_mlx` is rounded."""
    if packed.mode != "zero_point":
        return False
    exact, rounded = (as_mlx(packed, exact=wide)[2] for wide in (True, False))
    return not mx.array_equal(exact, rounded.astype(mx.float32))


def stock_product(x: mx.array, packed: PackedWeight, transpose: bool) -> mx.array:
    """Multiplies x by a packed weight in MLX's operations: x @ w.T, or x @ w.

    A batch of weights is broadcast with x.
    """
    size = stock_group_size(packed)
    if size is None:
        dtype = result_dtype(x.dtype, packed.dtype)
        w = plain(packed, dtype)
        return x.astype(dtype) @ (w.swapaxes(-1, -2) if transpose else w)
    words, scales, *rest = as_mlx(packed, exact=True)
    scale, mode = packed.global_scale, mode_of_mlx(packed.mode)
    y = native_product(
        # Without the global scale, the product may exceed the range of float16.
        x if scale is None else x.astype(mx.float32),
        (words, scales, rest[0] if rest else None, (size, packed.bits, mode)),
        transpose,
    )
    if scale is not None:
        y = y * (scale / LARGEST_NVFP4)
    return y.astype(result_dtype(x.dtype, packed.dtype))


def native_product(x: mx.array, weight: NativeWeight, transpose: bool) -> mx.array:
    """Multiplies x by weights in MLX's layout, broadcast as plain matrices would be."""
    w, scales, biases, (group_size, bits, mode) = weight
    # MLX broadcasts x over a batch of weights only if x has a batch too. Otherwise its
    # result is the first weight's product.
    missing = w.ndim - x.ndim if w.ndim > 2 else 0
    return mx.quantized_matmul(
        x.reshape((1,) * missing + x.shape) if missing > 0 else x,
        w,
        scales,
        biases,
        transpose=transpose,
        group_size=group_size,
        bits=bits,
        mode=mode,
    )


def plain(packed: PackedWeight, dtype: mx.Dtype) -> mx.array:
    """Returns a weight [..., n, k] decoded, in MLX's operations.

    Every element is computed in float32 and rounded once.
    """
    words, scales, *biases = unpack(packed)
    values = decoded(
        words,
        scales,
        biases[0] if biases else None,
        group_size=packed.group_size,
        bits=packed.bits,
        mode=packed.mode,
        global_scale=packed.global_scale,
        codebook=packed.codebook,
    )
    return settled(values.astype(dtype))[0]


def is_traced() -> bool:
    """Returns whether this thread traces a function without shapes.

    MLX has no function for the question. There alone it adds an operation for a
    broadcast of equal shapes (0.32.4).
    """
    text = StringIO()
    array = mx.array([0.0])
    mx.export_to_dot(text, mx.broadcast_arrays(array, array)[0])
    return "label" in text.getvalue()


def settled(*arrays: mx.array) -> tuple[mx.array, ...]:
    """Returns arrays that were made from weights, evaluated in such a trace.

    The trace then holds them as constants, for as long as the compiled function lives.
    """
    if is_traced():
        try:
            mx.eval(arrays)
        except ValueError as error:
            raise ValueError(
                "packed weights that stock MLX serves cannot be inputs of a function "
                "that is compiled with shapeless=True: leave them out of `inputs`, or "
                "call mlx_marlin.optimize(model, layout='mlx')"
            ) from error
    return arrays


def decoded_rows(packed: PackedWeight, rows: mx.array) -> mx.array:
    """Returns some rows of a packed weight, float32 [count, k].

    It reads the words of these rows only, and the parameters of their tiles.

    `rows`: indices of rows, integers [count].
    """
    format = format_of(packed.mode, packed.bits)
    size, k = packed.group_size, packed.k
    if rows.size == 0:  # MLX infers no shape of empty arrays
        return mx.zeros((0, k))
    tiles = packed.scales[rows // TILE_N][:, None]
    if format.has_codebook:
        _, padded_k = layout.padded(TILE_N, k)
        tiles = codebooks.scales(tiles, format, padded_k, size)
    if format.has_super_blocks:
        stored = super_blocks.to_rows(tiles, TILE_N, format, size)[None]
    else:
        stored = deinterleave(tiles, TILE_N, k // size, format.parameters)
    own = stored[:, mx.arange(rows.size), rows % TILE_N]
    codes = codes_at(packed.words, rows, k, bits=packed.bits, group_size=size)
    return decoded(
        words_of_codes(codes, packed.bits),
        own[0],
        own[1] if format.has_second_array else None,
        group_size=size,
        bits=packed.bits,
        mode=packed.mode,
        global_scale=packed.global_scale,
        codebook=packed.codebook,
    )


def dequantize(packed: PackedWeight, dtype: mx.Dtype | None = None) -> mx.array:
    """Returns the plain weight that a packed one stands for.

    Codes are scaled in float32 and rounded to `dtype` once.

    Args:
        packed: The weight [..., n, k].
        dtype: Dtype of the result. Default: that of the scales; bfloat16 where the
            scales are integers, as in MLX.

    Returns:
        The weight [..., n, k].

    Raises:
        TypeError: If `packed` is not a `PackedWeight`, or `dtype` not a dtype of MLX.
        ValueError: If `dtype` is not float16, bfloat16 or float32.
    """
    if not isinstance(packed, PackedWeight):
        raise TypeError(f"packed must be a PackedWeight, got {type(packed).__name__}")
    if dtype is None:
        dtype = floating(packed.dtype, mx.bfloat16)
    if not isinstance(dtype, mx.Dtype):
        raise TypeError(f"dtype must be an mx.Dtype, got {type(dtype).__name__}")
    if dtype_name(dtype) not in DTYPE_BYTES:
        raise ValueError(f"dtype={dtype_name(dtype)}, expected one of {[*DTYPE_BYTES]}")
    return plain(packed, dtype)
