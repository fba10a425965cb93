"""Charts as values, which `figures` draws: rooflines and staircases."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Unpack

from mlx_marlin.backends import planner
from mlx_marlin.measure.profiling import Point, Roofline
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.problem import Problem

LEAST, MOST = 1e-9, 1e9
"""Range of the values that can be drawn; no figure of a device is outside of it."""


class Mark(NamedTuple):
    """A point of a series, with a short text below it or ""."""

    x: float
    y: float
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points with one name."""

    name: str  # Name in the legend, with where the figures come from
    marks: tuple[Mark, ...]  # The points, in ascending order of x
    style: Literal["points", "line", "roof"]  # How they are connected
    # Whether they were measured. Others are drawn hollow or dashed
    is_measured: bool = False
    color: int = 0  # Index of the colour; series that belong together share one


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Series over two axes."""

    title: str  # What it shows
    x: str  # Name of the horizontal axis, with the unit
    y: str  # Likewise, of the vertical one
    series: tuple[Series, ...]  # The series
    log_base: int | None = None  # Base of the axes if they are logarithmic


def can_draw(*values: float) -> bool:
    """Returns whether values are finite, above 0 and in the range of a chart."""
    return all(LEAST <= value <= MOST for value in values)


STOCK = "stock"
"""First word of the names of stock MLX's kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product on a roofline."""

    point: Point  # Its operations, bytes and time
    rows: int  # Rows of x
    kernel: str  # The kernel; names of stock MLX's begin with `STOCK`
    origin: str  # "measured", "predicted" or "assumed"


def roofline(
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


MOST_ROWS = 64
"""Rows of a chart that the model draws; one with more is logarithmic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The time of a product with some rows."""

    rows: int  # Rows of x
    seconds: float  # The time
    name: str  # What computes it
    source: str  # "measured", "predicted" or another word for where the time comes from


def predicted_samples(
    problem: Problem, device: PlanningDevice, **overrides: Unpack[PlanOverrides]
) -> Iterator[Sample]:
    """Yields the times of the cost model for 1 to `MOST_ROWS` rows."""
    for rows in range(1, MOST_ROWS + 1):
        try:
            choice = planner.compare(
                replace(problem, m=rows), device=device, **overrides
            )
        except ValueError:
            continue
        seconds = choice.prediction.seconds
        yield Sample(rows=rows, seconds=seconds, name="ours", source="predicted")


def staircase(title: str, samples: Sequence[Sample]) -> Chart | None:
    """Returns the chart of times of one product."""
    drawn = [
        sample
        for sample in samples
        if can_draw(sample.rows, _microseconds(sample)) and sample.rows >= 1
    ]
    rows = sorted({sample.rows for sample in drawn})
    if len(rows) < 2:
        return None
    return Chart(
        title=title,
        x="rows",
        y="time of the product, us",
        log_base=2 if rows[-1] > MOST_ROWS else None,
        series=tuple(_series(drawn)),
    )


def _microseconds(sample: Sample) -> float:
    return sample.seconds * 1e6


def _series(samples: Sequence[Sample]) -> Iterator[Series]:
    names = list(dict.fromkeys(sample.name for sample in samples))
    groups: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for sample in samples:
        points = groups.setdefault((sample.name, sample.source), [])
        points.append((sample.rows, _microseconds(sample)))
    for (name, source), points in groups.items():
        shortest = dict(sorted(points, reverse=True))  # the last of the same rows stays
        yield Series(
            name=f"{name} ({source})",
            marks=tuple(Mark(*point) for point in sorted(shortest.items())),
            style="line",
            is_measured=source == "measured",
            color=names.index(name),
        )
