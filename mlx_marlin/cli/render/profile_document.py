"""The page and the charts of a document of `mlx-marlin profile`."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlx_marlin.cli.pictures import roofline
from mlx_marlin.cli.pictures.charts import Chart, can_draw
from mlx_marlin.cli.render.fields import Fields
from mlx_marlin.cli.render.page import Page
from mlx_marlin.cli.render.tables import (
    Cell,
    Table,
    number,
    number_cell,
    source,
    source_cell,
    text_cell,
)
from mlx_marlin.measure.profiling.roofline import Point, Roofline

HEADS = (
    *("rows", "k→n", "format", "dtype", "layout", "kernel", "times", "ms"),
    *(
        "TFLOPS",
        "compute %",
        "GB/s",
        "memory %",
        "FLOP/byte",
        "% of roof",
        "bottleneck",
    ),
    *("simdgroups", "low occupancy", "plan"),
)
SKIPPED = ("rows", "k→n", "format", "dtype", "layout", "kernel", "reason")


def charts(data: Mapping[str, Any]) -> list[Chart]:
    """Returns the roofline of a document.

    Args:
        data: The document.

    Returns:
        One chart, or none if the document has no peaks of the device.

    Raises:
        ValueError: If an object or a list of it is something else.
    """
    document = Fields(data, "the document")
    device = document.fields("device")
    roofs = _roofs(device)
    if not roofs:
        return []
    products = [*filter(None, map(_product, document.rows("profiles")))]
    origins = sorted({product.origin for product in products})
    marks = f" ({', '.join(origins)})" if origins else ""
    return [roofline.chart(f"Roofline of {_name(device)}{marks}", roofs, products)]


def page(data: Mapping[str, Any], origin: str) -> Page:
    """Returns the page of a document.

    Args:
        data: The document.
        origin: What it was read from.

    Raises:
        ValueError: If an object or a list of it is something else.
    """
    document = Fields(data, "the document")
    device = document.fields("device")
    profiles, skipped = document.rows("profiles"), document.rows("skipped")
    return Page(
        title=f"Profile of {_name(device)}",
        subtitle="Quantized matrix products, compared with the limits of the device",
        facts=[*_facts(device)],
        charts=charts(data),
        tables=[
            Table(
                title="Products",
                heads=HEADS,
                rows=[_row(profile) for profile in profiles],
                sources=[source(profile.text("origin")) for profile in profiles],
            ),
            Table(
                title="Not profiled",
                heads=SKIPPED,
                rows=[_skipped(row) for row in skipped],
                sources=[""] * len(skipped),
            ),
        ],
        notes=[*filter(None, map(_refusal, profiles))],
        origin=origin,
    )


def problem_cells(problem: Fields) -> list[Cell]:
    """Returns the cells with rows, shape, format, dtype and layout of a product."""
    return [
        number_cell(problem.number("m")),
        text_cell(shape(problem)),
        text_cell(format_name(problem)),
        text_cell(problem.text("dtype")),
        text_cell(problem.text("layout")),
    ]


def shape(problem: Fields) -> str:
    """Returns the sizes of a product's weight; "" if they are missing."""
    k, n = problem.integer("k"), problem.integer("n")
    return "" if k is None or n is None else f"{k}→{n}"


def format_name(problem: Fields) -> str:
    """Returns the format of a weight's codes, as far as it is known."""
    bits, group = problem.integer("bits"), problem.integer("group_size")
    parts = [
        problem.text("mode"),
        "" if bits is None else f"{bits}-bit",
        "" if group is None else f"g{group}",
    ]
    return " ".join(filter(None, parts))


def _name(device: Fields) -> str:
    return device.text("variant") or device.text("name") or "an unnamed device"


def _facts(device: Fields) -> Iterator[tuple[str, str]]:
    yield "device", _name(device)
    for label, key, unit in (
        ("GPU cores", "cores", ""),
        ("peak", "tflops", " TFLOPS"),
        ("peak of stock MLX", "stock_tflops", " TFLOPS"),
        ("memory bandwidth", "bandwidth_gbs", " GB/s"),
    ):
        value = device.number(key)
        is_repeated = key == "stock_tflops" and value == device.number("tflops")
        if value is not None and not is_repeated:
            yield label, number(value, 4) + unit
    if roofs := _roofs(device):
        ridge = next(iter(roofs.values())).ridge
        yield "ridge point", f"{number(ridge, 3)} FLOP/byte"


def _roofs(device: Fields) -> dict[str, Roofline]:
    """Returns the roofs of a device by name; none if they cannot be drawn."""
    bandwidth, peak = device.number("bandwidth_gbs"), device.number("tflops")
    if bandwidth is None or peak is None or not can_draw(bandwidth, peak):
        return {}
    roofs = {"roof": Roofline(tflops=peak, bandwidth_gbs=bandwidth)}
    stock = device.number("stock_tflops")
    if stock is not None and stock != peak and can_draw(stock):
        roofs["roof of stock MLX"] = Roofline(tflops=stock, bandwidth_gbs=bandwidth)
    return roofs


def _kernel(profile: Fields) -> str:
    first = next(iter(profile.text("kernel").split()), "a kernel")
    return f"stock {first}" if profile.text("served_by") == "stock" else first


def _product(profile: Fields) -> roofline.Product | None:
    """Returns a profile's place on the roofline.

    Returns:
        The place; None if figures are missing, or the time is one that cannot be right.
    """
    point, problem = profile.fields("point"), profile.fields("problem")
    flops, size = point.integer("flops"), point.integer("bytes")
    seconds, rows = point.number("seconds"), problem.integer("m")
    if flops is None or size is None or seconds is None or rows is None:
        return None
    if profile.text("refusal") or not min(flops, size) >= 1 or not seconds > 0:
        return None
    return roofline.Product(
        point=Point(flops=flops, bytes=size, seconds=seconds),
        rows=rows,
        text=f"{rows} x {shape(problem)}",
        kernel=_kernel(profile),
        origin=source(profile.text("origin")),
    )


def _row(profile: Fields) -> list[Cell]:
    seconds = profile.fields("point").number("seconds")
    occupancy = profile.fields("occupancy")
    is_refused = bool(profile.text("refusal"))

    def figure(key: str, factor: float = 1) -> Cell:
        value = profile.number(key)
        scaled = None if value is None else value * factor
        return number_cell(scaled, 3, is_figure=True)

    return [
        *problem_cells(profile.fields("problem")),
        text_cell(_kernel(profile)),
        source_cell(source(profile.text("origin"))),
        number_cell(None if seconds is None else seconds * 1e3, is_figure=True),
        figure("tflops"),
        figure("compute_utilization", 100),
        figure("bandwidth_gbs"),
        figure("memory_utilization", 100),
        number_cell(profile.number("intensity"), 3),
        figure("attained", 100),
        text_cell("IMPOSSIBLE", "failed")
        if is_refused
        else text_cell(profile.text("bottleneck")),
        number_cell(occupancy.number("resident")),
        text_cell(occupancy.text("limit") if occupancy.text("low") else ""),
        text_cell(profile.text("plan")),
    ]


def _skipped(row: Fields) -> list[Cell]:
    cells = problem_cells(row.fields("problem"))
    return [*cells, text_cell(row.text("kernel")), text_cell(row.text("reason"))]


def _refusal(profile: Fields) -> str:
    """Returns why a time cannot be right, or ""."""
    refusal, problem = profile.text("refusal"), profile.fields("problem")
    if not refusal:
        return ""
    rows = problem.integer("m")
    label = f"{rows if rows is not None else '?'} x {shape(problem)}"
    origin = source(profile.text("origin"))
    return f"IMPOSSIBLE ({origin}): {label}, {_kernel(profile)}: {refusal}"
