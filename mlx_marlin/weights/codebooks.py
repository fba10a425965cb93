"""Codebooks: tables of 16 float32 numbers, which are stored in front of the scales.

Each 32 packed rows have the codebook of their weight, so that rows may be divided and
joined without it. It takes 32 elements of the scales' dtype: the bytes of the numbers
and, if scales are float32, as many zeros.
"""

import mlx.core as mx

from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import CODEBOOK, DTYPE_BYTES, TILE_N, Format

SMALLEST, LARGEST = 2.0**-64, 2.0**16
"""Magnitudes of numbers other than 0. Kernels add x times such numbers in float32 and
scale the sum of a group: larger ones would overflow, smaller ones count as 0, although
the scaled weight is an ordinary number."""


def checked(codebook: mx.array | None, format: Format) -> mx.array | None:
    """Returns a codebook of 16 floats as float32, exactly; None for other formats.

    Numbers that are not finite, or not between `SMALLEST` and `LARGEST`, are refused.
    """
    if (codebook is not None) != format.has_codebook:
        expected = "takes no codebook" if codebook is not None else "needs a codebook"
        raise ValueError(f"mode={format.mode!r} {expected}")
    if codebook is None:
        return None
    if codebook.shape != (CODEBOOK,) or dtype_name(codebook.dtype) not in DTYPE_BYTES:
        raise ValueError(
            f"codebook must be {CODEBOOK} floats, got {dtype_name(codebook.dtype)} "
            f"with shape {codebook.shape}"
        )
    if not mx.all(mx.isfinite(codebook)):
        raise ValueError("codebook has a number that is NaN or infinite")
    numbers = codebook.astype(mx.float32)
    sizes = mx.abs(numbers)
    wrong = (numbers != 0) & ((sizes < SMALLEST) | (sizes > LARGEST))
    if mx.any(wrong):
        raise ValueError(
            f"codebook has the number {numbers[mx.argmax(wrong)].item():g}, expected 0 "
            f"or magnitudes from {SMALLEST:.3g} to {LARGEST:.0f}: move a factor to the "
            f"scales"
        )
    return numbers


def prepend(codebook: mx.array, tiles: mx.array) -> mx.array:
    """Returns scales [..., n tiles, records, elements] with a codebook before them.

    [..., n tiles, 1, 32 + records * elements].
    """
    elements = mx.contiguous(codebook).view(tiles.dtype)
    elements = mx.pad(elements, (0, TILE_N - elements.size))
    shape = (*tiles.shape[:-2], 1)
    of_tiles = mx.broadcast_to(elements, (*shape, TILE_N))
    return mx.concatenate([of_tiles, tiles.reshape(*shape, -1)], axis=-1)


def scales(tiles: mx.array, format: Format, k: int, group_size: int) -> mx.array:
    """Returns the second argument of `prepend` from its result; k is padded."""
    records, elements = format.records(k, group_size)
    stored = tiles[..., TILE_N:]
    return stored.reshape(*tiles.shape[:-2], records, TILE_N * elements)


def tables(tiles: mx.array) -> mx.array:
    """Returns the codebooks of the tiles, float32 [..., n tiles, 16].

    They have no gradient.
    """
    elements = mx.contiguous(tiles[..., 0, :TILE_N]).view(mx.float32)
    return mx.stop_gradient(elements[..., :CODEBOOK])
