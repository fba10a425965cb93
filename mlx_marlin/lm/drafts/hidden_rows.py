"""The hidden states of a model's passes, by position, until a head has seen them."""

from collections.abc import Callable
from functools import cache
from threading import RLock, get_ident
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.lm.drafts.passes import Passes

PENDING = 64
"""Rows after which a head is fed without a draft, so that they do not pile up. Each
feeding is one more pass of the head between plain steps."""
_SEEN = "_mlx_marlin_seen"
"""Attribute of a norm: a thread, what it gave the norm last, and what it got."""
_norms_change = RLock()


class HiddenRows:
    """Rows of hidden states by their positions."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, mx.array]] = []

    @property
    def end(self) -> int:
        """The position after the last row; 0 if there is none."""
        return self._parts[-1][0] + len(self._parts[-1][1]) if self._parts else 0

    def add(self, start: int, rows: mx.array) -> None:
        """Adds rows, which replace those from their first position on."""
        if start < self.end:
            self.cut(start)
        self._parts.append((start, rows))

    def cut(self, end: int) -> None:
        """Forgets the rows from a position on."""
        kept = ((start, rows[: end - start]) for start, rows in self._parts)
        self._parts = [part for part in kept if part[0] < end]

    def take(self, start: int, end: int) -> mx.array:
        """Returns the rows from one position to another, and forgets all before."""
        found = [
            rows[max(start - first, 0) : end - first]
            for first, rows in self._parts
            if first < end and first + len(rows) > start
        ]
        self._parts = [each for each in self._parts if each[0] + len(each[1]) > end]
        return mx.concatenate(found)


class HiddenPasses(Passes):
    """Passes of a model of which the hidden states are kept.

    Those of tokens that are taken back stay until others have their positions: that of
    an accepted token is valid, also if the token has to be fed again.
    """

    def __init__(
        self, norm: nn.Module, before_norm: bool, *given: Any, **options: Any
    ) -> None:
        """Keeps what passes need.

        `norm`: the model's final norm.
        `before_norm`: whether states are those before it.
        """
        super().__init__(*given, **options)
        self._norm, self._which = norm, 1 if before_norm else 2
        self.rows = HiddenRows()
        self.feed_head: Callable[[], None] = lambda: None

    def run(self, tokens: mx.array, positions: int = 1, **given: Any) -> mx.array:
        """Feeds tokens as `Passes` does, and keeps their hidden states."""
        start, norm = self.fed, self._norm
        seen: list[Any] = [get_ident()]
        with _norms_change:
            own = type(norm)
            norm.__class__, vars(norm)[_SEEN] = _keeping(own), seen
            try:
                logits = super().run(tokens, positions, **given)
            finally:
                norm.__class__ = own
                del vars(norm)[_SEEN]
        self.rows.add(start, seen[self._which][0])
        self.feed_head()
        return logits

    def evaluate(self) -> None:
        """Begins to evaluate the cache."""
        mx.async_eval([layer.state for layer in self._cache])


@cache
def _keeping(own: type[nn.Module]) -> type[nn.Module]:
    """Returns a class of norms that keep what they were given and have returned.

    Its name stays, because layers are recognized by it.
    """

    def call(norm: Any, x: mx.array) -> mx.array:
        y: mx.array = own.__call__(norm, x)
        seen = vars(norm).get(_SEEN, [None])
        if seen[0] == get_ident():
            seen[1:] = x, y
        return y

    return type(own.__name__, (own,), {"__call__": call})
