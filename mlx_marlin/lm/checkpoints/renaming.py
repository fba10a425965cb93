"""Finds where mlx-lm's `sanitize` puts the rows of quantized weights.

`sanitize` is written for plain weights: it renames, stacks, splits and turns them, and
some models multiply them by numbers, none of which may happen to codes. So it runs
twice: on tags, which tell the rows of a weight wherever they are put, and on plain
weights, beside the decoded values of those whose rows did not stay as they were.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_marlin.checkpoints.folder import naming
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.lm.checkpoints.moved_rows import Rows, gathered, moved

Arrays = dict[str, mx.array]
Sanitize = Callable[[Arrays], Arrays]

COLUMNS = 4
"""Columns of a tag: an even number, because some models divide columns in two."""
CONSTANTS = (7919.0, 104_729.0)
"""The last columns of a tag: any factor or summand changes one of them."""
EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.(\w+)")
"""Layer of experts, number, projection and part, as Hugging Face's models have them."""
STACKED = ("switch_mlp", "experts.switch_glu", "experts")
"""Modules of mlx-lm's models that hold stacked experts."""


@dataclass(frozen=True, slots=True)
class Source:
    """A matrix of a checkpoint, or a batch of them, before it is renamed."""

    shape: tuple[int, ...]  # [..., n], without columns
    read: Callable[[str], StoredWeight] | None  # for a layer's name; None: it is plain


class Renamed(NamedTuple):
    """A checkpoint's parameters under mlx-lm's names."""

    weights: dict[str, StoredWeight]  # quantized weights of unchanged rows, by layer
    arrays: Arrays
    computed: set[str]  # arrays that were computed with values of quantized weights


def renamed(
    path: Path,
    sources: Mapping[str, Source],
    plain: Arrays,
    on_tags: Sanitize,
    on_values: Sanitize,
) -> Renamed:
    """Returns what `sanitize` makes of a checkpoint.

    `sources` are by layer; arrays of plain ones are in `plain` too. `on_tags` and
    `on_values` belong to two models, because `sanitize` may change its model.
    """
    if not sources:
        return Renamed({}, on_values(plain), set())
    layers, given = [*sources], [*sources.values()]
    places, computed = _places(sources, plain, on_tags)
    weights: dict[str, StoredWeight] = {}
    for layer, rows in sorted(places.items()):
        with naming(path, f"{layer}.weight"):
            own = {
                int(number): read(layer)
                for number in np.unique(rows.numbers)
                if (read := given[number].read) is not None
            }
            weight = moved(rows, own)
        if weight is None:
            computed.add(f"{layer}.weight")
        else:
            weights[layer] = weight
    whole = {layer: rows for layer, rows in places.items() if layer in weights}
    arrays = on_values(plain | _values(sources, whole))
    for layer in weights:
        arrays.pop(f"{layer}.weight", None)
    _move_biases(whole, layers, arrays)
    return Renamed(weights, arrays, computed & {*arrays})


def _places(
    sources: Mapping[str, Source], plain: Arrays, sanitize: Sanitize
) -> tuple[dict[str, Rows], set[str]]:
    """Returns where the rows of each layer are from, and what has no such rows."""
    # Copies, because some models change arrays in place.
    tagged = {name: mx.stop_gradient(array) for name, array in plain.items()}
    for number, (layer, source) in enumerate(sources.items()):
        rows = mx.arange(prod(source.shape)).reshape(source.shape)
        tagged[f"{layer}.weight"] = _tag(rows, mx.full(source.shape, number))
    places: dict[str, Rows] = {}
    computed: set[str] = set()
    given = [*sources.values()]
    outputs = sanitize(tagged)
    del tagged
    for name in [*outputs]:
        array = outputs.pop(name)
        if array.dtype != mx.complex64:
            continue
        found = _rows_of(array) if name.endswith(".weight") else None
        kinds = (
            {given[n].read is None for n in np.unique(found.numbers)} if found else ()
        )
        if found is None or len(kinds) > 1:
            computed.add(name)
        elif False in kinds:
            places[name.removesuffix(".weight")] = found
    return places, computed


def _tag(rows: mx.array, numbers: mx.array) -> mx.array:
    """Returns complex64 [..., 4], which only moves of whole rows leave consistent.

    Sums of rows change a hash, and sums with numbers or their products a constant.
    """
    real, imaginary = (
        mx.stack(
            [
                each.astype(mx.float32),
                (each.astype(mx.uint32) * 2_654_435_761 >> 8).astype(mx.float32),
                *(mx.full(each.shape, constant) for constant in CONSTANTS),
            ],
            axis=-1,
        ).astype(mx.complex64)
        for each in (rows, numbers)
    )
    return real + 1j * imaginary


def _rows_of(array: mx.array) -> Rows | None:
    """Returns the rows that tags tell; None if they are no longer consistent.

    A matrix that was turned is as it was: originals of GPT-2 have layers [k, n], but
    quantized ones have rows of k codes. Heads are turned because they compute so.
    """
    found = _unturned_rows_of(array)
    return _unturned_rows_of(array.T) if found is None and array.ndim == 2 else found


def _unturned_rows_of(array: mx.array) -> Rows | None:
    if array.ndim < 2 or array.shape[-1] != COLUMNS:
        return None
    first = array[..., 0]
    rows, numbers = mx.real(first).astype(mx.int32), mx.imag(first).astype(mx.int32)
    if not mx.array_equal(_tag(rows, numbers), array):
        return None
    flat = [np.array(each).reshape(-1).astype(np.int64) for each in (numbers, rows)]
    return Rows(tuple(first.shape), *flat)


def _values(sources: Mapping[str, Source], places: Mapping[str, Rows]) -> Arrays:
    """Returns the values of quantized weights, of which some rows have no place.

    The others are NaN, and so are those that a model drops and that cannot be read.
    """
    counts = np.zeros(len(sources), np.int64)
    target: dict[int, str] = {}
    for layer, rows in places.items():
        counts += np.bincount(rows.numbers, minlength=len(sources))
        target |= dict.fromkeys(np.unique(rows.numbers).tolist(), layer)
    values: Arrays = {}
    for number, (layer, source) in enumerate(sources.items()):
        if source.read is None:
            continue
        value = mx.full((*source.shape, COLUMNS), float("nan"))
        if counts[number] < prod(source.shape):
            with suppress(ValueError):
                value = source.read(target.get(number, layer)).values()
        values[f"{layer}.weight"] = value
    return values


def _move_biases(places: Mapping[str, Rows], layers: list[str], arrays: Arrays) -> None:
    """Moves the biases that `sanitize` has left where their weights were."""
    left: set[str] = set()
    for layer, rows in places.items():
        numbers = np.unique(rows.numbers).tolist()
        names = {number: f"{layers[number]}.bias" for number in numbers}
        own = {number: arrays[name] for number, name in names.items() if name in arrays}
        if f"{layer}.bias" not in names.values() and len(own) == len(names):
            flat = {number: bias[..., None] for number, bias in own.items()}
            arrays[f"{layer}.bias"] = gathered(rows, flat)[..., 0]
            left.update(names.values())
    for name in left:
        del arrays[name]


def stack(arrays: Arrays, layer: Callable[[str], Any]) -> Arrays:
    """Stacks experts that a model's `sanitize` has left as they are, in place."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for name in arrays:
        if (parts := EXPERT.fullmatch(name)) is not None:
            for stacked in STACKED:
                target = f"{parts[1]}.{stacked}.{parts[3]}"
                if layer(target) is not None:
                    found[f"{target}.{parts[4]}"][int(parts[2])] = name
    for target, names in found.items():
        own = [arrays.pop(names[expert]) for expert in sorted(names)]
        arrays[target] = mx.stack(own)
    return arrays
