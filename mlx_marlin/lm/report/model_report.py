"""`report`: who serves each layer of a model, how long it takes, and why not us."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.nn as nn

from mlx_marlin.backends import selection
from mlx_marlin.lm.optimize import check_model
from mlx_marlin.lm.recipe import resolve
from mlx_marlin.lm.report import table
from mlx_marlin.lm.report.decisions import Decision, decide
from mlx_marlin.lm.report.layer_groups import LayerGroup, groups_of
from mlx_marlin.lm.report.layer_product import LayerProduct
from mlx_marlin.lm.report.target import DEFAULTS, Target

SCHEMA = "mlx_marlin.report"
VERSION = 1
"""Version of the schema. It changes if a field is removed or changes its meaning."""


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
        return table.text(self.target, self.backend, rows)

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
        recipe = resolve(model, DEFAULTS)
        target = replace(target, tuned=recipe.tuned, layout=recipe.conversion.layout)
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
