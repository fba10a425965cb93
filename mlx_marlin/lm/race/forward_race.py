"""Times a model's forward passes: few rows and prompts, with a short cache."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.lm.warm_up import cache_factory
from mlx_marlin.planning.measurement import PROMPTS, Forwards

ROWS = (*range(1, 9), 12, 16)
"""Numbers of rows of a forward pass that is timed."""
LONGEST_PASS = 1.0
"""Seconds of a pass beyond which a longer prompt is not timed."""
FLAT = 16
"""Rows up to which work takes as long as with fewer; then it grows with the rows."""
PREFIX = 4
"""Tokens in the cache before."""
FORWARDS = "_mlx_marlin_forwards"
"""Attribute of a model with its `Forwards`."""
PREDICTED = "_mlx_marlin_predicted_seconds"
"""Attribute of a model with what the cost model says: asking takes a while."""
ROUNDS = 3
"""Times that stock MLX and our kernels take turns."""

Samples = dict[int, list[float]]
"""Rows -> seconds of single passes."""
Seconds = dict[int, tuple[float, float]]
"""Rows -> seconds of a forward pass with stock MLX and with our kernels."""
TIMING = "timing forward passes"


@dataclass(kw_only=True)
class Budget:
    """Time for items of work, each of which has a number of rows."""

    now: Callable[[], float]  # The clock
    end: float  # When the time is over
    # Whether the next item is begun whatever it takes, so that each load finishes one
    needs_one: bool = True
    _latest: tuple[int, float] = field(default=(FLAT, 0.0), init=False)

    @property
    def is_over(self) -> bool:
        """Whether there is no more time."""
        return self.now() >= self.end

    def fits(self, m: int) -> bool:
        """Returns whether an item of m rows fits, by what the latest one took."""
        return self.needs_one or (not self.is_over and self._fits_after_latest(m))

    def _fits_after_latest(self, m: int) -> bool:
        rows, seconds = self._latest
        growth = max(1.0, m / max(rows, FLAT))
        return self.now() + seconds * growth <= self.end

    @contextmanager
    def spending(self, m: int) -> Iterator[None]:
        """Notes what an item of m rows takes."""
        self.needs_one, began = False, self.now()
        yield
        self._latest = m, self.now() - began


def keep(model: nn.Module, forwards: Forwards | None) -> None:
    """Lets a model know its times, and forget those before its layers changed.

    `forwards`: its times; None if they are not known.
    """
    vars(model).pop(PREDICTED, None)
    vars(model).pop(FORWARDS, None)
    if forwards is not None:
        object.__setattr__(model, FORWARDS, forwards)  # no parameter


def can_run(model: nn.Module) -> bool:
    """Returns whether a model takes tokens and a cache, as mlx-lm's do."""
    return cache_factory(model) is not None


def missing(known: Mapping[int, tuple[float, float]]) -> tuple[int, ...]:
    """Returns the rows to time: a prompt only if one of half as many tokens is short.

    `known`: rows -> seconds with stock MLX and with our kernels.
    """
    return tuple(
        m
        for m in (*ROWS, *PROMPTS)
        if m not in known and _is_short(m, {m: max(pair) for m, pair in known.items()})
    )


def _is_short(m: int, seconds: Mapping[int, float]) -> bool:
    """Returns whether m rows are few, or not known to take too long."""
    return m <= PROMPTS[0] or 2 * seconds.get(m // 2, 0.0) <= LONGEST_PASS


def sample(
    model: nn.Module, rows: Sequence[int], samples: int, budget: Budget
) -> Samples:
    """Returns seconds of forward passes, the first of which does not count."""
    found: Samples = {}
    for m in rows:
        known = {rows: times[0] for rows, times in found.items()}
        if not budget.fits(m) or not _is_short(m, known):
            break
        count = 1 if m in PROMPTS else samples
        with budget.spending(m):
            # The first pass compiles its kernels.
            found[m] = passes(model, m, count + 1)[1:]
    return found


def passes(model: nn.Module, m: int, count: int) -> list[float]:
    """Returns the seconds of passes of m rows, each with a cache of its own."""
    make_cache = cache_factory(model)
    assert make_cache is not None
    return [_seconds(model, make_cache(), m) for _ in range(count)]


def medians(
    stock: Sequence[Samples], ours: Sequence[Samples]
) -> dict[int, tuple[float, float]]:
    """Returns the medians with stock MLX and with our kernels, where both ran."""
    found = {}
    for m in dict.fromkeys(m for each in stock for m in each):
        times = [[s for each in arm for s in each.get(m, ())] for arm in (stock, ours)]
        if all(times):
            found[m] = statistics.median(times[0]), statistics.median(times[1])
    return found


@dataclass(kw_only=True)
class Turns:
    """The passes of a model with stock MLX and with our kernels, in turns."""

    model: nn.Module  # The model
    convert: Callable[[], None]  # Converts the model, if it is not
    undo: Callable[[], None]  # Undoes the conversion
    say: Callable[[str], None]  # Says what is being done
    now: Callable[[], float]  # Clock that limits the passes
    deadline: float  # When their time is over
    budget: Budget  # The time for products, which says whether this load needs an item
    conversion: float = 0.0  # Seconds of a conversion
    stock: list[Samples] = field(default_factory=list)  # Of each turn
    ours: list[Samples] = field(default_factory=list)

    def begin(self, rows: Sequence[int], in_place: bool, end: float) -> None:
        """Times stock MLX's first turn, of the model as it is."""
        self.say(f"{TIMING} of stock MLX")
        passes = 1 if in_place else ROUNDS
        self.stock.append(self._sample(rows, passes, end, needs_one=True))

    def take(self, rows: Sequence[int], in_place: bool) -> None:
        """Times the other turns.

        Packed weights have to be unpacked for stock MLX, so that they take one turn of
        several passes. Prompts are timed in the first turn only.
        """
        passes, turns = (1, ROUNDS) if in_place else (ROUNDS, 1)
        for turn in range(turns):
            if turn and not self.has_time:
                return
            self.convert()
            self.say(TIMING)
            is_stocks = len(self.stock) > turn
            end = self.deadline
            if not turn and not is_stocks:
                end = (self.now() + self.deadline) / 2 - self.conversion
            # A pass of stock MLX's needs its counterpart, and each load one item.
            needs_one = is_stocks or self.budget.needs_one
            ours = self._sample(rows, passes, end, needs_one)
            if not ours:
                return
            self.ours.append(ours)
            if not is_stocks:
                self.undo()
                self.say(f"{TIMING} of stock MLX")
                end = self.deadline - self.conversion
                stock = self._sample([*ours], passes, end, needs_one=True)
                self.stock.append(stock)
            rows = [m for m in ours if m not in PROMPTS]

    @property
    def has_time(self) -> bool:
        """Whether stock MLX can have a turn, which takes two conversions."""
        return self.now() + 2 * self.conversion < self.deadline

    def _sample(
        self, rows: Sequence[int], samples: int, end: float, needs_one: bool
    ) -> Samples:
        budget = Budget(now=self.now, end=end, needs_one=needs_one)
        return sample(self.model, rows, samples, budget)


def one_pass(model: nn.Module, m: int) -> mx.array:
    """Returns the logits of m tokens, not evaluated."""
    make_cache = cache_factory(model)
    assert make_cache is not None
    logits: mx.array = model(mx.zeros((1, m), mx.int32), cache=make_cache())
    return logits


def _seconds(model: nn.Module, cache: list[Any], m: int) -> float:
    """Returns the seconds of a pass of m rows after `PREFIX` tokens."""
    _run(model, cache, PREFIX)
    started = perf_counter()
    _run(model, cache, m)
    return perf_counter() - started


def _run(model: nn.Module, cache: list[Any], rows: int) -> None:
    tokens = mx.zeros((1, rows), mx.int32)
    logits = model(tokens, cache=cache)
    states = [each.state for each in cache]
    # mlx-lm does not compute the logits of a prompt.
    mx.eval(states if rows in PROMPTS else [logits, states])
