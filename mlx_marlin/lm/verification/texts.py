"""The tokens of a text, and the perplexities of models on it."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin import state
from mlx_marlin.backends import selection

WINDOW, MOST_WINDOWS = 128, 16
"""Tokens that are predicted in a window, and windows that are used of a text."""


def windows(text: str, tokenizer: Any) -> mx.array:
    """Returns the first windows of a text, [windows, length + 1].

    A text that is shorter than a window is one window.
    """
    tokens = tokenizer.encode(text)
    if len(tokens) < 2:
        raise ValueError(f"text has {len(tokens)} tokens, expected at least 2")
    count = min(MOST_WINDOWS, len(tokens) // (WINDOW + 1))
    length = WINDOW + 1 if count else len(tokens)
    return mx.array(tokens[: max(count, 1) * length]).reshape(-1, length)


@contextmanager
def on_back_end(name: str) -> Iterator[None]:
    """Serves all products by a back end, or by "stock", whatever is faster."""
    before = os.environ.get(selection.ENVIRONMENT)
    os.environ[selection.ENVIRONMENT] = name
    state.reset()
    try:
        yield
    finally:
        if before is None:
            del os.environ[selection.ENVIRONMENT]
        else:
            os.environ[selection.ENVIRONMENT] = before
        state.reset()


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
