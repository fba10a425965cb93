"""Derivatives of our products: those of stock MLX, and never a silent zero."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import cast

import mlx.core as mx

from mlx_marlin.backends.launch import Product

Results = mx.array | tuple[mx.array, ...]
"""Of an epilogue with parts there are several."""


class _Wish(threading.local):
    left_out = False


_wish = _Wish()


@contextmanager
def left_out() -> Iterator[None]:
    """Spares products their derivatives, which are nodes of their own in a graph.

    For tracing, in this thread, what nobody differentiates: in a transformation MLX
    does not run a traced graph but the function that it was traced from.
    """
    before, _wish.left_out = _wish.left_out, True
    try:
        yield
    finally:
        _wish.left_out = before


def are_left_out() -> bool:
    """Returns whether products are called without derivatives."""
    return _wish.left_out


def differentiable(
    ours: Product,
    stock: Product,
    backward_of_x: Callable[[], Product | None] | None = None,
) -> Product:
    """Gives a product the derivatives of another one.

    Args:
        ours: The product to compute: to MLX its kernels are opaque, or not even seen.
        stock: The same product in MLX's own operations.
        backward_of_x: Returns the product from a cotangent, codes, scales and biases to
            the gradient of x, where there is a shorter way than through `stock`. It is
            called when a gradient is computed.

    Returns:
        `ours`, with gradients and tangents of `stock` for x, scales and biases, and
        for all arrays that follow; under `left_out` it is just `ours`. A gradient with
        respect to integers (codes, scales that are bytes, indices) raises a ValueError.
        There are two arrays or more, whose dtypes are the same in each call.
    """
    repeated = 0
    repeat: Callable[[tuple[mx.array, ...]], tuple[mx.array, ...]] | None = None

    def forward(*given: mx.array) -> mx.array:
        return ours(*given[repeated:])

    product = mx.custom_function(forward)

    # MLX does not tell which gradients are asked for, and stock MLX raises for integers
    # where they are. So each array of integers is given twice: MLX adds the gradients
    # of both places, only where they are asked for, and two shapes that do not fit make
    # that addition raise. (An operation that cannot be differentiated, in front of the
    # codes, would raise too, but takes a node of the graph in each call.)
    @product.vjp
    def backward(
        given: tuple[mx.array, ...], cotangent: Results, _: Results
    ) -> tuple[mx.array, ...]:
        primals = given[repeated:]
        moving = [i for i, each in enumerate(primals) if _is_float(each)]

        def of_floats(*values: mx.array) -> Results:
            moved = dict(zip(moving, values, strict=True))
            return stock(*(moved.get(i, each) for i, each in enumerate(primals)))

        grads = mx.vjp(of_floats, [primals[i] for i in moving], _each(cotangent))[1]
        known = dict(zip(moving, grads, strict=True))
        shorter = backward_of_x and backward_of_x()
        if shorter:
            (cotangent,) = _each(cotangent)  # no parts have this way
            known[0] = shorter(cotangent, *primals[1:])
        return (
            *[mx.zeros(2)] * repeated,
            *(known.get(i, mx.zeros(3)) for i in range(len(primals))),
        )

    @product.jvp
    def tangent(
        given: tuple[mx.array, ...], tangents: tuple[mx.array | None, ...]
    ) -> Results:
        primals = given[repeated:]
        moving = {i: t for i, t in enumerate(tangents[repeated:]) if t is not None}

        def of_moving(*values: mx.array) -> Results:
            moved = dict(zip(moving, values, strict=True))
            return stock(*(moved.get(i, each) for i, each in enumerate(primals)))

        starts = [primals[i] for i in moving]
        results, along = mx.jvp(of_moving, starts, list(moving.values()))
        return tuple(along) if len(results) > 1 else along[0]

    call = cast(Product, product)

    def chosen(*arrays: mx.array) -> mx.array:
        nonlocal repeated, repeat
        if _wish.left_out:
            return ours(*arrays)
        if repeat is None:
            integers = [i for i, each in enumerate(arrays) if not _is_float(each)]
            repeated = len(integers)
            repeat = itemgetter(*integers, *range(len(arrays)))
        return call(*repeat(arrays))

    return chosen


def _each(results: Results) -> list[mx.array]:
    return [results] if isinstance(results, mx.array) else [*results]


def _is_float(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)
