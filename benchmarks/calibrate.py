"""Refits the cost model's constants to a measured result file, and prints the changes.

Fitted are the rates of the chip's generation (`backends.metal.cost.rates`), the overlap
in stock's matrix kernels (`backends.metal.stock.prediction`), and what a chain adds to
each product, which the model does not have. The sum of squared logarithms of measured
over predicted times is minimized, with large errors weighted less. What a file does not
determine, alone or in combination, stays near its present value. Rows of `gemm_staged`,
whose cost is a guess, and independent launches are not used.

Nothing is written: what should change is printed.

Usage: python -m benchmarks.calibrate FILE
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.cost import rates
from mlx_marlin.backends.metal.cost.rates import Rates
from mlx_marlin.backends.metal.device import Device, chips, key
from mlx_marlin.backends.metal.stock import prediction
from mlx_marlin.benchmarking import result_file, shapes
from mlx_marlin.benchmarking.result_file import ResultFile
from mlx_marlin.benchmarking.rows import STOCK, ProductRow
from mlx_marlin.planning.choice import aligned
from mlx_marlin.planning.problem import Problem, problem_of

LEAST_ROWS = 8
OVERHEAD = 2e-6
"""Seconds that a chain adds to a product, at the start of the fit."""
STEP = 1e-4
"""Relative step of the numerical derivatives."""
ITERATIONS = 60
OUTLIER = 0.1
"""Logarithmic error from which a row counts less."""
CONVERGED = 1e-9
NOISE, PRIOR = 0.01, 0.5
"""Standard deviations that are expected of the logarithms of times and of constants.
The second keeps constants that a file does not determine where they are."""
RIDGE = (NOISE / PRIOR) ** 2
UNCERTAIN = 0.2
"""Relative standard error above which a constant is not determined by a file."""
STARTS = (0.75, 1.0, 1.25)
"""Factors on the bandwidth to start from: far off, no row may depend on it."""

PLANNING = ("mlx_marlin.backends", "mlx_marlin.planning")
"""Packages whose caches depend on the constants."""

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Constants:
    """What is fitted.

    Attributes:
        matrix_slots: As in `Rates`.
        exposed: As in `Rates`.
        bandwidth: As in `Rates`.
        overlap: Factor on the slots of stock's matrix kernels.
        overhead: Seconds that a chain adds to each product.
    """

    matrix_slots: float
    exposed: float
    bandwidth: float
    overlap: float
    overhead: float


NAMES = tuple(Constants.__dataclass_fields__)


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
        if row.clock == "chain"
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
    return Constants(
        **asdict(rates.rates_of(device)), overlap=overlap, overhead=OVERHEAD
    )


@contextmanager
def assumed(constants: Constants, device: Device) -> Iterator[None]:
    """Replaces the model's constants of a device's generation for a while."""
    generation, tables = device.generation, (rates.RATES, prediction.OVERLAP)
    before = [dict(table) for table in tables]
    rates.RATES[generation] = Rates(
        matrix_slots=constants.matrix_slots,
        exposed=constants.exposed,
        bandwidth=constants.bandwidth,
    )
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
    start = np.log([*asdict(present(device)).values()])
    measured = np.log([row.timing.seconds for row in rows])

    def errors(logarithms: Vector) -> Vector:
        constants = _constants(logarithms)
        with assumed(constants, device):
            seconds = [predicted(row, device) + constants.overhead for row in rows]
        return np.log(seconds) - measured

    bandwidth = np.array([name == "bandwidth" for name in NAMES])
    fits = [
        _least(errors, start + np.log(factor) * bandwidth, start) for factor in STARTS
    ]
    best = min(fits, key=lambda found: _loss(errors(found), found - start))
    slopes = _slopes(errors, best)
    variance = max(float(np.mean(errors(best) ** 2)), NOISE**2)
    square = slopes.T @ slopes / variance + np.eye(len(best)) / PRIOR**2
    spread = np.sqrt(np.diag(np.linalg.inv(square)))
    return Fit(
        constants=_constants(best),
        errors=dict(zip(NAMES, spread.tolist(), strict=True)),
    )


def _constants(logarithms: Vector) -> Constants:
    return Constants(*np.exp(logarithms).tolist())


def _least(errors: Callable[[Vector], Vector], start: Vector, usual: Vector) -> Vector:
    """Returns a local minimum of the loss (Levenberg-Marquardt, reweighted).

    Args:
        errors: The errors of all rows at some logarithms of constants.
        start: Where to start.
        usual: What constants that no row determines should be.
    """
    at, damping = start, 1e-2
    loss = _loss(errors(at), at - usual)
    for _ in range(ITERATIONS):
        found, slopes = errors(at), _slopes(errors, at)
        weights = _weights(found)[:, None]
        square = slopes.T @ (weights * slopes) + RIDGE * np.eye(len(at))
        gradient = slopes.T @ (weights[:, 0] * found) + RIDGE * (at - usual)
        scale = np.diag(np.diag(square) + 1e-9)
        step = np.linalg.solve(square + damping * scale, -gradient)
        candidate = at + np.clip(step, -0.5, 0.5)
        better = _loss(errors(candidate), candidate - usual)
        if better < loss:
            gain, at, loss = loss - better, candidate, better
            damping /= 5
            if gain < CONVERGED * loss:
                break
        elif damping > 1e8:
            break
        else:
            damping *= 5
    return at


def _slopes(errors: Callable[[Vector], Vector], at: Vector) -> Vector:
    steps = STEP * np.eye(len(at))
    columns = [(errors(at + step) - errors(at - step)) / (2 * STEP) for step in steps]
    return np.stack(columns, axis=1)


def _weights(errors: Vector) -> Vector:
    return np.minimum(1, OUTLIER / np.maximum(np.abs(errors), 1e-12))


def _loss(errors: Vector, change: Vector) -> float:
    """Returns Huber's loss of errors, and the price of a change of the constants."""
    size = np.abs(errors)
    large = OUTLIER * (2 * size - OUTLIER)
    loss = np.where(size <= OUTLIER, size**2, large).sum()
    return float(loss + RIDGE * (change**2).sum())


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
    for name in NAMES:
        now, after = getattr(before, name), getattr(found.constants, name)
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
    return [
        problem_of(m, shape.n, shape.k)
        for shape, m in product(shapes.SHAPES, shapes.ROWS)
    ]


def _measured(rows: Sequence[ProductRow]) -> Vector:
    return np.array([row.timing.seconds for row in rows])


def main(given: Sequence[str] | None = None) -> int:
    """Prints what fits a file; returns 2 if it cannot calibrate the model."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibrate", description=__doc__.splitlines()[0]
    )
    parser.add_argument("file", type=Path, help="a result file of a Mac")
    args = parser.parse_args(given)
    try:
        result = result_file.read(args.file)
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
