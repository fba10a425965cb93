"""Functions whose graph is built once, and replayed: less work for the host."""

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import cast

import mlx.core as mx

from mlx_marlin.products.autodiff import are_without_vjp, without_vjp

Function = Callable[..., mx.array]
Call = tuple[int, mx.Stream, tuple[tuple[tuple[int, ...], mx.Dtype] | None, ...]]
"""What a graph is for: a thread, a stream, and of each argument its shape and dtype."""
MOST_GRAPHS = 16
"""Graphs of a function that have no derivatives; others do with more nodes."""


def traced(function: Function, put: Callable[[Function], None]) -> Function:
    """Returns a function whose graph is built once for a kind of call.

    A product that has derivatives is a node more in a graph, with all its arrays as
    inputs. What is traced here has no use for it: where MLX differentiates, it calls
    the function itself. But whoever is called cannot tell one from the other. So the
    first call of a kind makes another function, traced under `without_vjp`, which takes
    the place of this one. (MLX keeps graphs by thread: in one that has called before,
    the graphs of a function which another thread has made have derivatives.)

    Args:
        function: From arrays, or None, to an array or several.
        put: Takes what is to be called from then on.
    """
    known: list[Call] = []
    # MLX finds graphs, by thread, by a function's address. One that dies in another
    # thread leaves its graphs to the next that gets its place: so they die together.
    made: list[Function] = []

    def call(*arrays: mx.array | None) -> mx.array:
        kind = _kind(arrays)
        if not are_without_vjp() and kind not in known and len(known) < MOST_GRAPHS:
            known.append(kind)
            own = [each for each in known if each[0] == kind[0]]
            made.append(_without_derivatives(call, own))
            put(made[-1])
        return function(*arrays)

    made.append(cast(Function, mx.compile(call)))
    return made[0]


def _kind(arrays: Sequence[mx.array | None]) -> Call:
    given = (each if each is None else (each.shape, each.dtype) for each in arrays)
    return get_ident(), mx.default_stream(mx.default_device()), tuple(given)


def _without_derivatives(function: Function, calls: Sequence[Call]) -> Function:
    """Traces a function for some kinds of call; the arrays are never evaluated."""
    # MLX tells graphs apart by the function that they are of: it has to be another.
    compiled = cast(Function, mx.compile(lambda *arrays: function(*arrays)))
    with without_vjp():
        for _, stream, arrays in calls:
            with mx.stream(stream):
                compiled(
                    *(each if each is None else mx.zeros(*each) for each in arrays)
                )
    return compiled
