"""The roofline chart: the roofs of a device, and products below them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_marlin.cli.pictures.charts import Chart, Mark, Series, can_draw, log_axis
from mlx_marlin.measure.profiling.roofline import Point, Roofline

STOCK = "stock"
"""First word of the names of stock MLX's kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product on a roofline.

    Attributes:
        point: Its operations, bytes and time.
        rows: Rows of x.
        text: The product in words.
        kernel: The kernel; names of stock MLX's begin with `STOCK`.
        origin: "measured", "predicted" or "assumed".
    """

    point: Point
    rows: int
    text: str
    kernel: str
    origin: str


def chart(
    title: str, roofs: Mapping[str, Roofline], products: Sequence[Product]
) -> Chart:
    """Returns the chart of some products.

    Args:
        title: What the chart shows.
        roofs: The roofs by name. The peaks are stated by manufacturers.
        products: The products; those outside of the range of a chart are left out.
    """
    drawn = [
        product
        for product in products
        if can_draw(product.point.intensity, product.point.tflops)
    ]
    ridges = [roof.ridge for roof in roofs.values()]
    peaks = [roof.tflops for roof in roofs.values()]
    x = log_axis(
        "arithmetic intensity, FLOP/byte",
        [*ridges, *(2 * ridge for ridge in ridges), *_intensities(drawn)],
    )
    points = [product.point.tflops for product in drawn]
    y = log_axis("TFLOPS", [*peaks, *(points or [min(peaks) / 10])])
    series = [
        Series(
            name=f"{name}: {roof.tflops:.4g} TFLOPS, {roof.bandwidth_gbs:g} GB/s",
            marks=_roof_marks(roof, (x.low, x.high), y.low),
            style="roof",
            color=index,
        )
        for index, (name, roof) in enumerate(roofs.items())
    ]
    return Chart(title=title, x=x, y=y, series=(*series, *_of_kernels(drawn)))


def _intensities(products: Sequence[Product]) -> list[float]:
    return [product.point.intensity for product in products]


def _roof_marks(
    roof: Roofline, ends: tuple[float, float], bottom: float
) -> tuple[Mark, ...]:
    """Returns the corners of a roof between the ends of the horizontal axis."""
    low, high = ends
    start = max(low, bottom * 1000 / roof.bandwidth_gbs)
    corners = sorted({min(start, roof.ridge), roof.ridge, high})
    return tuple(Mark(x=x, y=roof.attainable_tflops(x)) for x in corners)


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
            name=f"{kernel} ({origin})",
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


def _mark(product: Product, is_labelled: bool) -> Mark:
    point = product.point
    text = (
        f"{product.text}, {product.kernel}: {point.tflops:.3g} TFLOPS, "
        f"{point.intensity:.3g} FLOP/byte, {point.seconds * 1e3:.4g} ms "
        f"({product.origin})"
    )
    label = f"{product.rows} {'row' if product.rows == 1 else 'rows'}"
    return Mark(
        x=point.intensity,
        y=point.tflops,
        text=text,
        label=label if is_labelled else "",
    )
