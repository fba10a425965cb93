"""Quantizing weights, and moving them between MLX's layout and ours, on MLX arrays."""

from dataclasses import dataclass
from math import prod

import mlx.core as mx

from mlx_marlin import layout
from mlx_marlin.codes import words_of_codes
from mlx_marlin.formats import DTYPE_BYTES, MODE_DEFAULTS, Format, format_of
from mlx_marlin.repacking import to_rows, to_tiles


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedWeight:
    """A quantized weight [n, k], or a batch of them, in the packed ("marlin") layout.

    Attributes:
        words: Codes, uint32 [..., n tiles, k tiles, 64 * bits], in the order of
            `layout`.
        scales: What a group stores, [..., n tiles, groups, 32 or 64]: for each of 8
            fragment rows the scales of rows 0, 8, 16, 24 beyond it, or the (scale,
            bias) or (scale, zero point) of these rows.
        n: Rows of the weight: features that come out.
        k: Columns of the weight: features that go in.
        group_size: Weights along k that share a scale.
        bits: Bits of a code.
        mode: The scheme: MLX's "affine", "mxfp4", "mxfp8" or "nvfp4", or "symmetric",
            which stores no bias, or "zero_point".
    """

    words: mx.array
    scales: mx.array
    n: int
    k: int
    group_size: int = 64
    bits: int = 4
    mode: str = "affine"

    def __post_init__(self) -> None:
        format = _check_format(self.mode, self.bits, self.group_size)
        _check_k("PackedWeight", self.k, format, self.group_size)
        n, k = layout.padded(self.n, self.k)
        tiles = (n // layout.TILE_N, k // layout.TILE_K)
        words = (*self.batch, *tiles, layout.tile_words(self.bits))
        stored = format.parameters * layout.TILE_N
        scales = (*self.batch, tiles[0], -(-k // self.group_size), stored)
        if self.words.shape != words or self.words.dtype != mx.uint32:
            raise ValueError(
                f"words must be uint32 {words} for {self.k}→{self.n}, "
                f"got {dtype_name(self.words.dtype)} {self.words.shape}"
            )
        dtype = dtype_name(self.scales.dtype)
        if self.scales.shape != scales or dtype not in format.scale_dtypes:
            raise ValueError(
                f"scales must be one of {[*format.scale_dtypes]} with shape {scales}, "
                f"got {dtype} {self.scales.shape}"
            )

    @property
    def batch(self) -> tuple[int, ...]:
        """Leading axes, such as (experts,); empty for one weight."""
        return self.words.shape[:-3]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (..., n, k) of the weight that this stands for."""
        return *self.batch, self.n, self.k

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of the scales."""
        return self.scales.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and biases, padding included."""
        return self.words.nbytes + self.scales.nbytes


def quantize(
    w: mx.array,
    *,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    symmetric: bool = False,
) -> PackedWeight:
    """Quantizes a weight and packs it.

    Args:
        w: Weight [n, k] or a batch [..., n, k], float16, bfloat16 or float32; k a
            multiple of `group_size`.
        group_size: Weights along k that share a scale. Default: the mode's.
        bits: Bits of a code. Default: the mode's.
        mode: A scheme of `mx.quantize`, or "symmetric": codes of b bits stand for
            -2^(b-1) to 2^(b-1) - 1 times the scale, and zero is exact.
        symmetric: The same as `mode="symmetric"`.

    Returns:
        The packed weight. Its scales have w's dtype, or are bytes.

    Raises:
        ValueError: If w or the format is not one of ours.
    """
    if symmetric and mode not in ("affine", "symmetric"):
        raise ValueError(f"symmetric=True is not for mode={mode!r}, only for integers")
    mode = "symmetric" if symmetric else mode
    group_size, bits = _with_defaults(mode, group_size, bits)
    _check_format(mode, bits, group_size)
    if w.ndim < 2 or dtype_name(w.dtype) not in DTYPE_BYTES:
        raise ValueError(
            f"w must be a matrix [n, k] or a batch of them, of {[*DTYPE_BYTES]}, "
            f"got {dtype_name(w.dtype)} with shape {w.shape}"
        )
    if 0 in w.shape or w.shape[-1] % group_size:
        raise ValueError(
            f"w has shape {w.shape}, expected at least one row and a k that is a "
            f"multiple of group_size={group_size}"
        )
    if mode == "zero_point":
        raise ValueError('mode="zero_point" is for weights that are quantized already')
    parts = (
        _quantize_symmetric(w, group_size, bits)
        if mode == "symmetric"
        else mx.quantize(w, group_size=group_size, bits=bits, mode=mode)
    )
    return pack(*parts, group_size=group_size, bits=bits, mode=mode)


def pack(
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
) -> PackedWeight:
    """Packs a quantized weight, exactly.

    n is padded to a multiple of 32 and k to a multiple of 64, with code 0, scale 0 and
    bias 0: padding stands for zero.

    Args:
        w: Codes as `mx.quantize` makes them, uint32 [n, k * bits / 32], or a batch of
            them [..., n, k * bits / 32].
        scales: Scales [..., n, k / group_size].
        biases: Biases, same shape as `scales`; for "zero_point" the zero points, whole
            numbers in the scales' dtype; None for schemes without.
        group_size: Weights along k that share a scale. Default: the mode's.
        bits: Bits of a code. Default: the mode's.
        mode: MLX's scheme, or "symmetric" or "zero_point".

    Raises:
        ValueError: If the arrays do not belong together or are not in our format.
    """
    group_size, bits = _with_defaults(mode, group_size, bits)
    format = _check_format(mode, bits, group_size)
    _check_native(w, scales, biases, format, group_size)
    n, k = w.shape[-2], w.shape[-1] * 32 // bits
    padded_n, padded_k = layout.padded(n, k)
    stored = [scales] if biases is None else [scales, biases]
    return PackedWeight(
        words=to_tiles(w, n, k, bits=bits, group_size=group_size),
        scales=_interleave(stored, padded_n, -(-padded_k // group_size)),
        n=n,
        k=k,
        group_size=group_size,
        bits=bits,
        mode=mode,
    )


def unpack(packed: PackedWeight) -> tuple[mx.array, ...]:
    """Returns what `pack` was given, exactly: codes, scales, biases if there are."""
    format = format_of(packed.mode, packed.bits)
    words = to_rows(
        packed.words,
        packed.n,
        packed.k,
        bits=packed.bits,
        group_size=packed.group_size,
    )
    return words, *_deinterleave(packed, format.parameters)


def as_mlx(packed: PackedWeight) -> tuple[mx.array, ...]:
    """Returns codes, scales and biases that mean the same to stock MLX.

    A zero point becomes the bias that it stands for, rounded to the scales' dtype.
    """
    words, scales, *rest = unpack(packed)
    if packed.mode == "symmetric":
        return words, scales, -(2 ** (packed.bits - 1)) * scales
    if packed.mode == "zero_point":
        return words, scales, -scales * rest[0]
    return words, scales, *rest


def _quantize_symmetric(
    w: mx.array, group_size: int, bits: int
) -> tuple[mx.array, mx.array]:
    # The value of largest magnitude becomes the most negative code, so its sign decides
    # the scale's.
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


def _interleave(stored: list[mx.array], padded_n: int, padded_groups: int) -> mx.array:
    *batch, n, groups = stored[0].shape
    dtype = mx.result_type(*stored)
    factors = mx.stack([each.astype(dtype) for each in stored])
    whole = [(0, 0)] * (1 + len(batch))
    factors = mx.pad(factors, [*whole, (0, padded_n - n), (0, padded_groups - groups)])
    digits = factors.reshape(len(stored), -1, 4, 8, padded_groups)
    return digits.transpose(1, 4, 3, 2, 0).reshape(
        *batch, padded_n // layout.TILE_N, padded_groups, -1
    )


def _deinterleave(packed: PackedWeight, parameters: int) -> mx.array:
    """Returns scales, and biases if there are: the inverse of `_interleave`."""
    n, _ = layout.padded(packed.n, packed.k)
    *batch, _, groups, _ = packed.scales.shape
    digits = packed.scales.reshape(-1, groups, 8, 4, parameters)
    factors = digits.transpose(4, 0, 3, 2, 1).reshape(parameters, *batch, n, groups)
    return factors[..., : packed.n, : packed.k // packed.group_size]


def _with_defaults(
    mode: str, group_size: int | None, bits: int | None
) -> tuple[int, int]:
    default_group, default_bits = MODE_DEFAULTS.get(mode, MODE_DEFAULTS["affine"])
    return (
        default_group if group_size is None else group_size,
        default_bits if bits is None else bits,
    )


def _check_format(mode: str, bits: int, group_size: int) -> Format:
    format = format_of(mode, bits)
    if group_size not in format.group_sizes:
        raise ValueError(f"group_size={group_size} is not one of {format.group_sizes}")
    return format


def _check_k(name: str, k: int, format: Format, group_size: int) -> None:
    if k % group_size:
        raise ValueError(f"{name} has k={k}, not a multiple of group_size={group_size}")
    if k % format.k_multiple:
        raise ValueError(
            f"{name} has k={k}, not a multiple of {format.k_multiple}, as "
            f"{format.mode} needs it"
        )


def _check_native(
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    format: Format,
    group_size: int,
) -> None:
    if w.ndim < 2 or w.dtype != mx.uint32 or prod(w.shape) == 0:
        raise ValueError(
            f"w must be a non-empty uint32 matrix [n, k * {format.bits} / 32] or a "
            f"batch of them, got {dtype_name(w.dtype)} with shape {w.shape}"
        )
    k = w.shape[-1] * 32 // format.bits
    _check_k("w", k, format, group_size)
    if (biases is not None) != (format.parameters == 2):
        expected = "biases" if format.codes == "affine" else "zero points as biases"
        raise ValueError(
            f"mode={format.mode!r} takes "
            + (f"{expected}, got None" if biases is None else "no biases")
        )
    for name, array in (("scales", scales), ("biases", biases)):
        if array is None:
            continue
        shape = (*w.shape[:-1], k // group_size)
        if array.shape != shape or dtype_name(array.dtype) not in format.scale_dtypes:
            raise ValueError(
                f"{name} must be one of {[*format.scale_dtypes]} with shape {shape}, "
                f"got {dtype_name(array.dtype)} with shape {array.shape}"
            )


def dtype_name(dtype: mx.Dtype) -> str:
    """Returns "float16" for `mx.float16`: the name that plans know a dtype by."""
    return str(dtype).removeprefix("mlx.core.")
