"""Some rows of a packed weight, decoded by MLX's operations."""

import mlx.core as mx

from mlx_marlin.products.reference.weight import decoded
from mlx_marlin.weights import codebooks, layout, super_blocks
from mlx_marlin.weights.bit_streams import words_of_codes
from mlx_marlin.weights.formats import TILE_N, format_of
from mlx_marlin.weights.packed_weight import PackedWeight
from mlx_marlin.weights.tile_conversion import codes_at, deinterleave


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
