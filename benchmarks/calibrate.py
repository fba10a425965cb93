"""Refits the cost model's constants to a measured result file, and prints the changes.

Fitted are the rates of the chip's generation (`backends.metal.cost.rates`), the overlap
in stock's matrix kernels (`backends.metal.stock.prediction`), and what a chain adds to
each product, which the model does not have. The sum of squared logarithms of measured
over predicted times is minimized, with large errors weighted less. What a file does not
determine, alone or in combination, stays near its present value. Rows of `gemm_staged`,
whose cost is a guess, and independent launches are not used.

Files of the census are compared with our counts of registers and instructions, and
their table is written into docs/results.md. Nothing else is written: what should change
is printed.

Usage: python -m benchmarks.calibrate FILE [FILE ...]
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import census_table
from benchmarks.log_fit import Vector, fitted
from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.cost import rates
from mlx_marlin.backends.metal.cost.rates import Rates
from mlx_marlin.backends.metal.device import Device, chips, key
from mlx_marlin.backends.metal.stock import prediction
from mlx_marlin.measure import result_file, shapes
from mlx_marlin.measure.result_file import ResultFile
from mlx_marlin.measure.rows import CHAIN, STOCK, ProductRow
from mlx_marlin.planning.choice import aligned
from mlx_marlin.planning.problem import Problem, problem_of

LEAST_ROWS = 8
OVERHEAD = 2e-6
"""Seconds that a chain adds to a product, at the start of the fit."""
UNCERTAIN = 0.2
"""Relative standard error above which a constant is not determined by a file."""
STARTS = (0.75, 1.0, 1.25)
"""Factors on the bandwidth to start from: far off, no row may depend on it."""

PLANNING = ("mlx_marlin.backends", "mlx_marlin.planning")
"""Packages whose caches depend on the constants."""


@dataclass(frozen=True, slots=True)
class Constants:
    """What is fitted.

    Attributes:
        rates: The rates of the chip's generation.
        overlap: Factor on the slots of stock's matrix kernels.
        overhead: Seconds that a chain adds to each product.
    """

    rates: Rates
    overlap: float
    overhead: float

    def values(self) -> dict[str, float]:
        """Returns all numbers by name, as `NAMES` has them."""
        further = {"overlap": self.overlap, "overhead": self.overhead}
        return asdict(self.rates) | further


NAMES = (*(field.name for field in fields(Rates)), "overlap", "overhead")


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants that fit a file.

    Attributes:
        constants: The constants.
        errors: Their relative standard errors, by name.
    """

    constants: Constants
    errors: dict[str, float]

    @property
    def determined(self) -> tuple[str, ...]:
        """Names of the constants that the file determines by themselves."""
        return tuple(name for name in NAMES if self.errors[name] < UNCERTAIN)


def device_of(result: ResultFile) -> Device:
    """Returns the chip that a result was measured on.

    Raises:
        ValueError: If it is not an Apple chip of the table, or nothing was measured.
    """
    machine = result.machine
    if not result.is_measured:
        raise ValueError(
            f"the times on {machine.chip!r} are predicted, or there are none: only "
            f"measured ones can calibrate the model"
        )
    if key(machine.chip) not in chips():
        raise ValueError(f"{machine.chip!r} is not an Apple chip of the table")
    device = Device.named(machine.chip, machine.cores)
    return replace(device, arch=machine.architecture)


def rows_of(result: ResultFile) -> list[ProductRow]:
    """Returns the rows that the model is fitted to.

    Raises:
        ValueError: If there are too few.
    """
    found = [
        row
        for row in result.products
        if row.clock == CHAIN
        and row.timing.source == "measured"
        and (row.arm == STOCK or (row.plan is not None and not row.plan.buffers))
    ]
    if len(found) < LEAST_ROWS:
        raise ValueError(
            f"{len(found)} rows of chains have a plan or are of {STOCK}, expected at "
            f"least {LEAST_ROWS}"
        )
    return found


def present(device: Device) -> Constants:
    """Returns the model's present constants for a device."""
    overlap = prediction.OVERLAP.get(device.generation, 1.0)
    return Constants(rates.rates_of(device), overlap, OVERHEAD)


@contextmanager
def assumed(constants: Constants, device: Device) -> Iterator[None]:
    """Replaces the model's constants of a device's generation for a while."""
    generation, tables = device.generation, (rates.RATES, prediction.OVERLAP)
    before = [dict(table) for table in tables]
    rates.RATES[generation] = constants.rates
    prediction.OVERLAP[generation] = constants.overlap
    _forget()
    try:
        yield
    finally:
        for table, old in zip(tables, before, strict=True):
            table.clear()
            table.update(old)
        _forget()


def predicted(row: ProductRow, device: Device) -> float:
    """Returns the model's seconds of a row, without what a chain adds."""
    if row.plan is None:
        return prediction.stock_prediction(row.problem, device).seconds
    return planner.predict(row.plan, device).seconds


def fit(rows: Sequence[ProductRow], device: Device) -> Fit:
    """Returns the constants that fit rows best.

    Args:
        rows: Rows of `rows_of`.
        device: The chip that they were measured on.
    """
    start = np.log([*present(device).values().values()])
    measured = np.log([row.timing.seconds for row in rows])

    def errors(logarithms: Vector) -> Vector:
        constants = _constants(logarithms)
        with assumed(constants, device):
            seconds = [predicted(row, device) + constants.overhead for row in rows]
        return np.log(seconds) - measured

    bandwidth = np.array([name == "bandwidth" for name in NAMES])
    starts = [start + np.log(factor) * bandwidth for factor in STARTS]
    best, spread = fitted(errors, starts, start)
    return Fit(
        constants=_constants(best),
        errors=dict(zip(NAMES, spread.tolist(), strict=True)),
    )


def _constants(logarithms: Vector) -> Constants:
    *numbers, overlap, overhead = np.exp(logarithms).tolist()
    named = dict(zip(NAMES, numbers, strict=False))  # the last two are not rates
    return Constants(Rates(**named), overlap, overhead)


def _forget() -> None:
    """Clears the caches of functions that depend on the constants."""
    for cached in _caches():
        cached.cache_clear()


@lru_cache(maxsize=1)
def _caches() -> list[Any]:
    """Returns the cached functions of planning, without those that read chip tables."""
    found = {
        id(value): value
        for name, module in [*sys.modules.items()]
        if name.startswith(PLANNING) and not name.endswith(".device")
        for value in vars(module).values()
        if hasattr(value, "cache_clear") and not value.__module__.endswith(".device")
    }
    return [*found.values()]


def changes(found: Fit, before: Constants) -> str:
    """Returns a table of the constants before and after."""
    table = [["constant", "now", "fitted", "+-", ""]]
    fitted_values = found.constants.values()
    for name, now in before.values().items():
        after = fitted_values[name]
        if name == "overhead":
            cells = ["not in the model", f"{after * 1e6:.2f} us a product (fitted)"]
        else:
            cells = [f"{now:.4g}", f"{after:.4g}"]
        note = "" if name in found.determined else "not determined by this file alone"
        table.append([name, *cells, f"{found.errors[name]:.1%}", note])
    return aligned(table)


def residuals(rows: Sequence[ProductRow], device: Device, found: Fit) -> str:
    """Returns a table of measured times and the model's errors, before and after."""
    overhead = found.constants.overhead
    before = [predicted(row, device) + overhead for row in rows]
    with assumed(found.constants, device):
        after = [predicted(row, device) + overhead for row in rows]
    table = [["rows x k→n", "arm", "measured", "error now", "error fitted"]]
    for row, old, new in zip(rows, before, after, strict=True):
        seconds, problem = row.timing.seconds, row.problem
        table.append(
            [
                f"{problem.m} x {problem.k}→{problem.n}",
                f"{row.arm}, {problem.layout} layout",
                f"{seconds * 1e6:.2f} us (measured)",
                f"{old / seconds - 1:+.0%}",
                f"{new / seconds - 1:+.0%}",
            ]
        )
    errors = [
        float(np.median(np.abs(np.array(times) / _measured(rows) - 1)))
        for times in (before, after)
    ]
    return (
        f"{aligned(table)}\nmedian error: {errors[0]:.1%} now, {errors[1]:.1%} fitted"
    )


def changed_plans(problems: Sequence[Problem], device: Device, found: Fit) -> list[str]:
    """Returns the products whose plan, or whose server, the fit changes."""

    def decided() -> list[tuple[str, bool]]:
        return [
            (
                planner.choose(problem, device).explain(),
                planner.stock_reason(problem, device) is not None,
            )
            for problem in problems
        ]

    before = decided()
    with assumed(found.constants, device):
        after = decided()
    lines = []
    for problem, (old, was_stock), (new, is_stock) in zip(
        problems, before, after, strict=True
    ):
        if was_stock != is_stock:
            servers = ("our kernels", "stock MLX")
            change = f"{servers[was_stock]} -> {servers[is_stock]}"
        elif old != new and not is_stock:
            change = f"{old} -> {new}"
        else:
            continue
        lines.append(f"{problem.explain()}: {change}")
    return lines


def judged() -> list[Problem]:
    """Returns the products whose plans are compared: those of `mlx-marlin bench`."""
    return [problem_of(m, n, k) for (k, n), m in product(shapes.SHAPES, shapes.ROWS)]


def _measured(rows: Sequence[ProductRow]) -> Vector:
    return np.array([row.timing.seconds for row in rows])


def main(given: Sequence[str] | None = None) -> int:
    """Prints what files say; returns 2 if they cannot calibrate the model."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibrate", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="a result file of a Mac, or all files of a census",
    )
    args = parser.parse_args(given)
    try:
        if census_table.is_census(args.files[0]):
            census = census_table.publish(args.files, census_table.DOCUMENT)
            print(census_table.table(census))
            print("\n".join(["", *census_table.proposals(census)]))
            return 0
        if args.files[1:]:
            raise ValueError(f"{args.files[1]}: expected one result file")
        result = result_file.read(args.files[0])
        device, rows = device_of(result), rows_of(result)
    except (ValueError, OSError) as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 2
    found = fit(rows, device)
    print(f"{device.variant}, {len(rows)} measured rows\n")
    print(changes(found, present(device)))
    print(f"\n{residuals(rows, device, found)}")
    problems = judged()
    plans = changed_plans(problems, device, found)
    print(f"\n{len(plans)} of {len(problems)} products change, by the model:")
    print("\n".join(plans))
    return 0


if __name__ == "__main__":
    sys.exit(main())
