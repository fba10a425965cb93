"""Measures chains of dependent products and independent ones, and compares medians.

Samples of all arms are interleaved, in a random order for each round, so that drift of
the clock rate or the temperature affects all arms alike.
"""

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import TypeVar

import mlx.core as mx

from mlx_marlin.backends.graph import Product

Key = TypeVar("Key")
Sample = Callable[[], float]
"""Measures one sample: seconds of one product."""
Now = Callable[[], float]
Weight = tuple[mx.array, ...]
"""Codes, scales and biases, as `graph.product` expects them."""

ROUNDS = 7
"""Least number of samples. The quartiles of seven samples tolerate two outliers."""
MOST_ROUNDS = 101
DRAW = 0.03
"""How much faster than stock MLX a plan must be to serve. Less is a draw."""
NOISE = 0.1
"""Interquartile range, relative to the median, above which a time is noise."""
SHORTEST, LONGEST = 4, 256
"""Length of a chain: at least a few products, so that its ends are negligible, and at
most as many as MLX keeps in flight."""
LONG = 5e-3
"""Seconds of a product from which on the ends of a chain of one are negligible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and interquartile range of samples."""

    median: float  # Their median
    range: float = 0.0  # Their interquartile range
    samples: int = 1  # Their number
    # Median of the second half over that of the first, minus 1: a chip that slows down
    # as it warms up has a positive drift
    drift: float = field(default=0.0, compare=False)

    @staticmethod
    def of(samples: Sequence[float]) -> "Spread":
        """Returns the spread of at least one sample, in the order of their time."""
        if len(samples) == 1:
            return Spread(median=samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        half = len(samples) // 2
        drift = statistics.median(samples[-half:]) / statistics.median(samples[:half])
        return Spread(
            median=median, range=high - low, samples=len(samples), drift=drift - 1
        )

    @property
    def is_noisy(self) -> bool:
        """Whether the samples differ by more than `NOISE`."""
        return self.range > NOISE * self.median

    def wins(self, stock: "Spread") -> bool:
        """Returns whether this median is smaller than stock MLX's by `DRAW`."""
        return self.median <= (1 - DRAW) * stock.median

    def beats(self, other: "Spread") -> bool:
        """Returns whether this median is smaller by more than both ranges."""
        return other.median - self.median > max(self.range, other.range)


def winner(spreads: Mapping[Key, Spread]) -> Key:
    """Returns the first arm that the fastest arm does not beat.

    The order decides among arms whose difference is within the noise. The choice of the
    cost model comes first, so it is replaced only by a plan that is reliably faster.
    """
    fastest = min(spreads.values(), key=lambda spread: spread.median)
    return next(key for key, spread in spreads.items() if not fastest.beats(spread))


def interleaved(
    arms: Mapping[Key, Sample],
    *,
    seconds: float,
    least: int = ROUNDS,
    seed: int = 0,
    now: Now = perf_counter,
) -> dict[Key, Spread]:
    """Samples all arms once per round until the time is over."""
    draw = random.Random(seed)
    samples: dict[Key, list[float]] = {key: [] for key in arms}
    started = now()
    for rounds in range(MOST_ROUNDS):
        if rounds >= least and now() - started >= seconds:
            break
        for key in draw.sample([*arms], len(arms)):
            samples[key].append(arms[key]())
    return {key: Spread.of(values) for key, values in samples.items()}


def chain(
    product: Product,
    x: mx.array,
    weights: Iterator[Weight],
    length: int,
    now: Now = perf_counter,
) -> float:
    """Measures a chain of products, each of which needs the previous result.

    Adding one column of the result to x is the cheapest dependency that the GPU has to
    wait for; `mx.depends` only orders the graph. Each sum starts from x, so that values
    do not grow.
    """
    latest = x
    for weight in islice(weights, length):
        latest = x + product(latest, *weight)[..., :1]
    started = now()
    mx.eval(latest)
    return (now() - started) / length


def independent(
    product: Product,
    x: mx.array,
    weights: Iterator[Weight],
    length: int,
    now: Now = perf_counter,
) -> float:
    """Measures products that do not depend on each other, evaluated together.

    The GPU may run several of them at a time, which hides further dispatches and idle
    cores. The arguments and the result are those of `chain`; the addition of `chain` is
    part of each product here too.
    """
    results = [x + product(x, *weight)[..., :1] for weight in islice(weights, length)]
    started = now()
    mx.eval(results)
    return (now() - started) / length


def chain_length(seconds_each: float, seconds: float) -> int:
    """Returns the number of products that takes `seconds`, within the limits."""
    length = int(seconds / seconds_each) if seconds_each > 0 else LONGEST
    least = 1 if seconds_each >= LONG else SHORTEST
    return min(max(length, least), LONGEST)
