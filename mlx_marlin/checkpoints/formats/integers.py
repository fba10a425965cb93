"""Integer codes of foreign formats, brought into rows of codes without rounding."""

import mlx.core as mx

from mlx_marlin.checkpoints.formats.column_order import order_of_columns, reordered
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.weights.bit_streams import codes_of_words


def integer_weight(
    words: mx.array,
    scales: mx.array,
    zeros: mx.array | None,
    *,
    bits: int,
    k: int,
    group_of_column: mx.array | None = None,
) -> StoredWeight:
    """Returns the weight `scales * (codes - zeros)`, which `checked` has to check.

    Args:
        words: Codes, uint32 [n, k * bits / 32], low code first, contiguous or not.
        scales: [n, groups], any float dtype.
        zeros: Zero points, integers [n, groups]; None for 2^(bits - 1) throughout.
        bits: Bits of a code.
        k: Columns.
        group_of_column: int32 [k] if columns are not in the order of their groups
            (act-order). Then columns are sorted by group, in stable order.

    Raises:
        ValueError: If the arrays do not fit each other, or a group of
            `group_of_column` has not k / groups columns.
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
    order = None
    if group_of_column is not None:
        order = order_of_columns(group_of_column, groups, k)
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

    Args:
        words: int32 or uint32 [..., ceil(count * bits / 32)], low bits first.
        bits: Bits of an integer.
        count: How many there are.

    Raises:
        ValueError: If there are more or fewer words than that, or of another dtype.
    """
    if words.dtype not in (mx.int32, mx.uint32) or not words.ndim:
        raise ValueError(f"words {words.dtype} {words.shape}, expected int32")
    needed = -(-count * bits // 32)
    if words.shape[-1] != needed:
        raise ValueError(f"{words.shape[-1]} words, expected {needed}")
    # Codes are read by runs that end where a word ends.
    padding = -needed % bits
    whole = mx.pad(words.view(mx.uint32), [(0, 0)] * (words.ndim - 1) + [(0, padding)])
    return codes_of_words(whole, bits)[..., :count]
