"""What models and layers are given: a text's tokens, and activations of layers.

Activations are random, or those that a text gives a layer. A model's perplexity on a
text is computed here too.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin import state
from mlx_marlin.backends import selection

if TYPE_CHECKING:
    from mlx_marlin.lm.verification.layers import CheckedLayer, ExactWeight

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


METHODS = {"head": "as_linear"}
"""Method that computes an operation; `__call__` for others."""


@dataclass(frozen=True, eq=False)
class Activations:
    """Rows of activations, each for one matrix of a layer's weight."""

    source: str  # "random" or "captured"
    x: mx.array  # Activations [rows, k]; tokens [rows] for a look-up
    matrices: mx.array  # uint32 [rows], the matrix of each row
    step: int = 1  # Rows that belong together: one for each head, else 1

    def first(self, rows: int) -> "Activations":
        """Returns the first rows."""
        count = rows * self.step
        x, matrices = self.x[:count], self.matrices[:count]
        return Activations(self.source, x, matrices, self.step)

    @property
    def rows(self) -> int:
        """Number of rows, or of rows for each head."""
        return int(self.x.shape[0]) // self.step


def random_activations(
    layer: "CheckedLayer", weight: "ExactWeight", rows: int, dtype: mx.Dtype, seed: int
) -> Activations:
    """Draws normally distributed activations, or tokens for a look-up."""
    import numpy as np  # here, because the help of commands needs no extra package

    drawn = np.random.default_rng([seed, *layer.name.encode()])
    matrices, n, k = weight.shape
    zeros = mx.zeros(rows, mx.uint32)
    if layer.operation == "lookup":
        tokens = mx.array(drawn.integers(0, n, rows).astype(np.uint32))
        return Activations("random", tokens, zeros)
    step = layer.heads
    x = mx.array(drawn.standard_normal((rows * step, k), np.float32)).astype(dtype)
    if step > 1:
        own = np.tile(np.arange(matrices), rows)
    else:
        own = np.resize(drawn.permutation(matrices), rows)
    return Activations("random", x, mx.array(own.astype(np.uint32)), step)


class Capture:
    """The first inputs of each layer of a model."""

    def __init__(self, layers: Sequence["CheckedLayer"], rows: int) -> None:
        self._rows = rows
        self._layers: dict[tuple[int, str], CheckedLayer] = {
            (id(layer.module), METHODS.get(layer.operation, "__call__")): layer
            for layer in layers
        }
        self._found: dict[tuple[str, str], list[Activations]] = {}

    def run(self, model: nn.Module, tokens: mx.array) -> None:
        """Runs a model on tokens and keeps the inputs of its layers.

        `tokens`: tokens [1, length].
        """
        with self._watching():
            mx.eval(model(tokens))
        arrays = [a for found in self._found.values() for a in found]
        mx.eval([a.x for a in arrays], [a.matrices for a in arrays])

    def of(self, layer: "CheckedLayer") -> Activations | None:
        """Returns the inputs of a layer; None if it was not called."""
        parts = self._found.get((layer.name, layer.operation))
        if not parts:
            return None
        x = mx.concatenate([part.x for part in parts])
        matrices = mx.concatenate([part.matrices for part in parts])
        whole = Activations("captured", x, matrices, parts[0].step)
        return whole.first(self._rows)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Changes the class of the layers to one that keeps the inputs."""
        modules = {id(each.module): each.module for each in self._layers.values()}
        classes = {key: type(module) for key, module in modules.items()}
        try:
            for module in modules.values():
                module.__class__ = self._watched(module)
            yield
        finally:
            for key, module in modules.items():
                module.__class__ = classes[key]

    def _watched(self, module: nn.Module) -> type[nn.Module]:
        cls = type(module)
        names = [name for key, name in self._layers if key == id(module)]

        def method(name: str) -> Any:
            def call(own: Any, x: mx.array, *args: Any, **options: Any) -> Any:
                self._keep(self._layers[id(module), name], x, args, options)
                return getattr(cls, name)(own, x, *args, **options)

            return call

        # The name stays, because layers are recognized by it.
        return type(cls.__name__, (cls,), {name: method(name) for name in names})

    def _keep(
        self,
        layer: "CheckedLayer",
        x: mx.array,
        args: Sequence[Any],
        options: Mapping[str, Any],
    ) -> None:
        parts = self._found.setdefault((layer.name, layer.operation), [])
        missing = self._rows - sum(part.rows for part in parts)
        if missing <= 0:
            return
        own = _rows(layer, x, args, options)
        if own is not None:
            parts.append(own.first(missing))


def _rows(
    layer: "CheckedLayer", x: mx.array, args: Sequence[Any], options: Mapping[str, Any]
) -> Activations | None:
    """Returns the rows of a call; None if it multiplies by weights not transposed."""
    if layer.operation == "lookup":
        return Activations("captured", x.reshape(-1), mx.zeros(x.size, mx.uint32))
    matrices = mx.zeros(x.shape[:-1], mx.uint32)
    if layer.operation == "experts":
        indices = args[0] if args else options["indices"]
        batch = tuple(mx.broadcast_shapes(x.shape[:-2], indices.shape))
        matrices = mx.broadcast_to(indices, batch)
        x = mx.broadcast_to(x, (*batch, *x.shape[-2:]))[..., 0, :]
    elif layer.operation == "heads":
        if not (args[0] if args else options.get("transpose", True)):
            return None
        every_head = (*x.shape[:-3], layer.heads, *x.shape[-2:])
        x = mx.broadcast_to(x, every_head).swapaxes(-3, -2)
        matrices = mx.broadcast_to(mx.arange(layer.heads), x.shape[:-1])
    flat = matrices.reshape(-1).astype(mx.uint32)
    return Activations("captured", x.reshape(-1, x.shape[-1]), flat, layer.heads)
