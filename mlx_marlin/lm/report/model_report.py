"""`report`: who serves each layer of a model, how long it takes, and why not us.

Every time of the text says in its own cell or line where it comes from: "predicted" or
"measured". `optimize(model, dry_run=True)` returns such a report without rows: what
becomes of each layer and block.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from itertools import starmap
from typing import Any, NamedTuple

import mlx.nn as nn

from mlx_marlin.backends import selection
from mlx_marlin.lm.float16 import Float16Outcome
from mlx_marlin.lm.layer_conversion import LayerConversion
from mlx_marlin.lm.module_tree import check_model, common_path, pattern
from mlx_marlin.lm.race.settings import name_of
from mlx_marlin.lm.recipe import Recipe, resolve
from mlx_marlin.lm.report.decisions import Decision, cells, decide
from mlx_marlin.lm.report.layer_uses import DEFAULTS, LayerUse, Target, uses_of
from mlx_marlin.tables import Table, Value, aligned, printed
from mlx_marlin.weights.dtypes import dtype_name

SCHEMA = "mlx_marlin.report"
VERSION = 1
"""Version of the schema. It changes if a field is removed or changes its meaning."""
GROUP = ("layer", "count", "product", "format", "layout")
"""Columns that say which layers several lines are of."""
HEADS = ("layer", "count", "is", "optimize", "layout", "why not")
BLOCK_HEADS = ("block", "count", "is", "optimize", "why not")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """What becomes of equal layers, and who serves them."""

    use: LayerUse  # The layers and what they compute
    # Who serves it, for each number of rows; empty without rows, or if the layers have
    # no quantized product
    decisions: tuple[Decision, ...] = ()


class BlockOutcome(NamedTuple):
    """What `trace=True` does with a decoder block."""

    name: str  # The path of the block
    block: str  # The name of its class
    reason: str | None  # Why it runs its own code; None if it is traced


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report on a model. `str` returns it as tables.

    Attributes:
        target: What the report decides for.
        backend: The back end of this process; None if a chip was named.
        rows: The numbers of rows; none if `optimize(dry_run=True)` has returned it.
        layers: The layers of the model; equal ones at corresponding paths are one.
        recipe: The options of `optimize`, and where each is from; None if a chip was
            named.
        float16: What `compute="float16"` converts; None without it.
        blocks: Each decoder block, if blocks are to be traced.
    """

    target: Target
    backend: str | None
    rows: tuple[int, ...]
    layers: tuple[LayerReport, ...]
    recipe: Recipe | None = None
    float16: Float16Outcome | None = None
    blocks: tuple[BlockOutcome, ...] = ()

    @property
    def tuned(self) -> str | None:
        """The settings that `mlx-marlin tune` found for the model and that are used.

        With the measured speed; None if there are none.
        """
        found = None if self.recipe is None else self.recipe.measured
        return None if found is None else f"{name_of(found.settings)}: {found.reason}"

    @property
    def converted(self) -> tuple[str, ...]:
        """The paths of the layers that `optimize` converts, or has converted."""
        outcomes = self._outcomes()
        return tuple(path for path, _, _, layout, _ in outcomes if layout is not None)

    @property
    def kept(self) -> dict[str, str]:
        """The reason of each layer that stays or becomes MLX's, by the layer's path."""
        return {path: reason for path, *_, reason in self._outcomes() if reason}

    def _outcomes(self) -> list[tuple[str, str, str, str | None, str | None]]:
        """Returns the path, class, action, layout and reason of each layer."""
        uses = [each.use for each in self.layers]
        found = [
            (path, use.layer, use.action, use.layout, use.refusal)
            for use in uses
            for path in use.paths
        ]
        return [*dict.fromkeys(found)]  # some layers compute two products

    def __str__(self) -> str:
        """Returns who serves the layers; every time says where it comes from.

        Without rows, tables of the options, of the layers, and of the blocks to be
        traced.
        """
        return _serving(self) if self.rows else _conversion(self)

    def __repr__(self) -> str:
        """Returns a line; `str` has the tables."""
        return f"<{type(self).__name__}: {self.summary()}>"

    def summary(self) -> str:
        """Returns in a line how many products our kernels serve with few rows."""
        if not self.rows:
            converted, outcomes = len(self.converted), len(self._outcomes())
            return f"optimize converts {converted} of {outcomes} layers"
        quantized = [each for each in self.layers if each.decisions]
        uses = [each.use for each in quantized]
        total = sum(len(use.paths) for use in uses)
        converted = sum(len(use.paths) for use in uses if use.is_converted)
        ours: Counter[int] = Counter()
        for layer in quantized:
            for decision in layer.decisions:
                is_ours = decision.served_by in ("ours", "decoded")
                ours[decision.rows] += is_ours * len(layer.use.paths)
        by_rows = (f"{ours[m]} at {m}" for m in self.rows)
        return (
            f"{converted} of {total} quantized products are converted; our kernels "
            f"serve {', '.join(by_rows)} rows (back end {self.backend})"
        )

    def document(self) -> dict[str, Any]:
        """Returns the report as values that `json.dumps` accepts."""
        device = self.target.place.device
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "device": {
                "name": device.name,
                "variant": device.variant,
                "arch": device.arch,
                "cores": device.cores,
            },
            "backend": self.backend,
            "rows": [*self.rows],
            "layers": [_row(layer) for layer in self.layers],
        }


DryRun = Report
"""The name of what `optimize(model, dry_run=True)` returns."""


def report(
    model: nn.Module, rows: Sequence[int] = (1, 4, 8), *, chip: str | None = None
) -> Report:
    """Returns who serves each layer of a model, and how long it takes.

    For layers of MLX's or mlx-lm's, it is what they do after `optimize(model)`. The
    report has stock MLX's kernel and time too. No weight is read or evaluated, and no
    kernel is compiled or checked.

    Args:
        model: An mlx-lm model or any other `nn.Module`, converted or not.
        rows: Numbers of rows of the activations.
        chip: Name such as "Apple M3 Max" or "NVIDIA H200": the cost model decides for
            a GPU of this kind. Default: what this process does, with measured results.

    Returns:
        The report; `str(report)` is a table, `report.document()` a value for JSON.

    Raises:
        TypeError: If `model` is not an `nn.Module`.
        ValueError: If `rows` are not positive integers, or the chip is not known.
    """
    check_model(model)
    counts, target = check(rows, chip)
    recipe = backend = None
    if target.place.is_here:
        recipe, backend = resolve(model, DEFAULTS), selection.backend()
        target = replace(target, conversion=recipe.conversion, stock=_stock(recipe))
    layers = tuple(
        LayerReport(
            use=use,
            decisions=tuple(decide(use, m, target.place) for m in counts)
            if use.request is not None
            else (),
        )
        for use in _uses(model, target)
    )
    return Report(
        target=target, backend=backend, rows=counts, layers=layers, recipe=recipe
    )


def check(rows: Sequence[int], chip: str | None) -> tuple[tuple[int, ...], Target]:
    """Returns the distinct numbers of rows and the target, both checked."""
    is_valid = not isinstance(rows, str) and isinstance(rows, Sequence)
    if not (is_valid and rows and all(type(m) is int and m > 0 for m in rows)):
        raise ValueError(f"rows={rows!r}, expected numbers of rows such as (1, 4, 8)")
    return (*dict.fromkeys(rows),), Target.of(chip)


def dry_run(
    model: nn.Module, recipe: Recipe, float16: Float16Outcome | None, tracing: Any
) -> Report:
    """Returns what a recipe does with each layer of a model. Changes nothing.

    `float16`: what `compute="float16"` converts.
    `tracing`: the module that traces blocks; None if there are none.
    """
    conversion = recipe.conversion
    blocks: tuple[BlockOutcome, ...] = ()
    target = replace(
        Target.of(None), conversion=conversion, stock=_stock(recipe), changes_ours=True
    )
    if tracing:
        # What can be traced depends on classes. Unpacked layers share arrays.
        unpacked = replace(conversion, layout="mlx")
        found = tracing.block_outcomes(
            model, lambda block: _as_converted(block, unpacked)
        )
        blocks = tuple(starmap(BlockOutcome, found))
    return Report(
        target=target,
        backend=recipe.backend,
        rows=(),
        layers=tuple(LayerReport(use=use) for use in _uses(model, target)),
        recipe=recipe,
        float16=float16,
        blocks=blocks,
    )


def _uses(model: nn.Module, target: Target) -> list[LayerUse]:
    """Returns what layers compute, without the layers: a report keeps no weights."""
    return [replace(use, layers=()) for use in uses_of(model, target)]


def _stock(recipe: Recipe) -> str | None:
    """Returns why a recipe leaves a model to stock MLX, or None."""
    measured = recipe.measured
    return measured.reason if measured is not None and recipe.is_stock else None


def _as_converted(entry: Any, conversion: LayerConversion) -> Any:
    """Returns a module as `optimize` would leave it; the model's own stays as it is."""
    if not isinstance(entry, nn.Module):
        return entry
    if conversion.applies_to(entry):
        return conversion.convert(entry)
    twin = copy(entry)
    entries = {name: _as_converted(each, conversion) for name, each in entry.items()}
    dict.update(twin, entries)
    return twin


def _row(layer: LayerReport) -> dict[str, Any]:
    use = layer.use
    return {
        "name": use.name,
        "count": len(use.paths),
        "type": use.layer,
        "operation": use.operation,
        "is_converted": use.is_converted,
        "why_not_converted": use.stays,
        "dtype": use.dtype,
        "weight": None if use.request is None else _weight(use),
        "bias": use.bias,
        "parts": [] if use.request is None else [*use.request.epilogue.parts],
        "invariant": use.request is not None and use.request.invariant,
        "choices": use.choices or None,
        "calls": [asdict(decision) for decision in layer.decisions],
    }


def _weight(use: LayerUse) -> dict[str, Any]:
    names = ("n", "k", "mode", "bits", "group_size", "layout", "global_scale")
    return {name: getattr(use.call, name) for name in names} | {
        "scale_dtype": dtype_name(use.call.scale_dtype),
        "batch": use.batch,
    }


def _conversion(report: Report) -> str:
    """Returns what `optimize` does, with the options before it.

    Equal layers at corresponding paths are one line. Blocks to be traced are a table
    after it, and tuned settings that are used the last line.
    """
    blocks = [
        (name, cls, "keeps" if reason else "traces", reason)
        for name, cls, reason in report.blocks
    ]
    measured = f"measured settings, {report.tuned}" if report.tuned else None
    parts = (
        report.recipe,
        _table(HEADS, report._outcomes()),
        blocks and _table(BLOCK_HEADS, blocks),
        report.float16,
        measured,
    )
    return "\n".join(str(each) for each in parts if each)


def _table(heads: Sequence[str], outcomes: Sequence[tuple[Any, ...]]) -> str:
    """Returns a table of outcomes, whose first cell is a path."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, *outcome in outcomes:
        groups.setdefault((pattern(name), *outcome), []).append(name)
    rows = [[*heads]]
    for (_, *outcome_of_all), names in groups.items():
        cells = (common_path(names), len(names), *outcome_of_all)
        rows.append(["-" if cell is None else str(cell) for cell in cells])
    return aligned(rows)


def _serving(report: Report) -> str:
    """Returns who serves the layers with each number of rows."""
    reasons: dict[str, int] = {}
    rows = [row for layer in report.layers for row in _rows(layer, reasons)]
    table = printed(Table(title="", rows=rows, once=GROUP, usual=["format", "layout"]))
    lines = [_heading(report), *_notes(report), "", table]
    if reasons:
        lines += ["", "why not ours:"]
    lines += [f"[{number}] {reason}" for reason, number in reasons.items()]
    return "\n".join(lines)


def _heading(report: Report) -> str:
    device, backend = report.target.place.device.variant, report.backend
    if backend is None:
        return f"on a machine with {device}, as the cost model decides"
    heading = f"in this process, with the back end {backend} (device: {device})"
    if backend == "stock" or selection.may_hand_over():
        return heading
    return (
        f"{heading}, which never falls back to stock MLX for performance; name a chip "
        f"to see what such a GPU would do"
    )


def _notes(report: Report) -> Iterator[str]:
    """Yields the lines between the heading and the table."""
    quantized = [each.use for each in report.layers if each.use.request is not None]
    if any(not (use.is_converted or use.stays) for use in quantized):
        yield (
            "layers marked with * are MLX's now: stock MLX serves them until "
            "optimize(model) converts them, and the line is what they do then"
        )
        if report.target.place.backend.traits.replays_graphs:
            yield (
                "optimize(model) also joins layers that share x here; a report on the "
                "converted model shows them joined"
            )
    measured = None if report.recipe is None else report.recipe.measured
    if measured is not None:
        yield f"optimize(model) uses {name_of(measured.settings)}, {measured.reason}"
    if any(use.choices for use in quantized):
        yield "experts: rows are tokens, and each token chooses several experts"


def _rows(layer: LayerReport, reasons: dict[str, int]) -> Iterator[dict[str, Value]]:
    """Yields the lines of some layers; those that stay plain have one."""
    use, request = layer.use, layer.use.request
    star = "" if use.is_converted or use.stays else "*"
    layers: dict[str, Value] = {
        "layer": use.name + star,
        "count": len(use.paths),
        "product": _product(use),
        "format": use.dtype if request is None else _format(use),
        "layout": "-" if request is None else request.layout,
    }
    if request is None:
        yield {**layers, **cells(None, numbered(use.stays or "", reasons))}
    for decision in layer.decisions:
        why = numbered(decision.marked_reason, reasons)
        yield {**layers, **cells(decision, why)}


def numbered(reason: str, reasons: dict[str, int]) -> str:
    """Returns the number of a reason, which stands below the table; "" for none."""
    return f"[{reasons.setdefault(reason, len(reasons) + 1)}]" if reason else ""


def _product(use: LayerUse) -> str:
    if use.request is None:
        return use.operation
    shape = f"{use.request.k}→{use.request.n}"
    if use.choices:
        return f"{shape}, {use.choices} of {use.batch[0]} experts"
    joined = len(use.request.epilogue.parts)
    parts = [
        shape,
        "" if use.operation == "linear" else use.operation,
        f"{use.batch[0]} heads" if use.batch else "",
        f"{joined} joined" if joined else "",
        "bias" if use.bias else "",
        "invariant" if use.request.invariant else "",
    ]
    return ", ".join(filter(None, parts))


def _format(use: LayerUse) -> str:
    call = use.call
    return f"{call.mode} {call.bits}-bit, group {call.group_size}, {use.dtype}"
