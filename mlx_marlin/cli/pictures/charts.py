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
    """Points with one name."""

    name: str  # Name in the legend, with where the figures come from
    marks: tuple[Mark, ...]  # The points, in ascending order of x
    style: Literal["points", "line", "area", "roof"]  # How they are connected
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
    # Ends of linear axes that begin at 0; None for those of the points
    ends: tuple[float, float] | None = None


def can_draw(*values: float) -> bool:
    """Returns whether values are finite, above 0 and in the range of a chart."""
    return all(LEAST <= value <= MOST for value in values)
