"""Decoder blocks of mlx-lm as two traced graphs each, around their attention.

For few rows a block costs the host more than the device. So all before the cache is
one traced graph, and all after attention is another. Weights are inputs of these:
layers of the same kind share them, and a weight that changes is seen.
"""

import threading
from functools import cache
from operator import getitem
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.backends import selection
from mlx_marlin.integrations.mlx_lm.module_changes import Changes
from mlx_marlin.integrations.tracing.attention import attend
from mlx_marlin.integrations.tracing.fused_rope import on_device
from mlx_marlin.integrations.tracing.fusion import Shape
from mlx_marlin.integrations.tracing.inspection import Contents, look
from mlx_marlin.integrations.tracing.kv_cache import check_caches, is_alone
from mlx_marlin.integrations.tracing.model_families import known_blocks
from mlx_marlin.integrations.tracing.snapshot import is_unchanged

MOST_ROWS = 128
"""Rows of a call that is traced, of all streams together."""
MOST_TOKENS = 8
"""Tokens of a stream in such a call: each number of them has graphs of its own."""


class TracedBlock(nn.Module):
    """A decoder block whose own code runs only where its graphs do not fit.

    A class for each of mlx-lm's derives from this and that one.
    """

    _contents: Contents | None = None

    def __call__(
        self, x: mx.array, mask: Any = None, cache: Any | None = None
    ) -> mx.array:
        """Returns what the block makes of x [streams, tokens, features].

        Args:
            x: Activations of new tokens.
            mask: As mlx-lm makes it for this cache. That of a batch of one stream
                without padding is not looked at.
            cache: Any of mlx-lm's.
        """
        contents = self._contents
        if contents is None or not is_unchanged(self, contents.seen):
            contents = self._contents = look(self)
        kind = contents.kind
        if kind is None or cache is None:
            return self._own(x, mask, cache)
        key: object = x.shape
        alone = not contents.windowed and is_alone(x, mask, cache)
        offset = places = cache._idx if alone else cache.offset
        if type(offset) is int:
            offset, places = _arrays_of(offset)
        elif type(offset) is mx.array:
            key = x.shape, offset.shape
        else:
            return self._own(x, mask, cache)
        graphs = kind.graphs.get(key)
        if graphs is None:
            if not _few(x.shape):
                return self._own(x, mask, cache)
            graphs = kind.trace(key, (x, offset, places), contents.arrays())
        before, after = graphs
        runs = kind.runs["before"]
        queries, keys, values = before(
            x, offset, places, *map(getitem, *contents.before)
        )
        transformed = kind.runs["before"] != runs
        sinks = self["self_attn"].get("sinks")
        how = mask, contents.scale, sinks, transformed, alone
        attended = attend(queries, keys, values, cache, *how)
        y: mx.array = after(x, attended, *map(getitem, *contents.after))
        return y

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Nobody finds the class by its name: it is made again from mlx-lm's.
        reduced: Any = super().__reduce_ex__(protocol)
        return _blank, (type(self).__bases__[1],), *reduced[2:]

    def _own(self, x: mx.array, mask: Any, cache: Any | None) -> mx.array:
        y: mx.array = super().__call__(x, mask, cache)
        return y


def check() -> None:
    """Checks that mlx-lm has what this code uses of it.

    Raises:
        AttributeError: If its caches have changed.
    """
    check_caches()


def trace_blocks(model: nn.Module, changes: Changes) -> None:
    """Lets the blocks of a model that we know run as traced graphs, in place.

    What was known of blocks that do so already is forgotten.
    """
    known = known_blocks()
    for block in model.modules():
        if isinstance(block, TracedBlock):
            vars(block).pop("_contents", None)
        cls: Any = type(block)
        if cls in known:
            changes.set_class(block, _traced(cls))


def untrace_blocks(model: nn.Module, changes: Changes) -> None:
    """Gives the blocks that `trace_blocks` changed their own class back."""
    for block in model.modules():
        if isinstance(block, TracedBlock):
            vars(block).pop("_contents", None)
            changes.set_class(block, type(block).__bases__[1])


class _Last(threading.local):
    """The arrays of the last offset: what is computed belongs to a thread's stream."""

    asked: tuple[int, str] | None = None
    arrays: tuple[mx.array, mx.array]


_last = _Last()


def _arrays_of(offset: int) -> tuple[mx.array, mx.array]:
    """Returns an offset's array and that of places: one each for a token's layers."""
    asked = offset, selection.backend()
    if _last.asked != asked:
        array = mx.array(offset)
        places = on_device(array) if asked[1] == "cuda" else array
        _last.asked, _last.arrays = asked, (array, places)
    return _last.arrays


def _few(shape: Shape) -> bool:
    if len(shape) != 3 or not 0 < shape[1] <= MOST_TOKENS:
        return False
    return 0 < shape[0] * shape[1] <= MOST_ROWS


@cache
def _traced(cls: type[nn.Module]) -> type[TracedBlock]:
    return type(f"Traced{cls.__name__}", (TracedBlock, cls), {})


def _blank(cls: type[nn.Module]) -> TracedBlock:
    """Returns a traced block of one of mlx-lm's classes, with nothing in it."""
    traced = _traced(cls)
    return traced.__new__(traced)
