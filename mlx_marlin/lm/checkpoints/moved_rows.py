"""Puts rows of quantized weights together, and in another order, exactly."""

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
Integers = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """Where the rows of an array [..., n, k] are from, as runs of following rows."""

    shape: tuple[int, ...]  # [..., n]
    numbers: Integers  # of the weight that a run is from
    first: Integers  # of the rows of all matrices of that weight
    lengths: Integers

    @classmethod
    def of(cls, shape: tuple[int, ...], numbers: Integers, rows: Integers) -> "Rows":
        """Returns the runs of rows of which each has a weight's number and a row."""
        steps = (np.diff(numbers) != 0) | (np.diff(rows) != 1)
        starts = np.concatenate([[0], np.flatnonzero(steps) + 1])
        lengths = np.diff(np.append(starts, len(rows)))
        return cls(shape, numbers[starts], rows[starts], lengths)

    @property
    def sources(self) -> list[int]:
        """The numbers of the weights that rows are from."""
        return [*map(int, np.unique(self.numbers))]


def moved(rows: Rows, weights: Mapping[int, StoredWeight]) -> StoredWeight | None:
    """Returns the weight that rows of others make; None if no weight can hold them.

    Rows of integers with other bits, groups or zero points get those of the finest.
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
    if len(rows.first) > MOST_SLICES * len(flat):
        ends = np.cumsum([len(array) for array in flat.values()])
        offsets = dict(zip(flat, ends - [len(a) for a in flat.values()], strict=True))
        starts = rows.first + [offsets[number] for number in rows.numbers.tolist()]
        before = np.cumsum(rows.lengths) - rows.lengths
        places = np.repeat(starts - before, rows.lengths) + np.arange(prod(rows.shape))
        found = mx.concatenate([*flat.values()])[mx.array(places)]
    else:
        runs = zip(*(each.tolist() for each in rows[1:]), strict=True)
        slices = [
            flat[number] if length == len(flat[number]) else flat[number][row:][:length]
            for number, row, length in runs
        ]
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


MODULES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text")
"""mlx-lm's modules whose MLP is down(f(gate(x), up(x))), with f by element.

A test compares each with its gathered form."""
PRODUCERS = ("gate_proj", "up_proj")
CONSUMER = "down_proj"


def fold_orders(
    weights: dict[str, StoredWeight], arrays: dict[str, mx.array], module: str
) -> set[str]:
    """Moves the rows of gate and up projections, and drops the order of down.

    Nothing is moved if gate or up takes x as it is: mlx-lm would put an adapter of the
    original model on such a layer, whose outputs are then in another order. It raises
    an error for a layer that gathers.

    Weights are by layer, other arrays by name, as mlx-lm has them; both are changed in
    place. Returns the down projections whose order was folded.
    """
    folded: set[str] = set()
    if module not in MODULES:
        return folded
    for layer, weight in [*weights.items()]:
        mlp, _, name = layer.rpartition(".mlp.")
        order = weight.input_order
        producers = [f"{mlp}.mlp.{part}" for part in PRODUCERS]
        if name != CONSUMER or order is None:
            continue
        if all(_can_move(weights, arrays, each, order.size) for each in producers):
            weights[layer] = replace(weight, input_order=None)
            for each in producers:
                _move(weights, arrays, each, order)
            folded.add(layer)
    return folded


def _can_move(
    weights: dict[str, StoredWeight], arrays: dict[str, mx.array], layer: str, rows: int
) -> bool:
    """Returns whether a layer gathers its own input and has so many outputs."""
    weight, bias = weights.get(layer), arrays.get(f"{layer}.bias")
    if weight is None or weight.input_order is None:
        return False
    return len(weight.codes) == rows and (bias is None or len(bias) == rows)


def _move(
    weights: dict[str, StoredWeight],
    arrays: dict[str, mx.array],
    layer: str,
    order: mx.array,
) -> None:
    weight = weights[layer]
    parts: dict[str, Any] = {
        part: mx.take(array, order, axis=0)
        for part in ("codes", "scales", "biases")
        if (array := getattr(weight, part)) is not None
    }
    weights[layer] = replace(weight, **parts)
    if (bias := arrays.get(f"{layer}.bias")) is not None:
        arrays[f"{layer}.bias"] = mx.take(bias, order, axis=0)
