"""Perplexity of a model on a text."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

ROWS = 64
"""Maximum rows of a product. Prompts are read in chunks of this size, so that prefill
uses the kernels for few rows as well."""

LARGEST_ENTROPY = 700.0
"""Cross entropy whose exponential still is a float."""

Tick = Callable[[], object]
"""A callback that is called after every forward pass."""


def perplexity(model: nn.Module, tokens: mx.array, tick: Tick = lambda: None) -> float:
    """Returns the perplexity of a model on a text."""
    from mlx_lm.models.cache import make_prompt_cache

    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    total, begin = 0.0, 0
    for logits in read(model, inputs, make_prompt_cache(model), tick):
        end = begin + logits.shape[1]
        losses = nn.losses.cross_entropy(
            logits.astype(mx.float32), targets[:, begin:end], reduction="sum"
        )
        total, begin = total + float(losses), end
    mean = total / targets.size
    return math.inf if mean > LARGEST_ENTROPY else math.exp(mean)


def passes(tokens: mx.array) -> int:
    """Returns the forward passes that read tokens of shape `(batch, length)`."""
    batch, length = tokens.shape
    return math.ceil(length / _chunk(batch))


def read(
    model: nn.Module, tokens: mx.array, cache: list[Any], tick: Tick
) -> Iterator[mx.array]:
    """Yields the logits `(batch, chunk, vocabulary)` of each chunk of the tokens."""
    batch, length = tokens.shape
    for begin in range(0, length, _chunk(batch)):
        logits = model(tokens[:, begin : begin + _chunk(batch)], cache=cache)
        mx.eval(logits, [layer.state for layer in cache])
        tick()
        yield logits


def _chunk(batch: int) -> int:
    """Returns the tokens of each sequence that one forward pass reads."""
    return max(1, ROWS // batch)
