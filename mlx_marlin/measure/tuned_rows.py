"""The times of a tuning run as rows of a result file."""

from collections.abc import Iterator

from mlx_marlin.backends import selection, tuned_results
from mlx_marlin.measure import tuner
from mlx_marlin.measure.rows import (
    CANDIDATE,
    CHAIN,
    METHODS,
    STOCK,
    ProductRow,
    Timing,
)
from mlx_marlin.planning import measurement
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.measurement import Result
from mlx_marlin.planning.problem import Problem


def rows(device: PlanningDevice, date: str) -> Iterator[ProductRow]:
    """Yields the times of every plan that was tuned on this machine on a day.

    Args:
        device: The device that plans are made for.
        date: The day, ISO 8601.
    """
    machine = tuned_results.machine(device, selection.backend())
    for result in tuned_results.read(tuned_results.folder(), machine).results.values():
        if result.date == date and result.clock in METHODS:
            yield from _of_result(result, device)


def _of_result(result: Result, device: PlanningDevice) -> Iterator[ProductRow]:
    problem = result.problem
    if not isinstance(problem, Problem):
        return
    arms = tuner.arms(problem, device, times_stock=True)
    plans = {tuner.name(arm): arm for arm in arms}
    for name, microseconds in result.medians_us.items():
        is_stock = name == measurement.STOCK
        if is_stock or name in plans:
            yield ProductRow(
                problem=problem,
                arm=STOCK if is_stock else CANDIDATE,
                clock=CHAIN,
                timing=Timing(seconds=microseconds * 1e-6, method=result.clock),
                plan=None if is_stock else plans[name],
            )
