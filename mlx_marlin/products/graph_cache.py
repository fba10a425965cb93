"""Functions whose graph is built once and replayed, which reduces host overhead."""

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import cast

import mlx.core as mx

from mlx_marlin.products.autodiff import are_without_vjp, without_vjp

Function = Callable[..., mx.array]
Call = tuple[int, mx.Stream, tuple[tuple[tuple[int, ...], mx.Dtype] | None, ...]]
"""The key of a graph: thread, stream, and shape and dtype of each argument."""
MOST_GRAPHS = 16
"""Graphs without derivatives that a function keeps. Further calls have derivatives."""


def traced(function: Function, put: Callable[[Function], None]) -> Function:
    """Returns a function whose graph is built once for each kind of call.

    A product with derivatives adds a node to a graph, with all its arrays as inputs. A
    traced graph does not need it, because MLX calls the function itself when it
    differentiates. The function cannot detect which of the two happens. Therefore the
    first call of a kind makes another function, which is traced under `without_vjp` and
    replaces this one. (MLX keeps graphs by thread: in a thread that has called before,
    the graphs of a function made by another thread have derivatives.)
    """
    known: list[Call] = []
    # MLX finds graphs by thread and by a function's address. A function that is freed
    # in another thread leaves its graphs to the next function at this address. They are
    # therefore freed together.
    made: list[Function] = []

    def call(*arrays: mx.array | None) -> mx.array:
        key = _key(arrays)
        if not are_without_vjp() and key not in known and len(known) < MOST_GRAPHS:
            known.append(key)
            own = [other for other in known if other[0] == key[0]]
            made.append(_without_derivatives(call, own))
            put(made[-1])
        return function(*arrays)

    made.append(cast(Function, mx.compile(call)))
    return made[0]


def _key(arrays: Sequence[mx.array | None]) -> Call:
    types = (None if array is None else (array.shape, array.dtype) for array in arrays)
    return get_ident(), mx.default_stream(mx.default_device()), tuple(types)


def _without_derivatives(function: Function, calls: Sequence[Call]) -> Function:
    """Traces a function for some kinds of call. No array is evaluated."""
    # MLX keeps graphs by function, so this has to be another one.
    compiled = cast(Function, mx.compile(lambda *arrays: function(*arrays)))
    with without_vjp():
        for _, stream, types in calls:
            with mx.stream(stream):
                compiled(*(None if own is None else mx.zeros(*own) for own in types))
    return compiled
