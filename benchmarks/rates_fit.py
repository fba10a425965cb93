"""Fits the cost model's constants to measured products.

Fitted are the rates of the chip's generation (`backends.metal.rates`), the overlap
in stock's matrix kernels (`benchmarks.stock.prediction`), and what a chain adds to
each product, which the model does not have. The sum of squared logarithms of measured
over predicted times is minimized, with large errors weighted less. What a file does not
determine, alone or in combination, stays near its present value. Rows of `gemm_staged`,
whose cost is a guess, and independent launches are not used.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.log_fit import Vector, fitted
from benchmarks.stock import prediction
from mlx_marlin.backends import planner
from mlx_marlin.backends.metal import main_loop
from mlx_marlin.backends.metal.device import Device, chips, key
from mlx_marlin.backends.metal.main_loop import Rates
from mlx_marlin.measure.result_file import ResultFile
from mlx_marlin.measure.rows import CHAIN, STOCK, ProductRow

LEAST_ROWS = 8
OVERHEAD = 2e-6
"""Seconds that a chain adds to a product, at the start of the fit."""
UNCERTAIN = 0.2
"""Relative standard error above which a constant is not determined by a file."""
STARTS = (0.75, 1.0, 1.25)
"""Factors on the bandwidth to start from: far off, no row may depend on it."""

PLANNING = ("mlx_marlin.backends", "mlx_marlin.planning", "benchmarks.stock")
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
    return Constants(main_loop.rates_of(device), overlap, OVERHEAD)


@contextmanager
def assumed(constants: Constants, device: Device) -> Iterator[None]:
    """Replaces the model's constants of a device's generation for a while."""
    generation, tables = device.generation, (main_loop.RATES, prediction.OVERLAP)
    before = [dict(table) for table in tables]
    main_loop.RATES[generation] = constants.rates
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


def measured_seconds(rows: Sequence[ProductRow]) -> Vector:
    """Returns the measured times of rows, in seconds."""
    return np.array([row.timing.seconds for row in rows])
