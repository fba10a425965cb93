"""Parameters of GGUF's K-quants: bytes of groups, and the factors of a super-block.

A row of w has a record for each super-block of 256 columns, in words of 16 bits. First
the groups' bytes, low byte first: scale and minimum of each group if codes are affine,
else a signed scale. Scale and minimum of a group of 16 are the lower and the upper half
of a byte. Then the float16 bits of d and dmin, or of d.
"""

import mlx.core as mx

from mlx_marlin.weights import layout
from mlx_marlin.weights.formats import SUPER_BLOCK, Format
from mlx_marlin.weights.tile_conversion import deinterleave, interleave


def to_tiles(rows: mx.array, format: Format, group_size: int) -> mx.array:
    """Returns the parameters of rows in the order of packed tiles.

    `rows`: uint16 [..., n, k / 256 * words of a record].
    """
    groups, factors = _apart(rows, format, group_size)
    n, _ = layout.padded(rows.shape[-2], SUPER_BLOCK)
    blocks = factors[0].shape[-1]
    octets = interleave(groups, n, groups[0].shape[-1])
    words = octets.reshape(*octets.shape[:-2], blocks, -1).view(mx.uint16)
    return mx.concatenate([words, interleave(factors, n, blocks)], axis=-1)


def to_rows(tiles: mx.array, n: int, format: Format, group_size: int) -> mx.array:
    """Returns the parameters of n rows, the inverse of `to_tiles`."""
    size, per_block = format.group_bytes(group_size), SUPER_BLOCK // group_size
    *batch, blocks, _ = tiles.shape
    of_groups = size * per_block * layout.TILE_N // 2
    octets = mx.contiguous(tiles[..., :of_groups]).view(mx.uint8)
    octets = octets.reshape(*batch, blocks * per_block, -1)
    # [bytes of a group, ..., n, groups] and [parameters, ..., n, blocks]
    groups = deinterleave(octets, n, blocks * per_block, size)
    factors = deinterleave(tiles[..., of_groups:], n, blocks, format.parameters)
    lead = groups.shape[1:-1]
    pairs = mx.moveaxis(groups.reshape(size, *lead, blocks, per_block), 0, -1)
    words = mx.contiguous(pairs).reshape(*lead, blocks, -1).view(mx.uint16)
    record = mx.concatenate([words, mx.moveaxis(factors, 0, -1)], axis=-1)
    return record.reshape(*lead, -1)


def float_parameters(
    rows: mx.array, format: Format, group_size: int
) -> tuple[mx.array, mx.array | None]:
    """Returns the float32 scales of groups, and their biases if codes are affine.

    The products are exact: a float16 times an integer of 8 bits fits in a float32.
    """
    groups, factors = _apart(rows, format, group_size)
    per_block = SUPER_BLOCK // group_size
    wide = [
        mx.repeat(bits.view(mx.float16).astype(mx.float32), per_block, axis=-1)
        for bits in factors
    ]
    if format.parameters == 1:
        return wide[0] * groups[0].view(mx.int8).astype(mx.float32), None
    both = groups if len(groups) == 2 else [groups[0] & 15, groups[0] >> 4]
    scales, minima = (octets.astype(mx.float32) for octets in both)
    return wide[0] * scales, -wide[1] * minima


def factors_of(rows: mx.array, format: Format, group_size: int) -> mx.array:
    """Returns the float16 factors of super-blocks, [d and perhaps dmin, ...]."""
    return mx.stack(_apart(rows, format, group_size)[1]).view(mx.float16)


def _apart(
    rows: mx.array, format: Format, group_size: int
) -> tuple[list[mx.array], list[mx.array]]:
    """Returns the bytes of groups, each [..., groups], and factors [..., blocks]."""
    _, words = format.records(SUPER_BLOCK, group_size)
    parameters, size = format.parameters, format.group_bytes(group_size)
    records = rows.reshape(*rows.shape[:-1], -1, words)
    octets = mx.contiguous(records[..., :-parameters]).view(mx.uint8)
    octets = octets.reshape(*rows.shape[:-1], -1, size)
    groups = [mx.contiguous(octets[..., i]) for i in range(size)]
    factors = [
        mx.contiguous(records[..., words - parameters + i]) for i in range(parameters)
    ]
    return groups, factors
