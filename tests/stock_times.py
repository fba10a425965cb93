"""Published times of stock MLX beside those of our model of it.

The times are those of `data/published_times.json`. Run as a program, this file prints
every time beside the model's.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stock.prediction import StockPrediction, stock_prediction
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.planning.problem import problem_of

FILE = Path(__file__).parent / "data" / "published_times.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Products whose time was published for several numbers of rows."""

    clock: str  # "chain" or "independent"
    chip: str  # Its name and core count, such as "M3 Max, 40"
    source: str  # A thread on MLX's GitHub, or a repository and file
    products: tuple[tuple[int, int, int], ...]  # Count, k and n
    name: str = ""  # What the table calls several products
    bits: int = 4
    group_size: int = 64
    dtype: str = "float16"
    # Time of the other operations of a chain, for each product; fitted
    link_us: float = 0.0
    # Whether the other operations of a forward are taken to need the time of one row
    # less that of the model
    rest: bool = False
    per: int = 0  # Rows of the product that ratios are taken to; 0 for times

    @property
    def device(self) -> Device:
        name, _, cores = self.chip.partition(", ")
        return Device.named(name, int(cores))

    @property
    def launches(self) -> int:
        return sum(count for count, _, _ in self.products)

    @property
    def weight_bytes(self) -> int:
        return sum(
            count * self._problem(1, k, n).weight_bytes for count, k, n in self.products
        )

    def model_ms(self, m: int) -> float:
        """The model's time of `m` rows, without other operations of a forward."""
        seconds = sum(
            count * self._seconds(stock_prediction(self._problem(m, k, n), self.device))
            for count, k, n in self.products
        )
        return seconds * 1e3 + self.launches * self.link_us * 1e-3

    def _seconds(self, prediction: StockPrediction) -> float:
        chain = self.clock == "chain"
        return prediction.seconds if chain else prediction.independent_seconds

    def _problem(self, m: int, k: int, n: int) -> Any:
        return problem_of(
            m, n, k, bits=self.bits, group_size=self.group_size, dtype=self.dtype
        )

    @property
    def described(self) -> str:
        """The products without their rows."""
        if self.name:
            return self.name
        ((count, k, n),) = self.products
        return f"{k}→{n}" if count == 1 else f"{count} x {k}→{n}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published time of a series."""

    series: Series  # The products
    m: int  # Rows
    value: float  # Milliseconds, or the ratio
    why: str = ""  # The note that sets it apart; empty if nothing does
    # Whether it is out of sample: of a chain that nothing was fitted to
    is_out: bool = False
    # The published time of one row, if that is the series' reference
    one_row_ms: float = 0.0

    @property
    def is_reference(self) -> bool:
        """Whether the row sets the time of the other operations of a forward."""
        return self.series.rest and self.m == 1

    def predicted(self) -> float:
        """The model's value."""
        ms = self.series.model_ms(self.m)
        if self.series.per:
            return ms / self.series.model_ms(self.series.per)
        if self.series.rest:
            ms += max(0.0, self.one_row_ms - self.series.model_ms(1))
        return ms

    def error(self) -> float:
        return self.predicted() / self.value - 1

    def __str__(self) -> str:
        series = self.series
        return f"{series.clock}, {series.chip}: {self.m} x {series.described}"

    def line(self) -> str:
        """The row, where it is from, the figure, the model's error and the note."""
        series = self.series
        form = f"{series.source}; {series.bits} bits, groups of {series.group_size}"
        unit = f"times m={series.per}" if series.per else "ms"
        error = "reference" if self.is_reference else f"{self.error():+.0%}"
        more = (self.why, "out of sample" * self.is_out)
        apart = ", ".join([error, *filter(None, more)])
        return f"{self} ({form}): {self.value:.3f} {unit}, {apart}"


def _rows(entry: dict[str, Any]) -> list[Row]:
    """Returns the rows of an entry of the file."""
    fields = dict(entry)
    times, notes = fields.pop("times"), fields.pop("notes", {})
    out = fields.pop("out", [])
    unit = fields.pop("unit", "ms")
    fields["products"] = tuple(map(tuple, fields["products"]))
    series = Series(**fields)
    if unit == "GB/s":
        size = series.weight_bytes
        times = {m: size / value / 1e6 for m, value in times.items()}
    return [
        Row(
            series=series,
            m=int(m),
            value=value,
            why=notes.get(m, ""),
            is_out=m in out,
            one_row_ms=times.get("1", 0.0),
        )
        for m, value in times.items()
    ]


_CONTENT: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
NOTES: dict[str, str] = _CONTENT["notes"]
"""What sets a row apart, by letter."""
ROWS: list[Row] = [row for entry in _CONTENT["series"] for row in _rows(entry)]


if __name__ == "__main__":
    print(*(row.line() for row in ROWS), "", sep="\n")
    print(*(f"{letter}: {text}" for letter, text in NOTES.items()), sep="\n")
