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
import numpy.typing as npt

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
                number: read(layer)
                for number in rows.sources
                if (read := given[number].read) is not None
            }
            weight = moved(rows, own)
        if weight is None:
            computed.add(f"{layer}.weight")
        else:
            weights[layer] = weight
    whole = {layer: rows for layer, rows in places.items() if layer in weights}
    counts = np.zeros(len(sources), np.int64)
    for rows in whole.values():
        np.add.at(counts, rows.numbers, rows.lengths)
    placed = zip(sources.items(), counts, strict=True)
    done = {layer for (layer, own), count in placed if count >= prod(own.shape)}
    arrays = on_values(plain | _values(sources, whole, done))
    for layer in weights:
        arrays.pop(f"{layer}.weight", None)
    left = _move_biases(whole, layers, arrays)
    for layer in left & done:
        del arrays[f"{layer}.bias"]
    return Renamed(weights, arrays, computed & {*arrays})


def _places(
    sources: Mapping[str, Source], plain: Arrays, sanitize: Sanitize
) -> tuple[dict[str, Rows], set[str]]:
    """Returns where the rows of each layer are from, and what has no such rows."""
    given = [*sources.values()]
    # Copies, because some models change arrays in place.
    tagged = {name: mx.stop_gradient(array) for name, array in plain.items()}
    tables = {count: _table(count) for count in {prod(s.shape) for s in given}}
    for number, (layer, source) in enumerate(sources.items()):
        tags = tables[prod(source.shape)] + _number(number)
        tagged[f"{layer}.weight"] = tags.reshape(*source.shape, COLUMNS)
    places: dict[str, Rows] = {}
    computed: set[str] = set()
    outputs = sanitize(tagged)
    del tagged
    for name in [*outputs]:
        array = outputs.pop(name)
        if array.dtype != mx.complex64:
            continue
        found = _rows_of(array) if name.endswith(".weight") else None
        kinds = {given[n].read is None for n in found.sources} if found else ()
        if found is None or len(kinds) > 1:
            computed.add(name)
        elif False in kinds:
            places[name.removesuffix(".weight")] = found
    return places, computed


def _table(count: int) -> mx.array:
    """Returns the tags of rows 0, 1, … of weight 0, complex64 [count, 4].

    Real parts tell the row, imaginary ones the weight. Sums of rows change the hashes,
    products and sums with numbers the constants: only moves of whole rows change none.
    """
    rows = np.arange(count)
    constants = (np.full(count, constant) for constant in CONSTANTS)
    real = np.stack([rows, _hash(rows), *constants], axis=-1)
    return mx.array(real.astype(np.float32)).astype(mx.complex64)


def _number(number: int) -> mx.array:
    """Returns what makes of tags of weight 0 those of another one, complex64 [4]."""
    parts = (number, int(_hash(np.array(number))), *CONSTANTS)
    return mx.array([complex(0, part) for part in parts])


def _hash(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns integers of 24 bits, which float32 holds."""
    return (numbers.astype(np.uint32) * np.uint32(2_654_435_761)) >> np.uint32(8)


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
    tags = np.array(array).reshape(-1, COLUMNS)
    parts = [tags[:, 0].imag, tags[:, 0].real]
    with np.errstate(invalid="ignore"):  # NaN, which is no row
        numbers, rows = (part.astype(np.int64) for part in parts)
    hashes = _hash(rows) + 1j * _hash(numbers)
    constants = np.array(CONSTANTS, np.float32) * np.complex64(1 + 1j)
    is_same = (tags[:, 1] == hashes).all() and (tags[:, 2:] == constants).all()
    return Rows.of(array.shape[:-1], numbers, rows) if is_same else None


def _values(
    sources: Mapping[str, Source], places: Mapping[str, Rows], done: set[str]
) -> Arrays:
    """Returns the values of quantized weights, of which some rows have no place.

    The others are NaN, and so are those that a model drops and that cannot be read.
    """
    target: dict[int, str] = {}
    for layer, rows in places.items():
        target |= dict.fromkeys(rows.sources, layer)
    values: Arrays = {}
    for number, (layer, source) in enumerate(sources.items()):
        if source.read is None:
            continue
        value = mx.full((*source.shape, COLUMNS), float("nan"))
        if layer not in done:
            with suppress(ValueError):
                value = source.read(target.get(number, layer)).values()
        values[f"{layer}.weight"] = value
    return values


def _move_biases(
    places: Mapping[str, Rows], layers: list[str], arrays: Arrays
) -> set[str]:
    """Copies the biases that `sanitize` has left where their weights were.

    Returns the layers that these were of.
    """
    left: set[str] = set()
    for layer, rows in places.items():
        names = {number: f"{layers[number]}.bias" for number in rows.sources}
        own = {number: arrays[name] for number, name in names.items() if name in arrays}
        if f"{layer}.bias" not in names.values() and len(own) == len(names):
            flat = {number: bias[..., None] for number, bias in own.items()}
            arrays[f"{layer}.bias"] = gathered(rows, flat)[..., 0]
            left.update(layers[number] for number in rows.sources)
    return left


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
