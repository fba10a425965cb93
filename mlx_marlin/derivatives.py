"""Derivatives of our products: those of stock MLX, and never a silent zero."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import mlx.core as mx

from mlx_marlin.launch import Product

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
    ours: Product, stock: Product, backward_of_x: Product | None = None
) -> Product:
    """Gives a product the derivatives of another one.

    Args:
        ours: The product to compute: to MLX its kernels are opaque, or not even seen.
        stock: The same product in MLX's own operations.
        backward_of_x: From a cotangent, codes, scales and biases to the gradient of x,
            where there is a shorter way than through `stock`.

    Returns:
        `ours`, with gradients and tangents of `stock` for x, scales and biases, and
        for all arrays that follow; under `left_out` it is just `ours`.
    """

    product = mx.custom_function(ours)

    @product.vjp
    def backward(
        primals: tuple[mx.array, ...], cotangent: Results, _: Results
    ) -> tuple[mx.array, ...]:
        moving = [i for i, each in enumerate(primals) if _is_float(each)]

        def of_floats(*values: mx.array) -> Results:
            moved = dict(zip(moving, values, strict=True))
            return stock(*(moved.get(i, each) for i, each in enumerate(primals)))

        grads = mx.vjp(of_floats, [primals[i] for i in moving], _each(cotangent))[1]
        known = dict(zip(moving, grads, strict=True))
        if backward_of_x is not None:
            (cotangent,) = _each(cotangent)  # no parts have this way
            known[0] = backward_of_x(cotangent, *primals[1:])
        # Codes, and scales that are bytes, have no gradient. MLX raises where one is
        # asked for, which cannot be seen from here; a zero would pass for an answer.
        return tuple(
            known.get(i, mx.full(each.shape, math.nan))
            for i, each in enumerate(primals)
        )

    @product.jvp
    def forward(
        primals: tuple[mx.array, ...], tangents: tuple[mx.array | None, ...]
    ) -> Results:
        moving = {i: each for i, each in enumerate(tangents) if each is not None}

        def of_moving(*values: mx.array) -> Results:
            moved = dict(zip(moving, values, strict=True))
            return stock(*(moved.get(i, each) for i, each in enumerate(primals)))

        starts = [primals[i] for i in moving]
        results, along = mx.jvp(of_moving, starts, list(moving.values()))
        return tuple(along) if len(results) > 1 else along[0]

    def chosen(*arrays: mx.array) -> mx.array:
        return (ours if _wish.left_out else cast(Product, product))(*arrays)

    return chosen


def _each(results: Results) -> list[mx.array]:
    return [results] if isinstance(results, mx.array) else [*results]


def _is_float(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)
