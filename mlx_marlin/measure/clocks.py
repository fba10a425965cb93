"""The clocks of products: wall time, or in the emulator the cost model's time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, TypeVar

import mlx.core as mx

from mlx_marlin.backends import planner, selection
from mlx_marlin.backends.graph import Product
from mlx_marlin.measure import operands, timing
from mlx_marlin.measure.operands import Operands
from mlx_marlin.measure.rows import Timing
from mlx_marlin.measure.timing import Spread, Weight
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem

Key = TypeVar("Key")


Measure = Callable[[Mapping[Any, Product], Operands], dict[Any, Spread]]
"""Measures the products of arms by their keys, which for the cost model are plans."""
Sampler = Callable[[Product, mx.array, Iterator[Weight], int], float]
"""`timing.chain` or `timing.independent`."""
SECONDS = 2.0
"""Default measuring time of a problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A way to measure products."""

    name: str  # Name of the clock in results
    measure: Measure  # Measures all arms in chains of dependent products
    measure_independent: Measure  # Measures all arms in products that may overlap
    # Returns the number of weights to measure a problem with
    weights: Callable[[Problem], int]
    times_stock: bool  # Whether it measures, so that it can time stock MLX too

    def timing(self, spread: Spread) -> Timing:
        """Returns a spread as a row of a result file has it."""
        return Timing(
            seconds=spread.median,
            method=self.name,
            range=spread.range,
            samples=spread.samples,
            drift=spread.drift,
        )


def clock_of(device: PlanningDevice, seconds: float = SECONDS) -> Clock:
    """Returns the clock of the current back end."""
    missing = selection.missing()
    if missing is not None:
        raise ValueError(f"{missing}: nothing can be measured")
    backend = selection.backend()
    if backend in selection.ON_GPU:
        timed = partial(wall_time, seconds=seconds)
        return Clock(
            name="wall time",
            measure=timed,
            measure_independent=partial(timed, sampler=timing.independent),
            weights=lambda problem: operands.weight_count(problem, device),
            times_stock=True,
        )
    if backend == "emulator":
        modelled = partial(cost_model, device=device)
        return Clock(
            name="cost model",
            measure=modelled,
            measure_independent=partial(modelled, overlapped=True),
            weights=lambda _: 1,
            times_stock=False,
        )
    raise ValueError(
        f"nothing can be measured: stock MLX serves every call, because "
        f"{selection.choice()[1]}"
    )


def wall_time(
    products: Mapping[Key, Product],
    inputs: Operands,
    seconds: float,
    sampler: Sampler = timing.chain,
    rounds: int = timing.ROUNDS,
) -> dict[Key, Spread]:
    """Measures the wall time of products in chains, or of independent ones."""
    weights = cycle(inputs.weights)
    x = inputs.x
    for product in products.values():
        sampler(product, x, weights, 1)  # compiles the kernels
    # Determines the length of the samples.
    short = [_seconds(sampler, product, x, weights) for product in products.values()]
    seconds_of_sample = seconds / (rounds * len(products))
    length = timing.chain_length(min(short), seconds_of_sample)

    def sampled(product: Product) -> timing.Sample:
        return lambda: sampler(product, x, weights, length)

    samples = {arm: sampled(product) for arm, product in products.items()}
    return timing.interleaved(samples, seconds=seconds, least=rounds)


def _seconds(
    sampler: Sampler, product: Product, x: mx.array, weights: Iterator[Weight]
) -> float:
    """Returns the seconds of a product: one is enough if it takes long."""
    once = sampler(product, x, weights, 1)
    if once >= timing.LONG:
        return once
    return sampler(product, x, weights, timing.SHORTEST)


def cost_model(
    products: Mapping[Plan, Product],
    _: Operands,
    device: PlanningDevice,
    overlapped: bool = False,
) -> dict[Plan, Spread]:
    """Predicts the times of plans, as everything else does that predicts them."""
    predicted = {plan: planner.predict(plan, device) for plan in products}
    return {
        plan: Spread(median=each.independent_seconds if overlapped else each.seconds)
        for plan, each in predicted.items()
    }
