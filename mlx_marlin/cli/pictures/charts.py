"""Charts as values: series over two axes, which `plots` draws."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

LEAST, MOST = 1e-9, 1e9
"""Range of the values that can be drawn; no figure of a device is outside of it."""


class Mark(NamedTuple):
    """A point of a series, with a short text below it or ""."""

    x: float
    y: float
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points with one name.

    Attributes:
        name: Name in the legend, with where the figures come from.
        marks: The points, in ascending order of x.
        style: How they are connected.
        is_measured: Whether they were measured. Others are drawn hollow or dashed.
        color: Index of the colour; series that belong together share one.
    """

    name: str
    marks: tuple[Mark, ...]
    style: Literal["points", "line", "area", "roof"]
    is_measured: bool = False
    color: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Series over two axes.

    Attributes:
        title: What it shows.
        x: Name of the horizontal axis, with the unit.
        y: Likewise, of the vertical one.
        series: The series.
        log_base: Base of the axes if they are logarithmic.
        ends: Ends of linear axes that begin at 0; None for those of the points.
    """

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    log_base: int | None = None
    ends: tuple[float, float] | None = None


def can_draw(*values: float) -> bool:
    """Returns whether values are finite, above 0 and in the range of a chart."""
    return all(LEAST <= value <= MOST for value in values)
