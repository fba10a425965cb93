"""The roofline chart: the roofs of a device, and products below them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_marlin.cli.pictures.charts import Chart, Mark, Series, can_draw
from mlx_marlin.measure.profiling.roofline import Point, Roofline

STOCK = "stock"
"""First word of the names of stock MLX's kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product on a roofline."""

    point: Point  # Its operations, bytes and time
    rows: int  # Rows of x
    kernel: str  # The kernel; names of stock MLX's begin with `STOCK`
    origin: str  # "measured", "predicted" or "assumed"


def chart(
    title: str, roofs: Mapping[str, Roofline], products: Sequence[Product]
) -> Chart:
    """Returns the chart of some products."""
    drawn = [
        product
        for product in products
        if can_draw(product.point.intensity, product.point.tflops)
    ]
    corners = [(roof.ridge, roof.tflops) for roof in roofs.values()]
    corners += [(each.point.intensity, each.point.tflops) for each in drawn]
    xs, ys = zip(*corners, strict=True)
    low, high, bottom = min(xs) / 4, max(xs) * 4, min(ys) / 4
    series = [
        Series(
            name=f"{name}: {roof.tflops:.4g} TFLOPS, {roof.bandwidth_gbs:g} GB/s",
            marks=_roof_marks(roof, (low, high), bottom),
            style="roof",
            color=index,
        )
        for index, (name, roof) in enumerate(roofs.items())
    ]
    return Chart(
        title=title,
        x="arithmetic intensity, FLOP/byte",
        y="TFLOPS",
        log_base=10,
        series=(*series, *_of_kernels(drawn)),
    )


def _roof_marks(
    roof: Roofline, ends: tuple[float, float], bottom: float
) -> tuple[Mark, ...]:
    """Returns the corners of a roof between the ends of the horizontal axis."""
    low, high = ends
    start = max(low, bottom * 1000 / roof.bandwidth_gbs)
    corners = sorted({min(start, roof.ridge), roof.ridge, high})
    return tuple(Mark(x, roof.attainable_tflops(x)) for x in corners)


def _of_kernels(products: Sequence[Product]) -> list[Series]:
    """Returns the series of each kernel: those of stock MLX last."""
    kernels = dict.fromkeys(product.kernel for product in products)
    ordered = sorted(kernels, key=lambda kernel: kernel.startswith(STOCK))
    colors = {kernel: index for index, kernel in enumerate(ordered)}
    groups: dict[tuple[str, str], list[Product]] = {}
    for product in sorted(products, key=lambda product: colors[product.kernel]):
        groups.setdefault((product.kernel, product.origin), []).append(product)
    lowest: dict[int, Product] = {}
    for product in products:
        known = lowest.get(product.rows, product)
        lowest[product.rows] = min(known, product, key=lambda each: each.point.tflops)
    return [
        Series(
            name=f"{_owner(kernel)}{kernel} ({origin})",
            marks=tuple(
                _mark(product, lowest[product.rows] is product)
                for product in sorted(group, key=lambda each: each.point.intensity)
            ),
            style="points",
            is_measured=origin == "measured",
            color=colors[kernel],
        )
        for (kernel, origin), group in groups.items()
    ]


def _owner(kernel: str) -> str:
    """Returns what the legend says before the name of a kernel of ours."""
    return "" if kernel.startswith(STOCK) else "ours: "


def _mark(product: Product, is_labelled: bool) -> Mark:
    label = f"{product.rows} {'row' if product.rows == 1 else 'rows'}"
    point = product.point
    return Mark(point.intensity, point.tflops, label if is_labelled else "")
