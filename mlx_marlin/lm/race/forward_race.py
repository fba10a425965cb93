"""Times a model's forward passes: few rows and prompts, with a short cache."""

import statistics
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.lm.race.budget import Budget
from mlx_marlin.lm.warm_up import cache_factory
from mlx_marlin.planning.measurement import PROMPTS, Forwards

ROWS = (*range(1, 9), 12, 16)
"""Numbers of rows of a forward pass that is timed."""
LONGEST_PASS = 1.0
"""Seconds of a pass beyond which a longer prompt is not timed."""
PROMPT, DECODED = 512, 256
"""Tokens of a prompt and of an answer, by whose time packed weights are judged."""
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


def with_prompt(found: Mapping[int, tuple[float, float]]) -> tuple[float, float] | None:
    """Returns the seconds of a prompt of `PROMPT` tokens and `DECODED` further ones.

    Returns None if they are not known. Half the prompt, twice, stands for one that
    takes too long to be timed.
    """
    prompt, half = found.get(PROMPT), found.get(PROMPT // 2)
    if prompt is None and half is not None:
        prompt = 2 * half[0], 2 * half[1]
    one = found.get(1)
    if one is None or prompt is None:
        return None
    return prompt[0] + DECODED * one[0], prompt[1] + DECODED * one[1]


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
