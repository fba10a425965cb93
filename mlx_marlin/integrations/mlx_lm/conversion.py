"""Converts a checkpoint to our packed layout or to MLX's, one tensor at a time."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_marlin.checkpoints.folder import INDEX
from mlx_marlin.checkpoints.shards import Shards
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.checkpoints.targets import Written, mlx_target, packed_target
from mlx_marlin.integrations.mlx_lm.model_source import ModelSource

VERSION = 1
"""Of what config.json says under "mlx_marlin"."""
WEIGHT_FILES = ("*.safetensors", INDEX, "config.json", "quantize_config.json")
"""Files of a source that are not copied."""
MOST_PARTS = 5
"""Arrays that a parameter may become."""

Target = Callable[[StoredWeight], Written]
TARGETS: dict[str, Target] = {"marlin": packed_target, "mlx": mlx_target}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of a parameter.

    Attributes:
        name: Name in mlx-lm.
        source: Its format in the source, such as "zero_point 4-bit, group 128".
        target: Its format in the result.
        nbytes: Bytes in the result.
        error: Relative Frobenius error that the conversion adds to the weight.
    """

    name: str
    source: str
    target: str
    nbytes: int
    error: float


@dataclass
class _Records:
    """What config.json will say about quantized layers, by target layout."""

    marlin: dict[str, dict[str, Any]] = field(default_factory=dict)
    mlx: dict[str, dict[str, Any]] = field(default_factory=dict)


def convert(
    source: ModelSource,
    destination: Path,
    *,
    layout: str = "marlin",
    only: str | None = None,
    dry_run: bool = False,
) -> Iterator[Row]:
    """Converts a checkpoint, and yields a row for each parameter once it is written.

    The files are written to a folder beside the destination, which gets the
    destination's name when all are complete. If anything fails, nothing is left.

    Args:
        source: The checkpoint.
        destination: The folder to make; it must not exist.
        layout: "marlin" for our packed layout, "mlx" for MLX's.
        only: Pattern of the names of parameters to convert. Weights of MLX that do not
            match stay as they are.
        dry_run: Write nothing.

    Raises:
        OSError: If a file cannot be read or written.
        ValueError: If an argument is not valid, or a weight cannot be represented; the
            message names the tensor.
    """
    if layout not in TARGETS:
        raise ValueError(f"layout={layout!r}, expected one of {[*TARGETS]}")
    pattern = _pattern(only)
    if destination.exists():
        raise ValueError(f"{destination} exists, expected the name of a new folder")
    records = _Records()
    rows = _rows(source, layout, pattern, records)
    if dry_run:
        yield from (row for row, _ in rows)
        return
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed
    partial.mkdir(parents=True)
    try:
        yield from _write(source, partial, rows)
        _write_config(source.config, records, partial)
        _copy_other_files(source.path, partial)
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _pattern(only: str | None) -> re.Pattern[str] | None:
    try:
        return None if only is None else re.compile(only)
    except re.error as error:
        raise ValueError(f"only={only!r} is not a pattern: {error}") from None


def _rows(
    source: ModelSource,
    layout: str,
    pattern: re.Pattern[str] | None,
    records: _Records,
) -> Iterator[tuple[Row, dict[str, mx.array]]]:
    """Yields what becomes of each parameter, with its arrays by name."""
    for name, value in source.parameters():
        if isinstance(value, mx.array):
            stored = str(value.dtype).removeprefix("mlx.core.")
            row = Row(
                name=name, source=stored, target=stored, nbytes=value.nbytes, error=0.0
            )
            yield row, {name: value}
            continue
        layer = name.removesuffix(".weight")
        own = layout
        if pattern is not None and not pattern.search(name):
            own = "mlx" if value.mode in ("affine", *MODES_OF_BYTES) else layout
        try:
            written = TARGETS[own](value)
        except ValueError as error:
            raise ValueError(f"{source.path}: tensor {name!r}: {error}") from error
        getattr(records, own)[layer] = written.record
        yield (
            Row(
                name=name,
                source=_describe(value.mode, value.bits, value.group_size),
                target=f"{_describe_record(written.record)}, {own} layout",
                nbytes=sum(array.nbytes for array in written.arrays.values()),
                error=written.error,
            ),
            {f"{layer}.{part}": array for part, array in written.arrays.items()},
        )


MODES_OF_BYTES = ("mxfp4", "mxfp8", "nvfp4")
"""Modes of MLX whose scales are bytes."""


def _describe(mode: str, bits: int, group_size: int) -> str:
    return f"{mode} {bits}-bit, group {group_size}"


def _describe_record(record: dict[str, Any]) -> str:
    return _describe(record["mode"], record["bits"], record["group_size"])


def _write(
    source: ModelSource,
    folder: Path,
    rows: Iterator[tuple[Row, dict[str, mx.array]]],
) -> Iterator[Row]:
    names = [name for name in source.names() for _ in range(MOST_PARTS)]
    with Shards(folder, names, {"format": "mlx"}) as shards:
        for row, arrays in rows:
            for name in [*arrays]:
                shards.add(name, arrays.pop(name))
            yield row


def _write_config(config: dict[str, Any], records: _Records, folder: Path) -> None:
    settings = ("quantization", "quantization_config", "mlx_marlin")
    written = {key: value for key, value in config.items() if key not in settings}
    if records.mlx:
        written["quantization"] = _mlx_settings(records.mlx)
    if records.marlin:
        written["mlx_marlin"] = {"version": VERSION, "layers": records.marlin}
    (folder / "config.json").write_text(json.dumps(written, indent=1, sort_keys=True))


def _mlx_settings(layers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns mlx-lm's "quantization": the most frequent settings, and exceptions."""
    most = Counter(json.dumps(record, sort_keys=True) for record in layers.values())
    usual: dict[str, Any] = json.loads(most.most_common(1)[0][0])
    exceptions = {layer: record for layer, record in layers.items() if record != usual}
    return {**usual, **exceptions}


def _copy_other_files(source: Path, folder: Path) -> None:
    """Copies the tokenizer, the licence and whatever else lies beside the weights."""
    for file in source.iterdir():
        if file.is_file() and not any(map(file.match, WEIGHT_FILES)):
            shutil.copyfile(file, folder / file.name)
