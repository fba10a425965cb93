"""Greedy generation, for the models of the demo."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_marlin.lm.verification.perplexity import Tick, read


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The output of a model for a batch of prompts."""

    tokens: list[list[int]]  # The generated tokens of each sequence
    # For each token, its logit minus the second largest logit
    margins: list[list[float]]
    step_ms: float  # Median milliseconds of a step, which adds a token to each sequence


def generate(
    model: nn.Module, prompts: mx.array, count: int, tick: Tick = lambda: None
) -> Generation:
    """Generates greedily for all prompts at once."""
    cache = make_prompt_cache(model)
    tokens, margins, times = [], [], []
    for logits in read(model, prompts, cache, tick):
        last = logits[:, -1]
    for step in range(count):
        best, lead = _best(last)
        tokens.append(best)
        margins.append(lead)
        if step + 1 < count:
            start = time.perf_counter()
            (last,) = read(model, best[:, None], cache, tick)
            last = last[:, -1]
            times.append(time.perf_counter() - start)
    return Generation(
        tokens=_rows(tokens),
        margins=_rows(margins),
        step_ms=1e3 * statistics.median(times),
    )


def compare_tokens(
    tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
) -> list[int | None]:
    """Returns the first difference of each pair of sequences."""
    return [
        next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), None)
        for pair in zip(tokens, expected, strict=True)
    ]


def _best(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Returns the best token of each row and its margin over the second best."""
    two = mx.topk(logits.astype(mx.float32), 2, axis=-1)
    return logits.argmax(axis=-1), mx.abs(two[:, 1] - two[:, 0])


def _rows(columns: list[mx.array]) -> Any:
    """Converts one array per step to one list per sequence."""
    return mx.stack(columns, axis=1).tolist()
