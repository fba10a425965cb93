"""Times a model's forward passes with few rows and a short cache."""

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.lm.warm_up import cache_factory
from mlx_marlin.planning.measurement import Forwards

ROWS = (*range(1, 9), 12, 16)
"""Numbers of rows of a forward pass that is timed."""
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


def keep(model: nn.Module, forwards: Forwards | None) -> None:
    """Lets a model know its times, and forget those before its layers changed.

    Args:
        model: The model, converted or restored.
        forwards: Its times; None if they are not known.
    """
    vars(model).pop(PREDICTED, None)
    vars(model).pop(FORWARDS, None)
    if forwards is not None:
        object.__setattr__(model, FORWARDS, forwards)  # no parameter


def can_run(model: nn.Module) -> bool:
    """Returns whether a model takes tokens and a cache, as mlx-lm's do."""
    return cache_factory(model) is not None


def sample(
    model: nn.Module, rows: Sequence[int], samples: int, is_over: Callable[[], bool]
) -> Samples:
    """Returns seconds of forward passes, the first of which does not count.

    Args:
        model: A model of mlx-lm's.
        rows: Numbers of rows: tokens of one stream.
        samples: Passes to time for each.
        is_over: Whether there is no more time; then the remaining rows are left out.
    """
    make_cache = cache_factory(model)
    assert make_cache is not None
    found: Samples = {}
    for m in rows:
        if is_over():
            break
        # The first pass compiles its kernels.
        times = [_seconds(model, make_cache(), m) for _ in range(samples + 1)]
        found[m] = times[1:]
    return found


def medians(
    stock: Sequence[Samples], ours: Sequence[Samples]
) -> dict[int, tuple[float, float]]:
    """Returns the medians with stock MLX and with our kernels, where both ran."""
    found = {}
    for m in ROWS:
        times = [[s for each in arm for s in each.get(m, ())] for arm in (stock, ours)]
        if all(times):
            found[m] = statistics.median(times[0]), statistics.median(times[1])
    return found


def _seconds(model: nn.Module, cache: list[Any], m: int) -> float:
    """Returns the seconds of a pass of m rows after `PREFIX` tokens."""
    _run(model, cache, PREFIX)
    started = perf_counter()
    _run(model, cache, m)
    return perf_counter() - started


def _run(model: nn.Module, cache: list[Any], rows: int) -> None:
    tokens = mx.zeros((1, rows), mx.int32)
    mx.eval(model(tokens, cache=cache), [each.state for each in cache])
