"""Integer codes of foreign formats, brought into rows of codes without rounding."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import cast

import mlx.core as mx

from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.regular_files import quoted, short
from mlx_marlin.weights.bit_streams import codes_of_words

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


WHOLE_ROW = -1
"""The group size of a row with one scale, as the configs say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What a config says of layers of integers; None where it says nothing."""

    bits: int | None = None  # Bits of a code
    group_size: int | None = None  # Columns that share a scale, or `WHOLE_ROW`
    symmetric: bool | None = None  # Whether all zero points are 2^(bits - 1)
    # Whether columns may be in another order than their groups
    act_order: bool | None = None

    def __post_init__(self) -> None:
        for name in ("bits", "group_size"):
            size = getattr(self, name)
            is_row = name == "group_size" and size == WHOLE_ROW
            if size is not None and not is_row and (type(size) is not int or size < 1):
                raise ValueError(f"{name}={quoted(size)}, expected an integer from 1")
        for name in ("symmetric", "act_order"):
            if type(value := getattr(self, name)) not in (bool, type(None)):
                raise ValueError(f"{name}={quoted(value)}, expected true or false")

    def has(self, k: int, groups: int) -> bool:
        """Returns whether a row of k columns has so many groups."""
        if self.group_size is None:
            return True
        if self.group_size == WHOLE_ROW or self.group_size >= k:
            return groups == 1
        return groups * self.group_size == k


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The codes of a layer, what is beside them, and what the config says of them."""

    bits: int  # Bits of a code
    k: int  # Columns
    zeros: str | None  # Name of the array of zero points; None if there is none
    order: str | None  # Name of the array of the columns' groups; None if there is none
    symmetric: bool  # Whether the config says that all zero points are 2^(bits - 1)
    act_order: bool  # Whether the config allows another order of the columns

    def check_zeros(self, stored: mx.array, *middles: int) -> None:
        """Raises a ValueError if zero points of a symmetric layer are others."""
        if not any(mx.all(stored == middle).item() for middle in middles):
            raise ValueError(
                f"zero points {self.zeros!r} from {stored.min().item()} to "
                f"{stored.max().item()}, expected {middles[0]}: the config says that "
                f"weights are symmetric"
            )

    def column_order(self, folder: Folder, groups: int) -> mx.array | None:
        """Returns the columns sorted by group, int32 [k]; None if they are in order."""
        if self.order is None:
            return None
        order = order_of_columns(folder.read(self.order), groups, self.k)
        if order is not None and not self.act_order:
            raise ValueError(
                f"tensor {self.order!r} has columns in another order than their "
                f"groups, and the config says that there is no act-order"
            )
        return order


def layer_of(
    folder: Folder,
    schemes: Sequence[Scheme],
    *,
    zeros: str,
    order: str = "",
    widths: Sequence[tuple[int, int]],
    groups: int,
) -> Layer:
    """Returns what is beside the codes of a layer, once the config agrees with it.

    A config has a scheme for all layers, and perhaps others for some. The arrays of a
    layer tell which may be its own: one that its codes and scales fit.
    """
    fitting = {
        (bits, k): own
        for bits, k in widths
        if (own := [s for s in schemes if s.bits in (None, bits) and s.has(k, groups)])
    }
    if not fitting:
        _check_whole_groups(schemes, widths, groups)
    if len(fitting) != 1:
        said = sorted({f"{s.bits} bits in groups of {s.group_size}" for s in schemes})
        raise ValueError(
            f"{groups} scales a row, and codes of one of {[*widths]} (bits, k); the "
            f"config says {short(' or '.join(said))}, expected what fits one of them"
        )
    (((bits, k), own),) = fitting.items()
    symmetric = all(scheme.symmetric is True for scheme in own)
    if zeros not in folder.arrays and not symmetric:
        raise ValueError(
            f"tensor {zeros!r} is missing, expected zero points: the config does not "
            f"say that weights are symmetric"
        )
    is_needed = groups > 1 and any(scheme.act_order for scheme in own)
    if order and order not in folder.arrays and is_needed:
        raise ValueError(
            f"tensor {order!r} is missing, expected the groups of columns: the config "
            f"says that there is act-order, perhaps for other layers: quantize the "
            f"model again with act-order for all layers or none"
        )
    return Layer(
        bits=bits,
        k=k,
        zeros=zeros if zeros in folder.arrays else None,
        order=order if order in folder.arrays else None,
        symmetric=symmetric,
        act_order=any(scheme.act_order is not False for scheme in own),
    )


def _check_whole_groups(
    schemes: Sequence[Scheme], widths: Sequence[tuple[int, int]], groups: int
) -> None:
    """Raises a ValueError if the last group of a row is shorter than the others."""
    for scheme in schemes:
        size = scheme.group_size
        for bits, k in widths:
            if size is None or size == WHOLE_ROW or scheme.bits not in (None, bits):
                continue
            if k % size and groups == -(-k // size):
                raise ValueError(
                    f"k={k} is no multiple of group_size={size}, so that the last "
                    f"group of a row has {k % size} columns: quantize the model again "
                    f"with a group_size that divides {k}"
                )


def integer_weight(
    words: mx.array,
    scales: mx.array,
    zeros: mx.array | None,
    *,
    bits: int,
    k: int,
    order: mx.array | None = None,
) -> StoredWeight:
    """Returns the weight `scales * (codes - zeros)`, which `checked` has to check.

    `words`: codes, uint32 [n, k * bits / 32], low code first, contiguous or not.
    `scales`: [n, groups], any float dtype.
    `zeros`: zero points, integers [n, groups]; None for 2^(bits - 1) throughout.
    `order`: int32 [k], the columns sorted by group; None if they are in order.
    """
    n, groups = words.shape[0], scales.shape[-1]
    if not n or not groups or k % groups:
        raise ValueError(f"n={n} with {groups} groups, expected a divisor of k={k}")
    expected = (n, k * bits // 32)
    if words.shape != expected:
        raise ValueError(f"codes of shape {words.shape}, expected {expected}")
    for name, array in (("scales", scales), ("zero points", zeros)):
        if array is not None and array.shape != (n, groups):
            raise ValueError(f"{name} {array.shape}, expected {(n, groups)}")
    return StoredWeight(
        codes=mx.contiguous(words) if order is None else reordered(words, order, bits),
        scales=scales,
        biases=None if zeros is None else zeros.astype(scales.dtype),
        group_size=k // groups,
        bits=bits,
        mode="symmetric" if zeros is None else "zero_point",
        input_order=order,
    )


def columns_of_words(words: mx.array, bits: int, count: int) -> mx.array:
    """Returns integers that are packed along the last axis, uint8 [..., count].

    `words`: int32 or uint32 [..., ceil(count * bits / 32)], low bits first.
    """
    needed = -(-count * bits // 32)
    _check_words(words, needed)
    # Codes are read by runs that end where a word ends.
    padding = -needed % bits
    whole = mx.pad(words.view(mx.uint32), [(0, 0)] * (words.ndim - 1) + [(0, padding)])
    return codes_of_words(whole, bits)[..., :count]


def columns_of_padded_words(words: mx.array, bits: int, count: int) -> mx.array:
    """Returns what `columns_of_words` does if no integer crosses a word."""
    in_word = 32 // bits
    _check_words(words, -(-count // in_word))
    shifts = mx.arange(in_word, dtype=mx.uint32) * bits
    codes = (words.view(mx.uint32)[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.astype(mx.uint8).reshape(*words.shape[:-1], -1)[..., :count]


def _check_words(words: mx.array, needed: int) -> None:
    if words.dtype not in (mx.int32, mx.uint32) or not words.ndim:
        raise ValueError(f"words {words.dtype} {words.shape}, expected int32")
    if words.shape[-1] != needed:
        raise ValueError(f"{words.shape[-1]} words, expected {needed}")
