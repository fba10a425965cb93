"""`verify`: compares every quantized layer of a model with float64 and its source."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin import regular_files
from mlx_marlin.argument_types import is_integer
from mlx_marlin.backends import selection
from mlx_marlin.checkpoints.folder import naming, read_json
from mlx_marlin.checkpoints.formats.marlin_folder import VERSION, stock_layers_of
from mlx_marlin.checkpoints.location import gguf_file
from mlx_marlin.layers.guarded_parameters import activation_dtype
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load, load_model
from mlx_marlin.lm.checkpoints.model_source import ModelSource
from mlx_marlin.lm.layer_conversion import keep_on_stock
from mlx_marlin.lm.verification.comparison import compare
from mlx_marlin.lm.verification.inputs import (
    Capture,
    on_back_end,
    passes,
    perplexity,
    random_activations,
    windows,
)
from mlx_marlin.lm.verification.layers import (
    CheckedLayer,
    ExactWeight,
    checked_layers,
    with_our_layers,
)
from mlx_marlin.lm.verification.report import LayerReport, Perplexities, Report
from mlx_marlin.progress import bar

MOST_ROWS = 4096
"""Largest number of rows of activations."""


def verify(
    model: str | Path | nn.Module,
    against: str | Path | None = None,
    *,
    text: str | None = None,
    tokenizer: Any = None,
    rows: Sequence[int] = (1, 8, 32),
    seed: int = 0,
    apply: bool = False,
    progress: bool = False,
) -> Report:
    """Compares the results of a model's quantized layers with exact ones.

    Every linear layer, embedding and layer of experts or heads is computed for random
    activations, and compared with the product of its decoded weights in float64. With a
    source, its weights and results are also compared with those of the source. Limits
    follow from dtype, k and, for a source that is not quantized, bits.

    Args:
        model: A checkpoint that `load` reads, whose layers are converted by `optimize`;
            or a model.
        against: The checkpoint that the model was made from, plain or quantized. One
            weight of it is in memory at a time.
        text: A text, whose activations are used too. The perplexities of the source, or
            of stock MLX with the same weights, and of the model are computed on it.
            That of the source needs memory for the whole source.
        tokenizer: The tokenizer of a model that is not a checkpoint, for `text`.
        rows: Numbers of rows of activations, which decide which kernels are used.
        seed: Seed of the random activations.
        apply: Let layers with an error above a limit stay on stock MLX: those of a
            model are converted in place; for a folder, config.json lists them, and
            `load` converts them.
        progress: Show a progress bar; needs tqdm.

    Returns:
        The errors of each layer. `print(report)` shows them.

    Raises:
        ImportError: If mlx-lm is not installed.
        OSError: If a file is missing or cannot be read or written.
        TypeError: If an argument has a wrong type.
        ValueError: If an argument or a file is not valid, the model has no quantized
            layer, or the source is not one of this model.
    """
    check(model, text, tokenizer, rows, seed, apply)
    source = None if against is None else open_source(against)
    subject, tokenizer = _opened(model, tokenizer)
    layers = [*checked_layers(subject)]
    quantized = list(dict.fromkeys(each.name for each in layers if each.is_quantized))
    if not quantized:
        raise ValueError(f"model={_shown(model)} has no quantized layer to verify")
    tokens = None if text is None else windows(text, tokenizer)
    capture = Capture(layers, max(rows))
    if tokens is not None:
        capture.run(subject, tokens.reshape(1, -1)[:, : max(rows)])
    dtype = activation_dtype(subject)

    def compared(layer: CheckedLayer, of_source: ExactWeight | None) -> LayerReport:
        weight, captured = layer.weight(), capture.of(layer)
        if of_source is not None and of_source.shape != weight.shape:
            raise ValueError(
                f"shape {of_source.shape} (matrices, n, k), expected {weight.shape} as "
                f"in the model"
            )
        drawn = random_activations(layer, weight, max(rows), dtype, seed)
        inputs = [drawn] if captured is None else [drawn, captured]
        return compare(layer, weight, inputs, rows, of_source)

    reports = _reports(layers, source, compared)
    found = [*_with_progress(reports, len(quantized), progress)]
    order = {(each.name, each.operation): i for i, each in enumerate(layers)}
    found.sort(key=lambda report: order[report.name, report.operation])
    report = Report(
        backend=selection.backend(),
        seed=seed,
        layers=tuple(found),
        without_source=_missing(quantized, found),
        perplexity=None
        if tokens is None
        else _perplexities(subject, source, tokens, progress),
    )
    return _applied(report, subject, model) if apply else report


def _reports(
    layers: Sequence[CheckedLayer],
    source: ModelSource | None,
    compared: Callable[[CheckedLayer, ExactWeight | None], LayerReport],
) -> Iterator[LayerReport]:
    """Yields a report for each layer that was quantized in the model or source."""
    if source is None:
        yield from (compared(each, None) for each in layers if each.is_quantized)
        return
    quantized = {each.name for each in layers if each.is_quantized}
    for name, value in source.parameters():
        path, _, part = name.rpartition(".")
        weight = ExactWeight(value) if part == "weight" else None
        if weight is not None and (weight.is_quantized or path in quantized):
            with naming(source.path, name):
                for layer in layers:
                    if layer.name == path:
                        yield compared(layer, weight)
        del weight, value  # before the next one is read


def check(
    model: object,
    text: object,
    tokenizer: object,
    rows: Sequence[int],
    seed: int,
    apply: bool,
) -> None:
    """Checks the arguments of `verify` before anything is read."""
    if not isinstance(model, str | Path | nn.Module):
        raise TypeError(
            f"model must be a path or an nn.Module, got {type(model).__name__}"
        )
    if text is not None and not isinstance(text, str):
        raise TypeError(f"text must be a str, got {type(text).__name__}")
    if isinstance(rows, str) or not rows or not all(map(_is_count, rows)):
        raise ValueError(f"rows={rows!r}, expected integers from 1 to {MOST_ROWS}")
    if not is_integer(seed) or seed < 0:
        raise ValueError(f"seed={seed!r}, expected an integer from 0")
    if isinstance(model, nn.Module):
        if text is not None and tokenizer is None:
            raise ValueError("tokenizer=None, expected one, which text needs")
        return
    if apply and gguf_file(Path(model)) is not None:
        raise ValueError(
            f"apply=True: {model} is a GGUF file, which cannot say what stays on stock "
            f"MLX, expected a folder (mlx-marlin convert makes one)"
        )
    if apply and Path(model).is_dir() and not os.access(model, os.W_OK):
        raise PermissionError(f"apply=True: {model} cannot be written")


def _is_count(number: object) -> bool:
    return type(number) is int and 1 <= number <= MOST_ROWS


def _opened(model: str | Path | nn.Module, tokenizer: Any) -> tuple[nn.Module, Any]:
    """Returns a model and its tokenizer; that of a checkpoint has layers of ours."""
    if isinstance(model, nn.Module):
        return model, tokenizer
    loaded, own = load(model)
    return with_our_layers(loaded), own if tokenizer is None else tokenizer


def _shown(model: object) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else f"{model}"


def _missing(quantized: Iterable[str], found: Sequence[LayerReport]) -> tuple[str, ...]:
    """Returns the quantized layers without a report: the source does not have them."""
    compared = {report.name for report in found}
    missing = tuple(name for name in quantized if name not in compared)
    if not compared:
        raise ValueError(
            f"against: the source has no weight of the model's layers, such as "
            f"{missing[0]!r}"
        )
    return missing


def _with_progress(
    reports: Iterator[LayerReport], total: int, progress: bool
) -> Iterator[LayerReport]:
    """Yields reports, with a progress bar of so many layers if `progress` is true."""
    with bar("verify", "layer", total if progress else 0) as steps:
        last = ""
        for report in reports:
            if report.name != last:
                steps.update()
            last = report.name
            yield report


def _perplexities(
    model: nn.Module, source: ModelSource | None, tokens: mx.array, progress: bool
) -> Perplexities:
    total = 2 * passes(tokens[:, 1:]) if progress else 0
    with bar("perplexity", "pass", total) as steps:
        after = perplexity(model, tokens, steps.update)
        if source is not None:
            before = perplexity(load_model(source), tokens, steps.update)
        else:
            with on_back_end("stock"):
                before = perplexity(model, tokens, steps.update)
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    return Perplexities(before=before, after=after, tokens=count)


def _applied(report: Report, model: nn.Module, given: object) -> Report:
    """Moves the layers that failed to stock MLX, if they are ours and MLX has them."""
    ours = {layer.name for layer in report.layers if layer.is_ours}
    moved, not_moved = [], []
    for name in report.failed:
        if name not in ours:
            continue
        try:
            keep_on_stock(model, [name])
        except ValueError as error:
            not_moved.append(f"{name}: {error}")
        else:
            moved.append(name)
    if moved and isinstance(given, str | Path):
        record_stock_layers(Path(given), moved)
    return replace(report, moved=tuple(moved), not_moved=tuple(not_moved))


def record_stock_layers(folder: Path, names: Collection[str]) -> None:
    """Adds layers to those that `load` keeps on stock MLX.

    They become `config["mlx_marlin"]["stock_layers"]`. The file is replaced in one
    step, so that it is never incomplete.
    """
    file = folder / "config.json"
    config = read_json(file)
    all_names = dict.fromkeys([*stock_layers_of(config, folder), *names])
    ours = config.get("mlx_marlin") or {"version": VERSION, "layers": {}}
    config["mlx_marlin"] = ours | {"stock_layers": [*all_names]}
    with tempfile.NamedTemporaryFile(
        "w", dir=folder, prefix=".config.", suffix=".json", delete=False
    ) as new:
        try:
            with regular_files.named(new.name):
                new.write(json.dumps(config, indent=1))
                new.flush()
                os.fsync(new.fileno())
            shutil.copymode(file, new.name)
            os.replace(new.name, file)
        except BaseException:
            Path(new.name).unlink(missing_ok=True)
            raise
