"""Forward passes with a cache whose last rows can be taken back, whatever its kind.

mlx-lm's `trim_prompt_cache` leaves a sliding window that is full, and a recurrent
state, unchanged, and raises nothing. Here a window is cut to the rows that stay: a pass
of several rows appends them. One that passes of one row have overwritten is put back,
and their own keys and values are written again. `row_states` has recurrent states.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_marlin.lm.drafts.row_states import RowStates, copied

Caches = list[Any]
UNWATCHED = nullcontext()
Variables = list[dict[str, Any]]
APPENDED = (KVCache, QuantizedKVCache, ChunkedKVCache)
"""Caches of which `trim` takes back any rows of the last passes."""


class Passes:
    """A model, its cache, and how many tokens of a text are in it."""

    def __init__(
        self,
        model: nn.Module,
        cache: Caches,
        quantize: Callable[[Caches], None] = lambda _: None,
        step: int = 2048,
        *,
        quantized_from: int | None = None,
        is_seen: bool = True,
    ) -> None:
        """Keeps what passes need.

        `quantized_from`: number of tokens from which on `quantize` does; None for
        never.
        """
        self._model, self._cache, self._quantize = model, cache, quantize
        self._step, self._quantized_from = step, quantized_from
        self.fed, self.is_seen = 0, is_seen
        # Since the last `begin`: passes to come, tokens before them, each leaf's
        # offset, and the variables of windows that passes of one row overwrite.
        self._open = self._begun = 0
        self._offsets: list[Any] = []
        self._before: dict[int, dict[str, Any]] = {}
        self._hidden: Variables | None = None  # of each leaf, while another is shown
        self._shown = 0
        self._find_leaves()
        # Quantizing replaces none of these leaves.
        self._states = RowStates(model, [self._leaves[index] for index in self._whole])

    @property
    def are_fed_again(self) -> bool:
        """Whether rows before a rejected one have to be fed again."""
        return self._states.are_fed_again

    def room(self, rows: int) -> int:
        """Returns how many of some rows a pass can have, each as if it were alone.

        mlx-lm masks the first tokens of a window that keeps them, for the later rows of
        a pass with which the window is full. Rows after the token with which quantizing
        begins would read exact keys.
        """
        return min([rows, *(self._room(leaf, rows) for leaf in self._bounded)])

    def _room(self, leaf: Any, rows: int) -> int:
        if type(leaf) is RotatingKVCache:
            free: int = leaf.max_size - leaf.offset - 1
            return min(rows, max(free, 0))
        start: int = self._quantized_from  # type: ignore[assignment]
        offset: int = leaf.offset
        return min(rows, start - offset) if offset < start else rows

    def _find_leaves(self) -> None:
        self._layers, self._leaves = [*self._cache], [*leaves(self._cache)]
        self._whole = {  # those that no rows can be taken from
            index
            for index, leaf in enumerate(self._leaves)
            if type(leaf) not in (*APPENDED, RotatingKVCache)
        }
        self._bounded = [
            leaf
            for leaf in self._leaves
            if (type(leaf) is RotatingKVCache and leaf.keep)
            or (type(leaf) is KVCache and self._quantized_from is not None)
        ]

    def begin(self, rows: int, passes: int = 1) -> None:
        """Prepares for passes that `keep` may take back."""
        if self.fed:  # mlx-lm quantizes after a pass
            self._quantize(self._cache)
        if self._layers != self._cache:  # quantizing replaces them
            self._find_leaves()
        self._begun, self._open = self.fed, passes
        self._offsets = [vars(leaf).get("offset") for leaf in self._leaves]
        if self._whole:
            self._states.begin(passes)
        self._before = {
            index: copied(vars(leaf))
            for index, leaf in enumerate(self._leaves)
            if type(leaf) is RotatingKVCache
            and passes > 1
            and leaf.offset + rows > leaf.max_size
        }

    def run(self, tokens: mx.array, positions: int = 1, **given: Any) -> mx.array:
        """Feeds tokens [m], and returns the logits [positions, vocabulary] of the last.

        `given`: what else the model takes.
        """
        if not self._open:
            self.begin(tokens.size)
        self._open -= 1
        try:
            with self._watching(tokens.size, positions):
                logits: mx.array = self._model(tokens[None], cache=self._cache, **given)
        except BaseException:  # some layers may have the tokens
            self._go(self._begun)
            self.fed = self._begun
            raise
        self.fed += tokens.size
        return logits[0, -positions:]

    def _watching(self, rows: int, positions: int) -> AbstractContextManager[None]:
        if not self._whole:
            return UNWATCHED
        return self._states.watching(rows, is_verifying=positions > 1)

    def keep(self, count: int) -> None:
        """Takes back what was fed after `count` tokens; `fed` is what is left.

        That is less where the state after that token cannot be had.
        """
        self._open = 0
        if count < self.fed:
            self.fed = self._reach(count)
            self._go(self.fed)

    def show(self, text: Sequence[int]) -> None:
        """Makes the cache have a text, until `resume`; what is missing is fed.

        A recurrent state is a graph that computes it; nothing is evaluated unless
        somebody reads it.
        """
        count = len(text)
        if count > self.fed:
            logits = self.run(mx.array([*text[self.fed :]], mx.uint32))
            mx.async_eval(logits)
        if count == self.fed:
            self._quantize(self._cache)
            return
        self._hidden = [dict(vars(leaf)) for leaf in self._leaves]
        self._shown = count
        reached = self._reach(count)
        self._go(reached)
        if reached < count:
            for leaf in self._leaves:  # an assignment to a slice changes the variable
                vars(leaf).update(copied(vars(leaf)))
            missing = mx.array([*text[reached:]], mx.uint32)
            self._model(missing[None], cache=self._cache)

    def resume(self) -> None:
        """Makes the cache have again what it had before `show`."""
        if self._hidden is not None:
            for leaf, variables in zip(self._leaves, self._hidden, strict=True):
                vars(leaf).update(variables)
            self._hidden = None

    def settle(self, text: Sequence[int]) -> None:
        """Makes the cache have a text and no other tokens, for good."""
        if self._hidden is not None and self._shown == len(text):
            self._hidden, self.fed = None, len(text)
            mx.eval([layer.state for layer in self._cache])
            return
        self.resume()
        self.keep(len(text))
        self.feed(text[self.fed :])
        self._quantize(self._cache)

    def feed(
        self, tokens: Sequence[int], told: Callable[[int], None] = lambda _: None
    ) -> None:
        """Feeds tokens whose logits nobody needs, some at a time, and evaluates."""
        for start in range(0, len(tokens), self._step):
            part = [*tokens[start : start + self._step]]
            self.run(mx.array(part, mx.uint32))
            mx.eval([layer.state for layer in self._cache])
            mx.clear_cache()
            told(start + len(part))

    def _reach(self, count: int) -> int:
        """Returns the most tokens, up to some, that `_go` can leave."""
        rows = self._states.reach(count - self._begun)
        for index, before in self._before.items():
            window = self._leaves[index]
            if _rows_since(window, before) > window.max_size - window.keep:
                return min(self._begun, count)  # some have overwritten others
        return self._begun + rows

    def _go(self, count: int) -> None:
        """Leaves the first tokens in each leaf; so many that `_reach` allows."""
        self._states.put(count - self._begun)
        for index, leaf in enumerate(self._leaves):
            if index in self._before:
                _write_again(leaf, self._before[index], count - self._begun)
            elif index not in self._whole:
                offset = self._offsets[index] + count - self._begun
                _cut(leaf, leaf.offset - offset)


def leaves(cache: Sequence[Any]) -> Iterator[Any]:
    """Yields the caches of layers, those in lists of caches one by one."""
    for layer in cache:
        if type(layer) is CacheList:
            yield from leaves(layer.caches)
        else:
            yield layer


def _cut(leaf: Any, count: int) -> None:
    """Takes the last tokens of a pass out of a cache, one of a pass of one row."""
    if not count or leaf.keys is None:
        return
    if type(leaf) is not RotatingKVCache:
        leaf.trim(count)
        return
    leaf.offset -= count
    leaf._idx -= count
    if leaf._idx + count < leaf.keys.shape[2]:
        return  # of a window that is full, one slot is to be written anew
    for name in ("keys", "values"):
        vars(leaf)[name] = _slots(leaf, vars(leaf)[name])
    leaf._idx = leaf.keys.shape[2]


def _slots(window: RotatingKVCache, held: mx.array) -> mx.array:
    """Returns the first slots, and another to be overwritten if one is missing."""
    kept, keep = held[..., : window._idx, :], window.keep
    if window._idx >= min(window.offset, window.max_size):
        return kept
    return mx.concatenate([held[..., : keep + 1, :], kept[..., keep:, :]], axis=2)


def _rows_since(window: Any, before: dict[str, Any]) -> int:
    """Returns how many rows were written to a window since an earlier state."""
    rows: int = window.offset - before["offset"]
    return rows


def _write_again(window: Any, before: dict[str, Any], rows: int) -> None:
    """Puts an earlier state of a window back, and writes the first rows since then.

    If `rows` is negative, it is a state of so many rows less.
    """
    end = rows - _rows_since(window, before) or None
    start, own = (end or 0) - rows, (window.keys, window.values)
    order = window._temporal_order
    written = [order(each)[..., start:end, :] for each in own if rows > 0]
    vars(window).update(copied(before))
    if written:
        window.update_and_fetch(*written)
    _cut(window, max(-rows, 0))
