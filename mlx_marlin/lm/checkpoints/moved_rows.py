"""Puts rows of quantized weights together, exactly."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import gcd, prod
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.weights.bit_streams import codes_of_words, words_of_codes

MOST_SLICES = 64
"""Slices of each weight; more rows are gathered one by one."""
INTEGERS = {"symmetric", "zero_point"}


class Rows(NamedTuple):
    """Where the rows of an array [..., n, k] are from."""

    shape: tuple[int, ...]  # [..., n]
    numbers: npt.NDArray[np.int64]  # of the weight that a row is from
    rows: npt.NDArray[np.int64]  # of all matrices of that weight


def moved(rows: Rows, weights: Mapping[int, StoredWeight]) -> StoredWeight | None:
    """Returns the weight that rows of others make; None if no weight can hold them.

    Rows of integers with other bits, groups or zero points get those of the finest.

    Raises:
        ValueError: If the weights have columns in different orders.
    """
    alike = _united([*weights.values()])
    if alike is None:
        return None
    own = dict(zip(weights, alike, strict=True))
    order = _common_order(alike)
    is_scaled = any(weight.global_scale is not None for weight in alike)
    global_scale = _global_scale(rows, own) if is_scaled else None
    if is_scaled and global_scale is None:
        return None
    parts: dict[str, Any] = {
        part: gathered(rows, {n: getattr(weight, part) for n, weight in own.items()})
        for part in ("codes", "scales", "biases")
        if getattr(alike[0], part) is not None
    }
    return replace(alike[0], **parts, global_scale=global_scale, input_order=order)


def gathered(rows: Rows, arrays: Mapping[int, mx.array]) -> mx.array:
    """Returns rows of arrays [..., n, columns], by the numbers of the arrays."""
    flat = {n: a.reshape(-1, a.shape[-1]) for n, a in arrays.items()}
    steps = (np.diff(rows.numbers) != 0) | (np.diff(rows.rows) != 1)
    starts = [0, *(np.flatnonzero(steps) + 1).tolist()]
    if len(starts) > MOST_SLICES * len(flat):
        ends = np.cumsum([len(array) for array in flat.values()])
        first = dict(zip(flat, [0, *ends[:-1].tolist()], strict=True))
        places = np.vectorize(first.__getitem__)(rows.numbers) + rows.rows
        found = mx.concatenate([*flat.values()])[mx.array(places)]
    else:
        slices = []
        for start, end in zip(starts, [*starts[1:], len(rows.rows)], strict=True):
            array, row = flat[int(rows.numbers[start])], int(rows.rows[start])
            is_whole = end - start == len(array)
            slices.append(array if is_whole else array[row : row + end - start])
        found = slices[0] if len(slices) == 1 else mx.concatenate(slices)
    return found.reshape(*rows.shape, found.shape[-1])


def _united(weights: Sequence[StoredWeight]) -> list[StoredWeight] | None:
    """Returns the same weights in one format; None if there is none for all."""
    modes = {weight.mode for weight in weights}
    widths = {weight.bits for weight in weights}
    groups = {weight.group_size for weight in weights}
    dtypes = {weight.scales.dtype for weight in weights}
    if len({weight.shape[-1] for weight in weights}) > 1:
        return None
    if len(modes) == len(widths) == len(groups) == len(dtypes) == 1:
        return [*weights]
    if not modes <= INTEGERS and modes != {"affine"}:
        return None
    # Symmetric codes of other widths have other middles.
    is_alike = len(modes) == 1 and (modes != {"symmetric"} or len(widths) == 1)
    common = partial(
        _widened,
        mode=modes.pop() if is_alike else "zero_point",
        bits=max(widths),
        group_size=gcd(*groups),
        dtype=dtypes.pop() if len(dtypes) == 1 else mx.float32,
    )
    # More bits would hide zero points that are no codes.
    return [common(weight.checked()) for weight in weights]


def _widened(
    weight: StoredWeight, *, mode: str, bits: int, group_size: int, dtype: mx.Dtype
) -> StoredWeight:
    """Returns the same integers with more bits, in smaller groups, with zero points."""
    codes, scales, biases = weight.codes, weight.scales, weight.biases
    if bits != weight.bits:
        codes = words_of_codes(codes_of_words(codes, weight.bits), bits)
    if biases is None and mode == "zero_point":
        biases = mx.full(scales.shape, 2.0 ** (weight.bits - 1))
    times = weight.group_size // group_size
    if biases is not None:
        biases = mx.repeat(biases, times, axis=-1).astype(dtype)
    return replace(
        weight,
        codes=codes,
        scales=mx.repeat(scales, times, axis=-1).astype(dtype),
        biases=biases,
        mode=mode,
        bits=bits,
        group_size=group_size,
    )


def _common_order(weights: Sequence[StoredWeight]) -> mx.array | None:
    """Returns the order of columns that all weights have; None for that of x."""
    first, *others = (weight.input_order for weight in weights)
    in_order = mx.arange(weights[0].shape[-1], dtype=mx.int32)
    wanted = in_order if first is None else first
    for order in others:
        own = in_order if order is None else order
        if order is not first and not mx.array_equal(own, wanted):
            raise ValueError(
                "rows of one layer have columns in different orders (act-order), and "
                "all of them, such as experts, read the same features: quantize the "
                "model again without desc_act"
            )
    return first


def _global_scale(rows: Rows, weights: Mapping[int, StoredWeight]) -> mx.array | None:
    """Returns the scale of each matrix; None if rows of one have different scales."""
    scales: dict[int, mx.array] = {}
    for number, weight in weights.items():
        *batch, n = weight.codes.shape[:-1]
        own = weight.global_scale
        own = mx.ones(prod(batch)) if own is None else own.reshape(-1)
        scales[number] = mx.repeat(own, n)[:, None]
    found = gathered(rows, scales).reshape(-1, rows.shape[-1])
    return found[:, 0] if mx.all(found == found[:, :1]) else None
