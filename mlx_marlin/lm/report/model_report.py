"""`report`: who serves each layer of a model, how long it takes, and why not us.

Every time of the text says in its own cell or line where it comes from: "predicted" or
"measured".
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.nn as nn

from mlx_marlin.backends import selection
from mlx_marlin.lm.optimize import check_model
from mlx_marlin.lm.race.settings import name_of
from mlx_marlin.lm.recipe import resolve
from mlx_marlin.lm.report.decisions import Decision, Time, decide
from mlx_marlin.lm.report.layer_products import (
    DEFAULTS,
    LayerGroup,
    LayerProduct,
    Target,
    Weight,
    groups_of,
)
from mlx_marlin.tables import Table, Value, printed

SCHEMA = "mlx_marlin.report"
VERSION = 1
"""Version of the schema. It changes if a field is removed or changes its meaning."""
GROUP = ("layer", "count", "product", "format", "layout")
"""Columns that say which layers several lines are of."""
SERVERS = {
    "ours": "ours",
    "decoded": "ours, decoded once",
    "stock": "stock MLX",
    "nobody": "nobody: raises",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """Who serves the layers of a group."""

    group: LayerGroup  # The layers and their product
    # Who serves it, for each number of rows; empty if the layers have no quantized
    # product
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report on a model. `str` returns it as a table.

    Attributes:
        target: What the report decides for.
        backend: The back end of this process; None if a chip was named.
        rows: The numbers of rows.
        layers: The layers of the model.
    """

    target: Target
    backend: str | None
    rows: tuple[int, ...]
    layers: tuple[LayerReport, ...]

    def __str__(self) -> str:
        """Returns the report as a table; every time says where it comes from."""
        rows = [(layer.group, layer.decisions) for layer in self.layers]
        return text(self.target, self.backend, rows)

    def __repr__(self) -> str:
        """Returns a line; `str` has the table."""
        return f"<{type(self).__name__}: {self.summary()}>"

    def summary(self) -> str:
        """Returns in a line how many products our kernels serve with few rows."""
        quantized = [layer for layer in self.layers if layer.decisions]
        total = sum(layer.group.count for layer in quantized)
        converted = sum(
            layer.group.count for layer in quantized if layer.group.product.is_converted
        )
        ours: Counter[int] = Counter()
        for layer in quantized:
            for decision in layer.decisions:
                is_ours = decision.served_by in ("ours", "decoded")
                ours[decision.rows] += is_ours * layer.group.count
        by_rows = (f"{ours[m]} at {m}" for m in self.rows)
        return (
            f"{converted} of {total} quantized products are converted; our kernels "
            f"serve {', '.join(by_rows)} rows (back end {self.backend})"
        )

    def document(self) -> dict[str, Any]:
        """Returns the report as values that `json.dumps` accepts."""
        device = self.target.device
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
    if target.is_here:
        made = resolve(model, DEFAULTS)
        target = replace(target, measured=made.measured, layout=made.conversion.layout)
    layers = [
        LayerReport(group=group, decisions=_decisions(group.product, counts, target))
        for group in groups_of(model, target)
    ]
    backend = selection.backend() if target.is_here else None
    return Report(target=target, backend=backend, rows=counts, layers=(*layers,))


def check(rows: Sequence[int], chip: str | None) -> tuple[tuple[int, ...], Target]:
    """Returns the distinct numbers of rows and the target, both checked."""
    is_valid = not isinstance(rows, str) and isinstance(rows, Sequence)
    if not (is_valid and rows and all(type(m) is int and m > 0 for m in rows)):
        raise ValueError(f"rows={rows!r}, expected numbers of rows such as (1, 4, 8)")
    return (*dict.fromkeys(rows),), Target.of(chip)


def _decisions(
    product: LayerProduct, rows: Sequence[int], target: Target
) -> tuple[Decision, ...]:
    if product.weight is None:
        return ()
    return tuple(decide(product, m, target) for m in rows)


def _row(layer: LayerReport) -> dict[str, Any]:
    product = layer.group.product
    return {
        "name": layer.group.name,
        "count": layer.group.count,
        "type": product.layer,
        "operation": product.operation,
        "is_converted": product.is_converted,
        "why_not_converted": product.stays,
        "dtype": product.dtype,
        "weight": None if product.weight is None else asdict(product.weight),
        "bias": product.bias,
        "parts": [*product.parts],
        "invariant": product.invariant,
        "choices": product.choices or None,
        "calls": [asdict(decision) for decision in layer.decisions],
    }


def text(
    target: Target,
    backend: str | None,
    layers: Sequence[tuple[LayerGroup, Sequence[Decision]]],
) -> str:
    """Returns a report as text.

    `backend`: the back end of this process; None if a chip was named.
    """
    reasons: dict[str, int] = {}
    rows = [
        row for group, decisions in layers for row in _rows(group, decisions, reasons)
    ]
    table = printed(Table(title="", rows=rows, once=GROUP, usual=["format", "layout"]))
    lines = [_heading(target, backend), *_notes(target, layers), "", table]
    if reasons:
        lines += ["", "why not ours:"]
    lines += [f"[{number}] {reason}" for reason, number in reasons.items()]
    return "\n".join(lines)


def _heading(target: Target, backend: str | None) -> str:
    device = target.device.variant
    if backend is None:
        return f"on a machine with {device}, as the cost model decides"
    heading = f"in this process, with the back end {backend} (device: {device})"
    if backend == "stock" or selection.may_hand_over():
        return heading
    return (
        f"{heading}, which never falls back to stock MLX for performance; name a chip "
        f"to see what such a GPU would do"
    )


def _notes(
    target: Target, layers: Sequence[tuple[LayerGroup, Sequence[Decision]]]
) -> Iterator[str]:
    """Yields the lines between the heading and the table."""
    quantized = [group.product for group, _ in layers if group.product.weight]
    if any(not (product.is_converted or product.stays) for product in quantized):
        yield (
            "layers marked with * are MLX's now: stock MLX serves them until "
            "optimize(model) converts them, and the line is what they do then"
        )
        if target.backend.traits.replays_graphs:
            yield (
                "optimize(model) also joins layers that share x here; a report on the "
                "converted model shows them joined"
            )
    if target.measured is not None:
        settings = name_of(target.measured.settings)
        yield f"optimize(model) uses {settings}, {target.measured.reason}"
    if any(product.choices for product in quantized):
        yield "experts: rows are tokens, and each token chooses several experts"


def _rows(
    group: LayerGroup, decisions: Sequence[Decision], reasons: dict[str, int]
) -> Iterator[dict[str, Value]]:
    """Yields the lines of some layers; those that stay plain have one."""
    product, weight = group.product, group.product.weight
    star = "" if product.is_converted or product.stays else "*"
    layers: dict[str, Value] = {
        "layer": group.name + star,
        "count": group.count,
        "product": _product(product),
        "format": product.dtype if weight is None else _format(product, weight),
        "layout": "-" if weight is None else weight.layout,
    }
    if weight is None:
        why = _number(product.stays or "", reasons)
        yield {**layers, **_call("stock MLX"), "why not ours": why}
    for decision in decisions:
        call = _call(
            _server(decision), decision.rows, _time(decision.time), _stock(decision)
        )
        yield {**layers, **call, "why not ours": _reason(decision, reasons)}


def _call(
    server: str, rows: int | None = None, time: str = "", stock: str = ""
) -> dict[str, Value]:
    called: dict[str, Value] = {"rows": rows, "served by": server, "time": time}
    return called | {"stock MLX in MLX's layout": stock}


def _product(product: LayerProduct) -> str:
    weight = product.weight
    if weight is None:
        return product.operation
    shape = f"{weight.k}→{weight.n}"
    if product.choices:
        return f"{shape}, {product.choices} of {weight.batch[0]} experts"
    parts = [
        shape,
        "" if product.operation == "linear" else product.operation,
        f"{weight.batch[0]} heads" if weight.batch else "",
        f"{len(product.parts)} joined" if product.parts else "",
        "bias" if product.bias else "",
        "invariant" if product.invariant else "",
    ]
    return ", ".join(filter(None, parts))


def _format(product: LayerProduct, weight: Weight) -> str:
    names = f"{weight.mode} {weight.bits}-bit, group {weight.group_size}"
    return f"{names}, {product.dtype}"


def _server(decision: Decision) -> str:
    server = SERVERS[decision.served_by]
    return server if decision.kernel is None else f"{server}: {decision.kernel}"


def _stock(decision: Decision) -> str:
    return _time(decision.stock_time)


def _time(time: Time | None) -> str:
    if time is None:
        return ""
    us = f"{time.us:.1f}" if time.us >= 1 else f"{time.us:.2g}"
    return f"{us} us {time.mark}"


def _reason(decision: Decision, reasons: dict[str, int]) -> str:
    if decision.reason is None:
        return ""
    origin = decision.reason_origin
    return _number(f"{origin}: " * bool(origin) + decision.reason, reasons)


def _number(reason: str, reasons: dict[str, int]) -> str:
    return f"[{reasons.setdefault(reason, len(reasons) + 1)}]"
