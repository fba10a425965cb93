"""Converts codes and scales between MLX's rows and packed tiles, by MLX operations.

This is the reference for the repack kernels, and the fallback where they do not run.
"""

from functools import reduce
from operator import or_

import mlx.core as mx

from mlx_marlin.weights import layout
from mlx_marlin.weights.bit_streams import bits_at, codes_of_words, words_of_codes
from mlx_marlin.weights.formats import planes_of


def tiles_of_rows(
    w: mx.array, n: int, k: int, *, bits: int, group_size: int
) -> mx.array:
    """Returns the codes of rows as tiles, padded with zeros.

    `w`: codes, uint32 [..., n, k * bits / 32]: one weight or a batch.
    """
    codes = codes_of_words(w, bits).reshape(*w.shape[:-2], n, k)
    return tiles_of_codes(codes, bits=bits, group_size=group_size)


def tiles_of_codes(codes: mx.array, *, bits: int, group_size: int) -> mx.array:
    """Returns unpacked codes as tiles, padded with zeros.

    `codes`: uint8 [..., n, k]: one weight or a batch.
    """
    *batch, n, k = codes.shape
    rows, columns = layout.padded(n, k)
    whole = [(0, 0)] * len(batch)
    codes = mx.pad(codes, [*whole, (0, rows - n), (0, columns - k)])
    order = layout.order_of_group(group_size)
    tiles = _store(codes.reshape(-1, columns), bits, order)
    return tiles.reshape(*batch, rows // layout.TILE_N, *tiles.shape[1:])


def rows_of_tiles(
    words: mx.array, n: int, k: int, *, bits: int, group_size: int
) -> mx.array:
    """Returns the codes of tiles as rows, the inverse of `tiles_of_rows`."""
    *batch, _, k_tiles, tile_words = words.shape
    order = layout.order_of_group(group_size)
    codes = _load(words.reshape(-1, k_tiles, tile_words), bits, order)
    whole = codes.reshape(*batch, *layout.padded(n, k))
    return words_of_codes(whole[..., :n, :k], bits)


def codes_at(
    words: mx.array, rows: mx.array, k: int, *, bits: int, group_size: int
) -> mx.array:
    """Returns the codes of some rows of one weight, without those of other rows.

    `words`: codes of tiles, uint32 [n tiles, k tiles, 64 * bits].
    `rows`: rows of the weight, integers [count].
    """
    order = layout.order_of_group(group_size)
    codes = mx.zeros((rows.size, k), mx.uint8)
    low = first = 0
    for plane_bits in planes_of(bits):
        end = first + layout.tile_words(plane_bits)
        plane = _plane_at(words[..., first:end], rows, plane_bits, order)
        codes = codes | plane[:, :k] << low
        low, first = low + plane_bits, end
    return codes


def _plane_at(words: mx.array, rows: mx.array, bits: int, order: str) -> mx.array:
    """Returns rows [count, padded k] of a plane; a row has whole words of a lane."""
    radix = layout.sizes(bits, order)
    of_word = layout.STORED[:-3]
    stored = words.reshape(*words.shape[:2], *(radix[name] for name in of_word))
    digit, rest = {}, rows % layout.TILE_N
    for name in reversed(layout.ROW):
        digit[name], rest = rest % radix[name], rest // radix[name]
    at = [digit.get(name, slice(None)) for name in of_word]
    # [count, k tiles, and the digits of of_word that are not the row's]
    own = stored[(rows // layout.TILE_N, slice(None), *at)]
    shared = radix["t_shared"]
    fragment = digit["fragment_shared"].astype(mx.uint32)[:, None, None]
    b = mx.arange(2, dtype=mx.uint32)[:, None]
    t = mx.arange(shared, dtype=mx.uint32)
    shifts = ((b * radix["fragment_shared"] + fragment) * shared + t) * bits
    places = shifts.reshape(rows.size, *[1] * (own.ndim - 1), 2, shared)
    codes = own[..., None, None] >> places & (1 << bits) - 1
    found = ["tile_k", *(name for name in of_word if name not in digit)]
    found += ["b", "t_shared"]
    wanted = ("tile_k", *layout.K_DIGITS)
    axes = [0, *(1 + found.index(name) for name in wanted)]
    return codes.transpose(axes).reshape(rows.size, -1).astype(mx.uint8)


def interleave(stored: list[mx.array], padded_n: int, padded_groups: int) -> mx.array:
    """Returns scales, or scales and biases, in the order of packed tiles.

    `stored`: arrays [..., n, groups] of one shape.
    """
    *batch, n, groups = stored[0].shape
    dtype = mx.result_type(*stored)
    factors = mx.stack([array.astype(dtype) for array in stored])
    whole = [(0, 0)] * (1 + len(batch))
    factors = mx.pad(factors, [*whole, (0, padded_n - n), (0, padded_groups - groups)])
    digits = factors.reshape(len(stored), -1, 4, 8, padded_groups)
    return digits.transpose(1, 4, 3, 2, 0).reshape(
        *batch, padded_n // layout.TILE_N, padded_groups, -1
    )


def deinterleave(scales: mx.array, n: int, groups: int, parameters: int) -> mx.array:
    """Returns scales and biases in MLX's order, [parameters, ..., n, groups]."""
    *batch, n_tiles, padded_groups, _ = scales.shape
    digits = scales.reshape(-1, padded_groups, 8, 4, parameters)
    factors = digits.transpose(4, 0, 3, 2, 1).reshape(
        parameters, *batch, n_tiles * layout.TILE_N, padded_groups
    )
    return factors[..., :n, :groups]


def _store(codes: mx.array, bits: int, order: str) -> mx.array:
    """Packs padded codes [n, k] into the planes of tiles."""
    n, k = codes.shape
    planes, low = [], 0
    for plane_bits in planes_of(bits):
        plane = codes if plane_bits == bits else bits_at(codes, low, plane_bits)
        digits = plane.reshape(_digits_shape(plane_bits, order, n, k))
        stored = digits.transpose(_permutation()).reshape(n // 32, k // 64, -1)
        planes.append(words_of_codes(stored, plane_bits))
        low += plane_bits
    return mx.concatenate(planes, axis=-1)


def _load(words: mx.array, bits: int, order: str) -> mx.array:
    """Unpacks padded codes [n, k], the inverse of `_store`."""
    tiles_n, tiles_k, _ = words.shape
    n, k = tiles_n * layout.TILE_N, tiles_k * layout.TILE_K
    planes, low, first = [], 0, 0
    for plane_bits in planes_of(bits):
        end = first + layout.tile_words(plane_bits)
        radix = layout.sizes(plane_bits, order)
        stored = codes_of_words(words[..., first:end], plane_bits).reshape(
            tiles_n, tiles_k, *(radix[name] for name in layout.STORED)
        )
        plane = stored.transpose(_inverse(_permutation())).reshape(n, k)
        planes.append(plane << low if low else plane)
        low, first = low + plane_bits, end
    return reduce(or_, planes)


def _digits_shape(bits: int, order: str, n: int, k: int) -> tuple[int, ...]:
    radix = layout.sizes(bits, order)
    row = (radix[name] for name in layout.ROW)
    column = (radix[name] for name in layout.K_DIGITS)
    return (n // layout.TILE_N, *row, k // layout.TILE_K, *column)


def _permutation() -> tuple[int, ...]:
    loaded = ("tile_n", *layout.ROW, "tile_k", *layout.K_DIGITS)
    return tuple(loaded.index(name) for name in ("tile_n", "tile_k", *layout.STORED))


def _inverse(permutation: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(permutation.index(axis) for axis in range(len(permutation)))
