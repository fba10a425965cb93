"""Fits the constants of the model of stock MLX to published times, and holds some out.

Each constant is fitted to the rows of `tests/data/published_times.json` that it bounds
and that no note rules out: the value with the least sum of squared logarithms of model
over published. Each is fitted again to a part of these rows and judged by the others,
which shows whether it says something about times that it was not fitted to. The
constants in use are in `mlx_marlin/backends/metal/main_loop.py`; nothing is written.

Usage: python -m benchmarks.stock_fit
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from benchmarks.stock import prediction
from benchmarks.stock.prediction import stock_prediction
from mlx_marlin.backends.metal import main_loop
from stock_times import ROWS, Row

MISSED = "q"
"""The note of rows that the model misses for no other reason: they are fitted too."""
FITTED = [row for row in ROWS if row.why in ("", MISSED) and not row.is_reference]
Select = Callable[[Row], bool]


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant and the rows that it is fitted to.

    Attributes:
        name: What the constant is.
        values: Values to try.
        use: Makes the model use a value.
        current: The value in use.
        rows: Which rows bound it.
        parts: Two parts of these rows, by name; each is predicted from the other.
    """

    name: str
    values: tuple[float, ...]
    use: Callable[[float], None]
    current: float
    rows: Select
    parts: dict[str, Select]


def _use_apple9_lanes(value: float) -> None:
    apple9 = replace(main_loop.APPLE9, lane_bytes=value)
    main_loop.RATES |= {"M3": apple9, "M4": apple9}


def _use_slower_bytes(value: float) -> None:
    prediction.SLOWER_BYTES = value


def _use_m5_lanes(value: float) -> None:
    main_loop.M5_MAX = replace(main_loop.M5_MAX, lane_bytes=value)


def _use_m5_bandwidth(value: float) -> None:
    main_loop.M5_MAX = replace(main_loop.M5_MAX, bandwidth=value)


def _use_ultra_lanes(value: float) -> None:
    main_loop.ULTRA_LANES = value


def _chip(row: Row, *names: str) -> bool:
    return row.series.chip.partition(",")[0] in names


def _is_vector(row: Row) -> bool:
    """Whether stock MLX computes a row with `qmv_wide`."""
    return 2 <= row.m <= (11 if _chip(row, "M3 Ultra") else 12)


def _is_chain(row: Row) -> bool:
    return row.series.clock == "chain"


CONSTANTS = (
    Constant(
        name="lane_bytes of M3 and M4",
        values=tuple(range(70, 131)),
        use=_use_apple9_lanes,
        current=main_loop.APPLE9.lane_bytes,
        rows=lambda row: (
            not _is_chain(row) and _is_vector(row) and _chip(row, "M3 Max", "M4 Pro")
        ),
        parts={
            "M3 Max": lambda row: _chip(row, "M3 Max"),
            "M4 Pro": lambda row: _chip(row, "M4 Pro"),
        },
    ),
    Constant(
        name="factor of 8 bits",
        values=tuple(value / 100 for value in range(90, 131)),
        use=_use_slower_bytes,
        current=prediction.SLOWER_BYTES,
        rows=lambda row: (
            _is_chain(row) and row.series.bits == 8 and _chip(row, "M4 Pro")
        ),
        parts={
            "6 and 8 rows": lambda row: row.m <= 8,
            "12 and 16 rows": lambda row: row.m > 8,
        },
    ),
    Constant(
        name="bandwidth of M5 Max",
        values=tuple(value / 100 for value in range(75, 101)),
        use=_use_m5_bandwidth,
        current=main_loop.M5_MAX.bandwidth,
        rows=lambda row: not _is_chain(row) and row.m <= 2 and _chip(row, "M5 Max"),
        parts={
            "one row": lambda row: row.m == 1,
            "two rows": lambda row: row.m == 2,
        },
    ),
    Constant(
        name="lane_bytes of M5",
        values=tuple(range(70, 131)),
        use=_use_m5_lanes,
        current=main_loop.M5_MAX.lane_bytes,
        rows=lambda row: _is_vector(row) and row.m > 2 and _chip(row, "M5 Max"),
        parts={
            "independent": lambda row: not _is_chain(row),
            "chain": _is_chain,
        },
    ),
    Constant(
        name="share of lane_bytes of an Ultra",
        values=tuple(value / 100 for value in range(50, 121)),
        use=_use_ultra_lanes,
        current=main_loop.ULTRA_LANES,
        rows=lambda row: _is_chain(row) and _is_vector(row) and _chip(row, "M3 Ultra"),
        parts={
            "4096→24896": lambda row: row.series.products[0][1] == 4096,
            "8192→4096": lambda row: row.series.products[0][1] == 8192,
        },
    ),
)


@contextmanager
def using(constant: Constant, value: float) -> Iterator[None]:
    """Makes the model use a value for a constant."""
    constant.use(value)
    stock_prediction.cache_clear()
    try:
        yield
    finally:
        constant.use(constant.current)
        stock_prediction.cache_clear()


def cost(rows: Iterable[Row]) -> float:
    """Returns the sum of squared logarithms of model over published."""
    return sum(math.log(1 + row.error()) ** 2 for row in rows)


def fitted(constant: Constant, rows: list[Row]) -> float:
    """Returns the value with the least cost for some rows."""

    def of(value: float) -> float:
        with using(constant, value):
            return cost(rows)

    return min(constant.values, key=of)


def worst(constant: Constant, value: float, rows: list[Row]) -> str:
    """Returns the errors of some rows as text: root mean square, and the largest."""
    with using(constant, value):
        errors = [row.error() for row in rows]
        mean = math.expm1(math.sqrt(cost(rows) / len(rows)))
    return f"{mean:.0%} in the mean, {max(errors, key=abs):+.0%} at most"


def report(constant: Constant) -> None:
    """Prints the fit of a constant and those that leave a part of its rows out."""
    rows = [row for row in FITTED if constant.rows(row)]
    value = fitted(constant, rows)
    print(
        f"\n{constant.name}: in use {constant.current:g}, best fit {value:g} to "
        f"{len(rows)} rows; in use: {worst(constant, constant.current, rows)}"
    )
    for name, of_part in constant.parts.items():
        part = [row for row in rows if of_part(row)]
        others = [row for row in rows if not of_part(row)]
        without = fitted(constant, others)
        print(
            f"  fitted without {name}: {without:g}, which gives its {len(part)} rows "
            f"{worst(constant, without, part)}"
        )


def report_links() -> None:
    """Prints the time of a chain's other operations that one row leaves for them."""
    print("\nother operations of a link of a chain (link_us)")
    for row in FITTED:
        if _sets_link(row):
            series = row.series
            model = series.model_ms(1) / series.launches * 1e3 - series.link_us
            left = row.value / series.launches * 1e3 - model
            print(
                f"  {series.chip}, {series.described}: in use {series.link_us:g} us, "
                f"one row leaves {left:.1f}"
            )


def _sets_link(row: Row) -> bool:
    return bool(row.series.link_us) and row.m == 1


def report_unfitted() -> None:
    """Prints the errors of chains that no constant was fitted to."""
    print("\nchains that no constant was fitted to")
    used = [row for constant in CONSTANTS for row in FITTED if constant.rows(row)]
    for row in FITTED:
        if _is_chain(row) and row not in used and not _sets_link(row):
            series = row.series
            print(f"  {series.chip}, {row.m} x {series.described}: {row.error():+.0%}")


def main() -> int:
    print("The model against published times; nothing is measured here")
    for constant in CONSTANTS:
        report(constant)
    report_links()
    report_unfitted()
    return 0


if __name__ == "__main__":
    sys.exit(main())
