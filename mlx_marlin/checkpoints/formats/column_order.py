"""The order of columns by group, which act-order checkpoints need (`g_idx`)."""

from math import gcd
from typing import cast

import mlx.core as mx

CHUNK_CODES = 2**22
"""Codes that are unpacked at a time, which bounds the memory."""


def order_of_columns(group_of_column: mx.array, groups: int, k: int) -> mx.array | None:
    """Returns the columns sorted by group, int32 [k]; None if they are in order."""
    dtype = group_of_column.dtype
    if group_of_column.shape != (k,) or not mx.issubdtype(dtype, mx.integer):
        raise ValueError(
            f"g_idx {dtype} {group_of_column.shape}, expected integers {(k,)}"
        )
    low, high = (cast(int, f(group_of_column).item()) for f in (mx.min, mx.max))
    if low < 0 or high >= groups:
        raise ValueError(f"g_idx from {low} to {high}, expected 0 to {groups - 1}")
    members = mx.zeros((groups,), mx.int32).at[group_of_column].add(1)
    if not mx.all(members == k // groups):
        raise ValueError(
            f"g_idx has groups of {members.min().item()} to {members.max().item()} "
            f"columns, expected {k // groups} in each"
        )
    in_order = mx.repeat(mx.arange(groups, dtype=mx.int32), k // groups)
    if mx.array_equal(group_of_column, in_order):
        return None
    # MLX's sort is not documented to be stable: ties are broken by the column.
    key = group_of_column.astype(mx.int64) * k + mx.arange(k, dtype=mx.int64)
    return mx.argsort(key).astype(mx.int32)


def reordered(words: mx.array, order: mx.array, bits: int) -> mx.array:
    """Returns rows of codes with their columns in another order.

    Codes are gathered while k is their first axis: then the gather copies whole rows,
    and codes at the same place of a word are unpacked by one operation.

    `words`: codes, uint32 [n, k * bits / 32], low code first; fastest if it is the
    transpose of a contiguous array.
    `order`: int32 [k], the column that becomes column i.
    """
    step = max(CHUNK_CODES // order.size, 1)
    chunks: list[mx.array] = []
    for first in range(0, len(words), step):
        own = words[first : first + step]
        # Otherwise MLX computes chunks at the same time, which takes the memory of all.
        own = mx.depends(own, chunks[-1:])
        columns = mx.contiguous(own.T)
        codes = mx.take(_codes_of_columns(columns, bits), order, axis=0)
        chunks.append(mx.contiguous(_columns_of_codes(codes, bits).T))
    return mx.concatenate(chunks)


def _codes_of_columns(words: mx.array, bits: int) -> mx.array:
    """Unpacks streams along the first axis: uint32 [words, n] into uint8 [codes, n]."""
    span, positions = _positions(bits)
    runs = words.reshape(-1, span, words.shape[-1])
    codes = []
    for word, shift in positions:
        code = runs[:, word] >> shift
        if shift + bits > 32:
            code = code | runs[:, word + 1] << 32 - shift
        codes.append((code & (1 << bits) - 1).astype(mx.uint8))
    return mx.stack(codes, axis=1).reshape(-1, words.shape[-1])


def _columns_of_codes(codes: mx.array, bits: int) -> mx.array:
    """Packs codes along the first axis: the inverse of `_codes_of_columns`."""
    span, positions = _positions(bits)
    runs = codes.reshape(-1, len(positions), codes.shape[-1])
    words = [mx.zeros_like(runs[:, 0], dtype=mx.uint32)] * span
    for index, (word, shift) in enumerate(positions):
        code = runs[:, index].astype(mx.uint32)
        words[word] = words[word] | code << shift
        if shift + bits > 32:
            words[word + 1] = words[word + 1] | code >> 32 - shift
    return mx.stack(words, axis=1).reshape(-1, codes.shape[-1])


def _positions(bits: int) -> tuple[int, list[tuple[int, int]]]:
    """Returns the least words that whole codes fill, and the word and bit of each."""
    span = bits // gcd(bits, 32)
    return span, [divmod(bits * index, 32) for index in range(span * 32 // bits)]
