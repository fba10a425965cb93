"""Runs decoder blocks of mlx-lm as two compiled graphs around their attention.

With few rows a block costs the host more time than the device. All operations before
the KV cache are one graph, and all operations after attention are another. Weights are
inputs of the graphs, so blocks with equal specs share graphs and changed weights are
used.
"""

import threading
from collections.abc import Callable, Iterator
from functools import cache
from operator import getitem
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.backends import selection
from mlx_marlin.lm.module_tree import Changes
from mlx_marlin.lm.tracing.attention import attend, on_device
from mlx_marlin.lm.tracing.block_spec import Shape, is_unchanged
from mlx_marlin.lm.tracing.fusion import make_graphs
from mlx_marlin.lm.tracing.inspection import (
    ATTENTION,
    Inspection,
    inspect,
    why_untraced,
)
from mlx_marlin.lm.tracing.kv_cache import is_alone
from mlx_marlin.lm.tracing.model_families import block_classes

MOST_ROWS = 128
"""Rows of a call that is traced, of all streams together."""
MOST_TOKENS = 8
"""Tokens of a stream in a call that is traced. Each number of tokens has graphs."""


class TracedBlock(nn.Module):
    """Decoder block that runs as graphs, or its own code where they do not apply.

    Each class of mlx-lm has a subclass of this class and of that one.
    """

    # Not `fuse`: mlx-lm calls that of every module which has it.
    fused_operations: ClassVar[frozenset[str]] = frozenset()
    """The fusions of `lm.options` that are on."""
    _inspection: Inspection | None = None

    def __call__(
        self, x: mx.array, mask: Any = None, cache: Any | None = None
    ) -> mx.array:
        """Returns the block's result for x [streams, tokens, features]."""
        inspection = self._inspection
        if inspection is None or not is_unchanged(self, inspection.snapshot):
            inspection = self._inspection = inspect(self)
        spec = inspection.spec
        if spec is None or cache is None:
            return self._own(x, mask, cache)
        key: object = x.shape
        alone = not inspection.windowed and is_alone(x, mask, cache)
        offset = positions = cache._idx if alone else cache.offset
        if type(offset) is int:
            offset, positions = _arrays_of(offset)
        elif type(offset) is mx.array:
            key = x.shape, offset.shape
        else:
            return self._own(x, mask, cache)
        graphs = spec.graphs.get(key)
        if graphs is None:
            if not _has_few_rows(x.shape):
                return self._own(x, mask, cache)
            call = x, offset, positions
            graphs = make_graphs(spec, key, call, *inspection.arrays())
        before, after = graphs
        runs = spec.runs["before"]
        queries, keys, values, *gate = before(
            x, offset, positions, *map(getitem, *inspection.before)
        )
        transformed = spec.runs["before"] != runs
        sinks = self[ATTENTION].get("sinks")
        options = mask, inspection.scale, sinks
        attended = attend(
            queries, keys, values, cache, *options, transformed=transformed, alone=alone
        )
        y: mx.array = after(x, attended, *gate, *map(getitem, *inspection.after))
        return y

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is not an attribute of a module, so it is made from mlx-lm's again.
        reduced: Any = super().__reduce_ex__(protocol)
        return _blank, (type(self).__bases__[1], self.fused_operations), *reduced[2:]

    def _own(self, x: mx.array, mask: Any, cache: Any | None) -> mx.array:
        y: mx.array = super().__call__(x, mask, cache)
        return y


def trace_blocks(model: nn.Module, changes: Changes, fuse: frozenset[str]) -> None:
    """Changes the class of a model's known decoder blocks to `TracedBlock`.

    Blocks without attention keep their class. Blocks that are traced already are
    inspected again at their next call.
    """
    classes = block_classes()
    for block in model.modules():
        cls = _own_class(block)
        vars(block).pop("_inspection", None)
        if cls in classes and ATTENTION in block:
            changes.set_class(block, _traced(cls, fuse))


def untrace_blocks(model: nn.Module, changes: Changes) -> None:
    """Restores the class of blocks that `trace_blocks` changed."""
    for block in model.modules():
        if isinstance(block, TracedBlock):
            vars(block).pop("_inspection", None)
            changes.set_class(block, _own_class(block))


def block_outcomes(
    model: nn.Module, converted: Callable[[nn.Module], nn.Module]
) -> Iterator[tuple[str, str, str | None]]:
    """Yields the path and the class of each decoder block, and why it is not traced."""
    classes = block_classes()
    others = getattr(model, "layers", None)  # the blocks of any model of mlx-lm's
    listed = {id(block) for block in (others if isinstance(others, list) else ())}
    for path, block in reversed(model.named_modules()):  # the order of the model
        cls = _own_class(block)
        if cls in classes:
            yield path, cls.__name__, why_untraced(converted(block), cls)
        elif id(block) in listed and block.children():
            yield path, cls.__name__, f"optimize does not trace a {cls.__name__}"


def _own_class(block: nn.Module) -> type[nn.Module]:
    """Returns mlx-lm's class of a block, traced or not."""
    cls = type(block)
    own: type[nn.Module] = cls.__bases__[1] if issubclass(cls, TracedBlock) else cls
    return own


class _Last(threading.local):
    """The arrays of the last offset. Threads have different default streams."""

    key: tuple[int, str] | None = None
    arrays: tuple[mx.array, mx.array]


_last = _Last()


def _arrays_of(offset: int) -> tuple[mx.array, mx.array]:
    """Returns an offset and the positions as arrays, which all layers share."""
    key = offset, selection.backend()
    if _last.key != key:
        array = mx.array(offset)
        positions = array if selection.traits().unified_memory else on_device(array)
        _last.key, _last.arrays = key, (array, positions)
    return _last.arrays


def _has_few_rows(shape: Shape) -> bool:
    if len(shape) != 3 or not 0 < shape[1] <= MOST_TOKENS:
        return False
    return 0 < shape[0] * shape[1] <= MOST_ROWS


@cache
def _traced(cls: type[nn.Module], fuse: frozenset[str]) -> type[TracedBlock]:
    return type(f"Traced{cls.__name__}", (TracedBlock, cls), {"fused_operations": fuse})


def _blank(cls: type[nn.Module], fuse: frozenset[str]) -> TracedBlock:
    """Returns an empty traced block of one of mlx-lm's classes, for unpickling."""
    traced = _traced(cls, fuse)
    return traced.__new__(traced)
