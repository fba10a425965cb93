"""Forward passes with a cache whose last rows can be rejected, whatever its kind.

A sliding window that is full, and a recurrent state, cannot be trimmed: mlx-lm's
`trim_prompt_cache` leaves such a cache unchanged, and raises nothing. Here the state
before the pass is kept and put back, and the rows that were right are fed again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

Caches = list[Any]
Restore = Callable[[], None]


class Passes:
    """A model, its cache, and how many tokens of a text are in it.

    Attributes:
        fed: Number of tokens in the cache since it was given.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: Caches,
        quantize: Callable[[Caches], None] = lambda _: None,
        step: int = 2048,
    ) -> None:
        """Keeps what passes need.

        Args:
            model: An mlx-lm model.
            cache: Its cache, which passes change.
            quantize: Quantizes the cache after a pass, if it is time to.
            step: Most tokens that `feed` feeds at a time.
        """
        self._model, self._cache, self._quantize = model, cache, quantize
        self._step = step
        self._restore: Restore | None = None
        self._begun = 0
        self.fed = 0

    def room(self, rows: int) -> int:
        """Returns how many of some rows a pass can have, each as if it were alone.

        mlx-lm masks the first tokens of a window that keeps them, for the later rows of
        a pass with which the window is full.
        """
        return min((_room(layer, rows) for layer in self._cache), default=rows)

    def begin(self, rows: int) -> None:
        """Prepares for passes whose tokens `reject` may take back.

        Args:
            rows: Tokens of these passes together.
        """
        self._begun = self.fed
        self._restore = None if can_trim(self._cache, rows) else snapshot(self._cache)

    def run(self, tokens: mx.array, positions: int = 1) -> mx.array:
        """Feeds tokens [m], and returns the logits [positions, vocabulary] of the last.

        Args:
            tokens: The tokens.
            positions: Number of positions whose logits are returned.
        """
        logits: mx.array = self._model(tokens[None], cache=self._cache)
        self._quantize(self._cache)
        self.fed += tokens.size
        return logits[0, -positions:]

    def reject(self, count: int) -> None:
        """Takes back the last tokens that were fed; `fed` says what is left.

        Args:
            count: Number of tokens since `begin`; none if it is negative. If the cache
                cannot be trimmed, all tokens since then are taken back; none if that
                was done before, or `begin` was not called for them.
        """
        restore, self._restore = self._restore, None
        if count <= 0 or self.fed == self._begun:
            return
        if restore is not None:
            restore()
            self.fed = self._begun
        elif can_trim(self._cache, 0):
            _trim(self._cache, count)
            self.fed -= count

    def feed(
        self, tokens: Sequence[int], told: Callable[[int], None] = lambda _: None
    ) -> None:
        """Feeds tokens whose logits nobody needs, some at a time, and evaluates.

        Args:
            tokens: The tokens.
            told: Called with the number of tokens fed so far, after each part.
        """
        for start in range(0, len(tokens), self._step):
            part = [*tokens[start : start + self._step]]
            self.run(mx.array(part, mx.uint32))
            mx.eval([layer.state for layer in self._cache])
            mx.clear_cache()
            told(start + len(part))


def _room(layer: Any, rows: int) -> int:
    if type(layer) is CacheList:
        return min(_room(each, rows) for each in layer.caches)
    if type(layer) is RotatingKVCache and layer.keep:
        free: int = layer.max_size - layer.offset - 1
        return min(rows, max(free, 0))
    return rows


def can_trim(cache: Sequence[Any], rows: int) -> bool:
    """Returns whether rows that are added to caches now can be trimmed again.

    Args:
        cache: The caches of layers.
        rows: Number of rows.
    """
    return all(_can_trim(layer, rows) for layer in cache)


def _can_trim(layer: Any, rows: int) -> bool:
    if type(layer) is CacheList:
        return can_trim(layer.caches, rows)
    if type(layer) is RotatingKVCache:
        return bool(layer.offset + rows < layer.max_size)
    return type(layer) in (KVCache, QuantizedKVCache)


def _trim(cache: Sequence[Any], count: int) -> None:
    for layer in cache:
        layer.trim(count)


def snapshot(cache: Caches) -> Restore:
    """Returns a function that puts back the state that caches have now.

    Arrays are shared, not copied: MLX's are immutable, and an assignment to a slice
    gives the variable another one. So a variable of its own is kept for each.

    Args:
        cache: The caches of layers.
    """
    layers = [*cache]
    restores = [_of_layer(layer) for layer in layers]

    def restore() -> None:
        cache[:] = layers  # quantizing replaces them
        for each in restores:
            each()

    return restore


def _of_layer(layer: Any) -> Restore:
    if type(layer) is CacheList:
        of_parts = [_of_layer(each) for each in layer.caches]

        def restore_parts() -> None:
            for each in of_parts:
                each()

        return restore_parts
    if type(layer) in (KVCache, QuantizedKVCache):
        # With another variable for its arrays, each assignment would copy all of them.
        offset = layer.offset

        def trim() -> None:
            layer.trim(layer.offset - offset)

        return trim
    state = _copied(vars(layer))

    def restore() -> None:
        vars(layer).clear()
        vars(layer).update(state)

    return restore


def _copied(value: Any) -> Any:
    """Returns a value with containers and variables of arrays of its own."""
    if isinstance(value, mx.array):
        return mx.stop_gradient(value)
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value))
    return value
