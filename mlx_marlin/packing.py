"""Quantizing weights, and moving them between MLX's layout and ours, on MLX arrays."""

from dataclasses import dataclass
from math import prod

import mlx.core as mx

from mlx_marlin import layout
from mlx_marlin.formats import DTYPE_BYTES, format_of


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedWeight:
    """A 4-bit weight [n, k] in the packed ("marlin") layout.

    Attributes:
        words: Codes, uint32 [n tiles, k tiles, 256], in the order of `layout`.
        scales: Scales and biases interleaved, float [n tiles, groups, 64]: for each of
            8 fragment rows the (scale, bias) of rows 0, 8, 16, 24 beyond it.
        n: Rows of the weight: features that come out.
        k: Columns of the weight: features that go in.
        group_size: Weights along k that share a scale.
        bits: Bits of a code.
    """

    words: mx.array
    scales: mx.array
    n: int
    k: int
    group_size: int = 64
    bits: int = 4

    def __post_init__(self) -> None:
        _check_format(self.group_size, self.bits)
        n, k = layout.padded(self.n, self.k)
        tiles = (n // layout.TILE_N, k // layout.TILE_K)
        words = (*tiles, layout.TILE_WORDS)
        scales = (tiles[0], -(-k // self.group_size), 2 * layout.TILE_N)
        if self.words.shape != words or self.words.dtype != mx.uint32:
            raise ValueError(
                f"words must be uint32 {words} for {self.k}→{self.n}, "
                f"got {dtype_name(self.words.dtype)} {self.words.shape}"
            )
        if (
            self.scales.shape != scales
            or dtype_name(self.scales.dtype) not in DTYPE_BYTES
        ):
            raise ValueError(
                f"scales must be one of {[*DTYPE_BYTES]} with shape {scales}, "
                f"got {dtype_name(self.scales.dtype)} {self.scales.shape}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (n, k) of the weight that this stands for."""
        return self.n, self.k

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of the scales and biases."""
        return self.scales.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and biases, padding included."""
        return self.words.nbytes + self.scales.nbytes


def quantize(
    w: mx.array, *, group_size: int = 64, bits: int = 4, symmetric: bool = False
) -> PackedWeight:
    """Quantizes a weight and packs it.

    Args:
        w: Weight [n, k], float16, bfloat16 or float32; k a multiple of `group_size`.
        group_size: Weights along k that share a scale: 32, 64 or 128.
        bits: Bits of a code: 4.
        symmetric: Codes stand for -8 to 7 times the scale, zero is exact and the bias
            is -8 scales; else scale and bias are those of `mx.quantize`.

    Returns:
        The packed weight. Its scales have w's dtype.

    Raises:
        ValueError: If w or the format is not one of ours.
    """
    _check_format(group_size, bits)
    if w.ndim != 2 or dtype_name(w.dtype) not in DTYPE_BYTES:
        raise ValueError(
            f"w must be a matrix [n, k] of {[*DTYPE_BYTES]}, "
            f"got {dtype_name(w.dtype)} with shape {w.shape}"
        )
    if 0 in w.shape or w.shape[1] % group_size:
        raise ValueError(
            f"w has shape {w.shape}, expected at least one row and a k that is a "
            f"multiple of group_size={group_size}"
        )
    parts = (
        _quantize_symmetric(w, group_size)
        if symmetric
        else mx.quantize(w, group_size=group_size, bits=bits)
    )
    return pack(*parts, group_size=group_size, bits=bits)


def pack(
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    group_size: int = 64,
    bits: int = 4,
) -> PackedWeight:
    """Packs an affine weight of MLX, exactly.

    n is padded to a multiple of 32 and k to a multiple of 64, with code 0, scale 0 and
    bias 0: padding stands for zero.

    Args:
        w: Codes as `mx.quantize` makes them, uint32 [n, k * bits / 32].
        scales: Scales [n, k / group_size].
        biases: Biases, same shape as `scales`.
        group_size: Weights along k that share a scale: 32, 64 or 128.
        bits: Bits of a code: 4.

    Raises:
        ValueError: If the arrays do not belong together or are not in our format.
    """
    _check_format(group_size, bits)
    _check_native(w, scales, biases, group_size)
    n, k = w.shape[0], w.shape[1] * 8
    padded_n, padded_k = layout.padded(n, k)
    codes = mx.pad(_codes_of_words(w), [(0, padded_n - n), (0, padded_k - k)])
    order = layout.order_of_group(group_size)
    tiles = (padded_n // layout.TILE_N, padded_k // layout.TILE_K)
    stored = codes.reshape(_loaded_shape(order, tiles)).transpose(_permutation(order))
    return PackedWeight(
        words=_words_of_codes(stored.reshape(*tiles, -1)),
        scales=_interleave(scales, biases, padded_n, -(-padded_k // group_size)),
        n=n,
        k=k,
        group_size=group_size,
        bits=bits,
    )


def unpack(packed: PackedWeight) -> tuple[mx.array, mx.array, mx.array]:
    """Returns codes, scales and biases in MLX's layout: the exact inverse of `pack`."""
    order = layout.order_of_group(packed.group_size)
    tiles = packed.words.shape[:2]
    stored_shape = (*tiles, *(layout.SIZES[name] for name in layout.STORED))
    codes = _codes_of_words(packed.words).reshape(stored_shape)
    n, k = layout.padded(packed.n, packed.k)
    loaded = codes.transpose(_inverse(_permutation(order))).reshape(n, k)
    words = _words_of_codes(loaded[: packed.n, : packed.k])
    groups = packed.k // packed.group_size
    pairs = packed.scales.reshape(tiles[0], -1, 8, 4, 2).transpose(4, 0, 3, 2, 1)
    scales, biases = pairs.reshape(2, n, -1)[:, : packed.n, :groups]
    return words, scales, biases


def _quantize_symmetric(
    w: mx.array, group_size: int
) -> tuple[mx.array, mx.array, mx.array]:
    # The value of largest magnitude becomes -8 scales, so its sign decides the scale's.
    groups = w.astype(mx.float32).reshape(w.shape[0], -1, group_size)
    largest = mx.take_along_axis(
        groups, mx.abs(groups).argmax(-1, keepdims=True), axis=-1
    )
    scales = (largest / -8).astype(w.dtype)
    divisor = mx.where(scales == 0, 1, scales).astype(mx.float32)
    codes = mx.clip(mx.round(groups / divisor) + 8, 0, 15).astype(mx.uint8)
    scales = scales.squeeze(-1)
    return _words_of_codes(codes.reshape(w.shape)), scales, -8 * scales


def _interleave(
    scales: mx.array, biases: mx.array, padded_n: int, padded_groups: int
) -> mx.array:
    n, groups = scales.shape
    dtype = mx.result_type(scales, biases)
    pairs = mx.stack([scales.astype(dtype), biases.astype(dtype)])
    pairs = mx.pad(pairs, [(0, 0), (0, padded_n - n), (0, padded_groups - groups)])
    tiles = padded_n // layout.TILE_N
    digits = pairs.reshape(2, tiles, 4, 8, padded_groups).transpose(1, 4, 3, 2, 0)
    return digits.reshape(tiles, padded_groups, 2 * layout.TILE_N)


def _codes_of_words(words: mx.array) -> mx.array:
    pairs = words.view(mx.uint8)
    codes = mx.stack([pairs & 15, pairs >> 4], axis=-1)
    return codes.reshape(*words.shape[:-1], -1)


def _words_of_codes(codes: mx.array) -> mx.array:
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).view(mx.uint32)


def _loaded_shape(order: str, tiles: tuple[int, int]) -> tuple[int, ...]:
    row = (layout.SIZES[name] for name in layout.ROW)
    k = (layout.SIZES[name] for name in layout.K_DIGITS[order])
    return (tiles[0], *row, tiles[1], *k)


def _permutation(order: str) -> tuple[int, ...]:
    loaded = ("tile_n", *layout.ROW, "tile_k", *layout.K_DIGITS[order])
    return tuple(loaded.index(name) for name in ("tile_n", "tile_k", *layout.STORED))


def _inverse(permutation: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(permutation.index(axis) for axis in range(len(permutation)))


def _check_format(group_size: int, bits: int) -> None:
    group_sizes = format_of("affine", bits).group_sizes
    if group_size not in group_sizes:
        raise ValueError(f"group_size={group_size} is not one of {group_sizes}")


def _check_native(
    w: mx.array, scales: mx.array, biases: mx.array, group_size: int
) -> None:
    if w.ndim != 2 or w.dtype != mx.uint32 or prod(w.shape) == 0:
        raise ValueError(
            f"w must be a non-empty uint32 matrix [n, k / 8], "
            f"got {dtype_name(w.dtype)} with shape {w.shape}"
        )
    n, k = w.shape[0], w.shape[1] * 8
    if k % group_size:
        raise ValueError(f"w has k={k}, not a multiple of group_size={group_size}")
    for name, array in (("scales", scales), ("biases", biases)):
        expected = (n, k // group_size)
        if array.shape != expected or dtype_name(array.dtype) not in DTYPE_BYTES:
            raise ValueError(
                f"{name} must be one of {[*DTYPE_BYTES]} with shape {expected}, "
                f"got {dtype_name(array.dtype)} with shape {array.shape}"
            )


def dtype_name(dtype: mx.Dtype) -> str:
    """Returns "float16" for `mx.float16`: the name that plans know a dtype by."""
    return str(dtype).removeprefix("mlx.core.")
