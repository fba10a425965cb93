"""The page and the charts of a document of `mlx-marlin profile`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mlx_marlin.cli.pictures import roofline
from mlx_marlin.cli.pictures.charts import Chart, can_draw
from mlx_marlin.cli.render.page import Page
from mlx_marlin.measure.profiling.roofline import Point, Roofline
from mlx_marlin.tables import SOURCE, Table, Value, source, text

Document = Mapping[str, Any]


def charts(document: Document) -> list[Chart]:
    """Returns the roofline of a document."""
    device = document["device"]
    roofs = {
        name: Roofline(tflops=device[key], bandwidth_gbs=device["bandwidth_gbs"])
        for name, key in (("roof of stock MLX", "stock_tflops"), ("roof", "tflops"))
        if can_draw(device[key], device["bandwidth_gbs"])
    }
    if not roofs:
        return []
    if len({*roofs.values()}) == 1:
        roofs.pop("roof of stock MLX", None)
    products = [_product(row) for row in document["profiles"] if not row["refusal"]]
    origins = sorted({product.origin for product in products})
    marks = f" ({', '.join(origins)})" if origins else ""
    return [roofline.chart(f"Roofline of {device['variant']}{marks}", roofs, products)]


def page(document: Document, origin: str) -> Page:
    """Returns the page of a document."""
    device = document["device"]
    return Page(
        title=f"Profile of {device['variant']}",
        subtitle="Quantized matrix products, compared with the limits of the device",
        facts=[*_facts(device)],
        charts=charts(document),
        tables=[
            products(document),
            plans(
                (
                    problem_cells(each["problem"]) | {"kernel": _kernel(each)},
                    each["plan"],
                )
                for each in document["profiles"]
            ),
            Table(title="Not profiled", rows=[*map(_skipped, document["skipped"])]),
        ],
        notes=refusals(document),
        origin=origin,
    )


def products(document: Document) -> Table:
    """Returns the table of the profiles of a document."""
    return Table(title="Products", rows=[*map(_row, document["profiles"])])


def plans(found: Iterable[tuple[dict[str, Value], str | None]]) -> Table:
    """Returns a table of plans, which are too long for a column beside others.

    Args:
        found: What tells the products apart, and the plan, or None.
    """
    rows = [cells | {"plan": plan} for cells, plan in found if plan is not None]
    different = {tuple(row.values()): row for row in rows}
    return Table(title="Plans", rows=[*different.values()])


def refusals(document: Document) -> list[str]:
    """Returns why times cannot be right."""
    return [
        f"IMPOSSIBLE ({each['origin']}): {each['problem']['m']} x "
        f"{shape(each['problem'])}, {_kernel(each)}: {each['refusal']}"
        for each in document["profiles"]
        if each["refusal"]
    ]


def problem_cells(problem: Mapping[str, Any]) -> dict[str, Value]:
    """Returns the rows, shape, format, dtype and layout of a product."""
    return {
        "rows": problem["m"],
        "k→n": shape(problem),
        "format": format_name(problem),
        "dtype": problem["dtype"],
        "layout": problem["layout"],
    }


def shape(problem: Mapping[str, Any]) -> str:
    """Returns the sizes of a product's weight."""
    return f"{problem['k']}→{problem['n']}"


def format_name(problem: Mapping[str, Any]) -> str:
    """Returns the format of a weight's codes."""
    return f"{problem['mode']} {problem['bits']}-bit g{problem['group_size']}"


def _facts(device: Document) -> Iterator[tuple[str, str]]:
    yield "device", device["variant"]
    yield "GPU cores", text(device["cores"])
    yield "peak", f"{text(device['tflops'])} TFLOPS"
    if device["stock_tflops"] != device["tflops"]:
        yield "peak of stock MLX", f"{text(device['stock_tflops'])} TFLOPS"
    yield "memory bandwidth", f"{text(device['bandwidth_gbs'])} GB/s"
    ridge = device["tflops"] * 1e3 / device["bandwidth_gbs"]
    yield "ridge point", f"{ridge:.3g} FLOP/byte"


def _kernel(profile: Document) -> str:
    first: str = profile["kernel"].split()[0]
    return f"stock {first}" if profile["served_by"] == "stock" else first


def _product(profile: Document) -> roofline.Product:
    return roofline.Product(
        point=Point(**profile["point"]),
        rows=profile["problem"]["m"],
        kernel=_kernel(profile),
        origin=source(profile["origin"]),
    )


def _row(profile: Document) -> dict[str, Value]:
    def percent(key: str) -> float | None:
        return None if profile[key] is None else 100 * profile[key]

    occupancy = profile["occupancy"] or dict.fromkeys(("resident", "limit", "low"))
    bottleneck = "IMPOSSIBLE" if profile["refusal"] else profile["bottleneck"]
    return problem_cells(profile["problem"]) | {
        "kernel": _kernel(profile),
        SOURCE: source(profile["origin"]),
        "ms": profile["point"]["seconds"] * 1e3,
        "TFLOPS": profile["tflops"],
        "compute %": percent("compute_utilization"),
        "GB/s": profile["bandwidth_gbs"],
        "memory %": percent("memory_utilization"),
        "FLOP/byte": profile["intensity"],
        "% of roof": percent("attained"),
        "bottleneck": bottleneck,
        "simdgroups": occupancy["resident"],
        "low occupancy": occupancy["limit"] if occupancy["low"] else "",
    }


def _skipped(row: Document) -> dict[str, Value]:
    cells = problem_cells(row["problem"])
    return cells | {"kernel": row["kernel"], "reason": row["reason"]}
