"""Converts a checkpoint to our packed layout or to MLX's, one tensor at a time."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_marlin import regular_files
from mlx_marlin.checkpoints.folder import naming
from mlx_marlin.checkpoints.formats.marlin_folder import VERSION
from mlx_marlin.checkpoints.quantization import Quantization
from mlx_marlin.checkpoints.settings import without_settings
from mlx_marlin.checkpoints.stored_weight import (
    PackedLayer,
    StoredWeight,
    Written,
    mlx_target,
    packed_target,
)
from mlx_marlin.checkpoints.writing import Shards, new_folder
from mlx_marlin.lm.checkpoints.head_folder import head_of, keep_head
from mlx_marlin.lm.checkpoints.loading import check_written, is_of_mlx
from mlx_marlin.lm.checkpoints.model_source import ModelSource, description
from mlx_marlin.lm.known_layers import is_plain_heads
from mlx_marlin.weights.formats import MODE_DEFAULTS

Target = Callable[[StoredWeight | PackedLayer], Written]
TARGETS: dict[str, Target] = {"marlin": packed_target, "mlx": mlx_target}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of a parameter."""

    name: str  # Name in mlx-lm
    # Its format in the source, such as "zero_point 4-bit, group 128", or the type that
    # was decoded, such as "IQ2_XS"
    source: str
    target: str  # Its format in the result
    nbytes: int  # Bytes in the result
    error: float  # Relative Frobenius error that the conversion adds to the weight
    # Why a weight stays plain that a quantization was asked for; empty for parameters
    # that are never quantized, such as norms
    plain_because: str = ""


@dataclass
class Records:
    """Values of config.json that describe quantized layers."""

    # Records of layers in our layout
    marlin: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Records of layers in MLX's layout
    mlx: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Layers that stay on stock MLX
    stock_layers: list[str] = field(default_factory=list)


def convert(
    source: ModelSource,
    destination: Path,
    *,
    layout: str = "marlin",
    quantization: Quantization | None = None,
    only: str | None = None,
    dry_run: bool = False,
) -> Iterator[Row]:
    """Converts a checkpoint, and yields a row for each parameter once it is written.

    The files are written to a folder beside the destination, which gets the
    destination's name when all are complete. If anything fails, nothing is left.
    """
    pattern = check(destination, layout, only)
    _check_matches(source, pattern)
    _check_quantizes(source, pattern, quantization)
    records = Records()
    rows = _rows(source, layout, quantization, pattern, records)
    if dry_run:
        yield from (row for row, _ in rows)
        return
    with new_folder(destination) as folder:
        source.copy_other_files(folder)  # first, because it may refuse a file
        yield from _write(folder, rows)
        write_config(source.config, records, folder)
        if (head := head_of(source.path, source.model)) is not None:
            keep_head(head, folder)
        check_written(folder, destination)


def check(destination: Path, layout: str, only: str | None) -> re.Pattern[str] | None:
    """Checks arguments of `convert` before anything is read; returns the pattern."""
    if layout not in TARGETS:
        raise ValueError(f"layout={layout!r}, expected one of {[*TARGETS]}")
    if destination.exists():
        raise ValueError(f"{destination} exists, expected the name of a new folder")
    try:
        return None if only is None else re.compile(only)
    except re.error as error:
        raise ValueError(f"only={only!r} is not a pattern: {error}") from None


def _check_matches(source: ModelSource, pattern: re.Pattern[str] | None) -> None:
    """Raises a ValueError if a pattern matches no parameter of the model."""
    parameters: Any = tree_flatten(source.model.parameters())
    names = [name for name, _ in parameters]
    if pattern is not None and not any(map(pattern.search, names)):
        raise ValueError(
            f"only={pattern.pattern!r} matches no parameter of {source.path}, expected "
            f"a pattern of names such as {names[0]!r}"
        )


def _check_quantizes(
    source: ModelSource,
    pattern: re.Pattern[str] | None,
    quantization: Quantization | None,
) -> None:
    """Raises a ValueError if a quantization is asked for that no weight would get."""
    if quantization is None:
        return
    for name in source.plain_matrices():
        # `sanitize` renames others, so that nothing is known of them yet.
        is_known = source.layer(name.rpartition(".")[0]) is not None
        matches = pattern is None or pattern.search(name) is not None
        if not is_known or (matches and _quantization(source, name, quantization)):
            return
    raise ValueError(
        f"{source.path}: bits={quantization.bits} ({quantization.mode}) is for plain "
        f"weights, and all that were asked for are quantized already: convert the "
        f"plain original, or what `mlx_lm.convert --dequantize` makes of a folder in "
        f"MLX's layout, which keeps its errors; without bits, formats stay"
    )


def _rows(
    source: ModelSource,
    layout: str,
    quantization: Quantization | None,
    pattern: re.Pattern[str] | None,
    records: Records,
) -> Iterator[tuple[Row, dict[str, mx.array]]]:
    """Yields what becomes of each parameter, with its arrays by name."""
    for name, value in source.parameters():
        matches = pattern is None or pattern.search(name) is not None
        error = 0.0
        stored = description(value)
        if isinstance(value, StoredWeight) and value.original:
            stored, error = value.original, value.error
        if name in source.computed:
            stored, error = "quantized, decoded", source.computed[name]
        layer = name.removesuffix(".weight")
        with naming(source.path, name):
            if isinstance(value, mx.array):
                own = _quantization(source, name, quantization) if matches else ""
                if isinstance(own, str):
                    row = _unchanged(name, value, own)
                    yield replace(row, source=stored, error=error), {name: value}
                    continue
                value, added = own.apply(value)
                error = math.hypot(error, added)
            target = _layout_of(value, layout, keep=not matches)
            if _is_best_on_mlx(source.layer(layer)) and _is_of_mlx(value):
                target = "mlx"
            written = TARGETS[target](value)
        getattr(records, target)[layer] = written.record
        row = Row(
            name=name,
            source=stored,
            target=(
                f"{description(value)}, {target} layout{_order(source, layer, value)}"
            ),
            nbytes=sum(array.nbytes for array in written.arrays.values()),
            error=math.hypot(error, written.error),
        )
        arrays = {f"{layer}.{part}": array for part, array in written.arrays.items()}
        yield row, arrays


def _layout_of(value: StoredWeight | PackedLayer, layout: str, keep: bool) -> str:
    """Returns the layout that a layer gets: its own, if it has one, to keep it.

    Experts with global scales are always kept: the packed layout does not have them.
    """
    if isinstance(value, PackedLayer):
        return "marlin" if keep else layout
    is_scaled, is_linear = value.global_scale is not None, len(value.shape) == 2
    if not keep and (is_linear or not is_scaled):
        return layout
    is_of_mlx = value.mode in MODE_DEFAULTS and not (is_scaled and is_linear)
    return "mlx" if is_of_mlx else "marlin" if is_scaled else layout


def _is_best_on_mlx(layer: Any) -> bool:
    """Returns whether MLX's layout is best: rows are looked up or multiplied by."""
    return isinstance(layer, nn.Embedding) or is_plain_heads(layer)


def _is_of_mlx(value: StoredWeight | PackedLayer) -> bool:
    """Returns whether MLX has the format of a weight that is not packed."""
    return (
        isinstance(value, StoredWeight)
        and value.global_scale is None
        and is_of_mlx(value)
    )


def _unchanged(name: str, array: mx.array, reason: str) -> Row:
    dtype = description(array)
    return Row(
        name=name,
        source=dtype,
        target=dtype,
        nbytes=array.nbytes,
        error=0.0,
        plain_because=reason,
    )


def _quantization(
    source: ModelSource, name: str, wanted: Quantization | None
) -> Quantization | str:
    """Returns how a plain parameter is quantized, or why it stays as it is.

    The reason is empty for a parameter that is never quantized, such as a norm. The
    `quant_predicate` of mlx-lm's model can exclude a layer or set its format, such as
    8 bits for a router.
    """
    path = name.removesuffix(".weight")
    layer = source.layer(path)
    if wanted is None or path == name or not hasattr(layer, "to_quantized"):
        return ""
    is_end = isinstance(layer, nn.Embedding) or path.endswith("lm_head")
    if is_end and wanted.embedding_bits == 0:
        return "embeddings and the output head stay plain, as you asked"
    predicate = getattr(source.model, "quant_predicate", None)
    own = True if predicate is None else predicate(path, layer)
    if isinstance(own, dict):
        wanted = wanted.with_format(**own)
    if is_end and wanted.embedding_bits is not None:
        wanted = wanted.with_format(bits=wanted.embedding_bits)
    if not own:
        return "mlx-lm's model excludes it"
    k = layer.weight.shape[-1]
    if not wanted.applies_to(k):
        return f"{k} columns are no whole groups of {wanted.group_size}"
    return wanted


def _order(source: ModelSource, layer: str, value: StoredWeight | PackedLayer) -> str:
    """Returns what becomes of the order of columns that act-order gave a layer."""
    if value.input_order is not None:
        return ", x gathered"
    return ", order folded" if layer in source.folded else ""


def _write(
    folder: Path, rows: Iterator[tuple[Row, dict[str, mx.array]]]
) -> Iterator[Row]:
    with Shards(folder, {"format": "mlx"}) as shards:
        for row, arrays in rows:
            for name in [*arrays]:
                shards.add(name, arrays.pop(name))
            yield row


def write_config(config: dict[str, Any], records: Records, folder: Path) -> None:
    """Writes config.json: the model's own settings and the formats of its layers."""
    written = without_settings(config)
    written.pop("mlx_marlin", None)
    if records.mlx:
        written["quantization"] = _mlx_settings(records.mlx)
    if records.marlin or records.stock_layers:
        written["mlx_marlin"] = {"version": VERSION, "layers": records.marlin}
    if records.stock_layers:
        written["mlx_marlin"]["stock_layers"] = records.stock_layers
    text = json.dumps(written, indent=1, sort_keys=True)
    regular_files.write(folder / "config.json", text)


def _mlx_settings(layers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns mlx-lm's "quantization": the most frequent settings, and exceptions."""
    most = Counter(json.dumps(record, sort_keys=True) for record in layers.values())
    usual: dict[str, Any] = json.loads(most.most_common(1)[0][0])
    usual.pop("global_scale", None)  # which mlx-lm reads for single layers
    exceptions = {layer: record for layer, record in layers.items() if record != usual}
    return {**usual, **exceptions}
