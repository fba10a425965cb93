"""The text of a report: a table, and below it the reasons.

Every time says in its own cell or line where it comes from: "predicted" or "measured".
"""

from collections.abc import Iterator, Sequence

from mlx_marlin.backends import selection
from mlx_marlin.lm.race.settings import name_of
from mlx_marlin.lm.report.decisions import Decision, Time
from mlx_marlin.lm.report.layer_groups import LayerGroup
from mlx_marlin.lm.report.layer_product import LayerProduct, Weight
from mlx_marlin.lm.report.target import Target
from mlx_marlin.tables import Table, Value, printed

GROUP = ("layer", "count", "product", "format", "layout")
"""Columns that say which layers several lines are of."""
SERVERS = {
    "ours": "ours",
    "decoded": "ours, decoded once",
    "stock": "stock MLX",
    "nobody": "nobody: raises",
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
    if target.tuned is not None:
        settings = name_of(target.tuned.settings)
        yield f"optimize(model) uses {settings}, {target.tuned.reason}"
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
    cells = [_time(decision.stock_time), decision.stock_kernel or ""]
    return ": ".join(filter(None, cells))


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
