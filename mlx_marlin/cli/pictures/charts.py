"""Charts as values: axes and series, which matplotlib or the HTML page draws."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Style = Literal["points", "line", "area", "roof"]

COLORS = (
    "#0077BB",
    "#EE7733",
    "#009988",
    "#CC3311",
    "#AA3377",
    "#997700",
    "#33BBEE",
    "#555555",
)
"""Colours of series, repeated in order: Paul Tol's vibrant scheme and others,
distinguishable with colour blindness. The style sheet of pages has them too, and
brighter ones for dark pages."""
MARKERS = 8
"""Number of shapes of markers."""
LEAST, MOST = 1e-9, 1e9
"""Range of the values that can be drawn; no figure of a device is outside of it."""
MOST_DECADES = 3
"""Decades up to which a logarithmic axis has ticks between the powers of ten."""
TICKS = 6
"""Most ticks of an axis, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis.

    Attributes:
        label: What it shows, with the unit.
        low: Its lower end.
        high: Its upper end.
        ticks: Values with a label, in ascending order.
        is_log: Whether it is logarithmic.
    """

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def position(self, value: float) -> float:
        """Returns where a value is on the axis, from 0 to 1."""
        if self.is_log:
            whole = math.log(self.high / self.low)
            return math.log(value / self.low) / whole
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point of a series.

    Attributes:
        x: Its place on the horizontal axis.
        y: Its place on the vertical axis.
        text: Its description.
        label: A short text below it, or "".
    """

    x: float
    y: float
    text: str = ""
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
    style: Style
    is_measured: bool = False
    color: int = 0

    @property
    def marker(self) -> int:
        """Index of the shape of markers: other series of the colour have another."""
        return (self.color + self.color // len(COLORS)) % MARKERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Series over two axes."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]


def log_axis(label: str, values: Iterable[float]) -> Axis:
    """Returns a logarithmic axis that contains values, which are above 0."""
    values = [*values]
    low, high = _round(min(values), down=True), _round(max(values), down=False)
    if high < 10 * low:
        low, high = _round(low / 2, down=True), _round(high * 2, down=False)
    return Axis(
        label=label, low=low, high=high, ticks=_log_ticks(low, high), is_log=True
    )


def axis_from_zero(label: str, values: Iterable[float]) -> Axis:
    """Returns a linear axis from 0 that contains values, of which one is above 0."""
    most = max(values)
    step = 10.0 ** math.floor(math.log10(most / TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if most <= TICKS * factor * step)
    count = math.ceil(most / step - 1e-9)
    ticks = tuple(float(f"{step * index:.6g}") for index in range(count + 1))
    return Axis(label=label, low=0.0, high=max(ticks[-1], most), ticks=ticks)


def rows_axis(rows: Sequence[int]) -> Axis:
    """Returns an axis of numbers of rows, which is logarithmic for more than 64."""
    most = max(rows)
    if most <= 64:
        step = 8 if most > 16 else 2 if most > 4 else 1
        ticks = (1.0, *(float(tick) for tick in range(step, most + 1, step)))
        return Axis(label="rows", low=0.0, high=float(most), ticks=_distinct(ticks))
    powers = range(most.bit_length() + 1)
    step = -(-len(powers) // (TICKS + 4))
    ticks = tuple(2.0**power for power in powers[::step] if 2**power <= most)
    return Axis(label="rows", low=0.8, high=1.2 * most, ticks=ticks, is_log=True)


def can_draw(*values: float) -> bool:
    """Returns whether values are finite, above 0 and in the range of a chart."""
    return all(LEAST <= value <= MOST for value in values)


def tick_label(value: float) -> str:
    """Returns the text of a tick."""
    return f"{value:.0f}" if 1 <= value < 1e6 and value % 1 == 0 else f"{value:.4g}"


def _round(value: float, down: bool) -> float:
    """Rounds to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    nice = [float(f"{factor * power:.0e}") for factor in (0.5, 1, 2, 5, 10)]
    if down:
        return max(candidate for candidate in nice if candidate <= value)
    return min(candidate for candidate in nice if candidate >= value)


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if high / low <= 10**MOST_DECADES else (1,)
    step = 1 if len(factors) > 1 else -(-(last - first) // TICKS)
    ticks = [
        float(f"{factor}e{power}")
        for power in range(first, last + 1, step)
        for factor in factors
    ]
    return tuple(tick for tick in ticks if low <= tick <= high)


def _distinct(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(dict.fromkeys(values))
