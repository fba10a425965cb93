"""The tokens of a text, and the perplexities of models on it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

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
def on_stock() -> Iterator[None]:
    """Serves all products by stock MLX."""
    before = os.environ.get(selection.ENVIRONMENT)
    os.environ[selection.ENVIRONMENT] = "stock"
    state.reset()
    try:
        yield
    finally:
        if before is None:
            del os.environ[selection.ENVIRONMENT]
        else:
            os.environ[selection.ENVIRONMENT] = before
        state.reset()
