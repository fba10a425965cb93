"""Times of products that depend on each other, their medians, and which one wins.

What is compared is sampled by turns, in an order that is drawn anew for every round, so
that a clock or a temperature that drifts meets all alike.
"""

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import TypeVar

import mlx.core as mx

from mlx_marlin.backends.launch import Product

Key = TypeVar("Key")
Sample = Callable[[], float]
"""Takes one sample: seconds of one product."""
Now = Callable[[], float]
Weight = tuple[mx.array, mx.array, mx.array]
"""Codes, scales and biases, as `launch.product` takes them."""

ROUNDS = 7
"""Fewest samples of each; two of seven may be upset and the quartiles still hold."""
MOST_ROUNDS = 101
SHORTEST, LONGEST = 4, 256
"""Products of a chain: more than a few, so that its ends do not count, and not more
than MLX holds in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What samples say: their median, and the range of the middle half of them."""

    median: float
    range: float = 0.0
    samples: int = 1

    @staticmethod
    def of(samples: Sequence[float]) -> "Spread":
        """Returns the spread of at least one sample."""
        if len(samples) == 1:
            return Spread(median=samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Spread(median=median, range=high - low, samples=len(samples))

    def beats(self, other: "Spread") -> bool:
        """Whether this is faster by more than either's noise."""
        return other.median - self.median > max(self.range, other.range)


def winner(spreads: Mapping[Key, Spread]) -> Key:
    """Returns the first that the fastest does not beat.

    So the order decides among those that noise does not tell apart: who stands first,
    as the model's choice does, stays unless another is faster for sure.

    Args:
        spreads: What was measured, at least one.
    """
    fastest = min(spreads.values(), key=lambda each: each.median)
    return next(key for key, each in spreads.items() if not fastest.beats(each))


def interleaved(
    arms: Mapping[Key, Sample],
    *,
    seconds: float,
    seed: int = 0,
    now: Now = perf_counter,
) -> dict[Key, Spread]:
    """Samples every arm once a round, until the time is over.

    Args:
        arms: What to compare.
        seconds: For all rounds together; a few are made even if they take longer.
        seed: Of the order in each round.
        now: The clock of the rounds.
    """
    draw = random.Random(seed)
    samples: dict[Key, list[float]] = {key: [] for key in arms}
    started = now()
    for made in range(MOST_ROUNDS):
        if made >= ROUNDS and now() - started >= seconds:
            break
        for key in draw.sample([*arms], len(arms)):
            samples[key].append(arms[key]())
    return {key: Spread.of(taken) for key, taken in samples.items()}


def chain(
    product: Product,
    x: mx.array,
    weights: Iterator[Weight],
    length: int,
    now: Now = perf_counter,
) -> float:
    """Evaluates products of which each needs the last one's result.

    The sum is the cheapest dependency that the GPU must wait for: `mx.depends` orders
    the graph only. It starts from x each time, so that values cannot grow.

    Args:
        product: What to time.
        x: Activations.
        weights: The weights to take, one after the other.
        length: Products.
        now: The clock.

    Returns:
        Seconds of one product, with its share of the evaluation.
    """
    latest = x
    for weight in islice(weights, length):
        latest = x + product(latest, *weight)[..., :1]
    started = now()
    mx.eval(latest)
    return (now() - started) / length


def chain_length(seconds_each: float, seconds: float) -> int:
    """Returns the products that fill a time, within what a chain may have."""
    wanted = int(seconds / seconds_each) if seconds_each > 0 else LONGEST
    return min(max(wanted, SHORTEST), LONGEST)
