"""Derivatives of our products: those of stock MLX, and never a silent zero."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import NoReturn, cast

import mlx.core as mx

from mlx_marlin.backends.launch import Product
from mlx_marlin.weights.dtypes import dtype_name

Results = mx.array | tuple[mx.array, ...]
"""Of an epilogue with parts there are several."""


class _Wish(threading.local):
    without_vjp = False
    transformed = False


_wish = _Wish()


@contextmanager
def without_vjp() -> Iterator[None]:
    """Spares products their derivatives, which are nodes of their own in a graph.

    For tracing, in this thread, what nobody differentiates: in a transformation MLX
    does not run a traced graph but the function that it was traced from.
    """
    before, _wish.without_vjp = _wish.without_vjp, True
    try:
        yield
    finally:
        _wish.without_vjp = before


def are_without_vjp() -> bool:
    """Returns whether products are called without derivatives."""
    return _wish.without_vjp


def _note(*_: mx.array) -> tuple[()]:
    _wish.transformed = True
    return ()


_noted = mx.compile(_note, shapeless=True)


def _are_transformed(*arrays: mx.array) -> bool:
    """Returns whether MLX may differentiate what is computed of arrays.

    Only `mx.compile` tells: it replays a graph, here an empty one, unless the arrays
    belong to a transformation (grad, vjp, jvp, vmap, compile). Then it calls the
    function, and so it does the first time for each number of dimensions and dtype.

    Other threads than the main one are not asked: a process in which such a thread
    called a compiled function of MLX (0.32.4) may abort when it ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return True
    if not _compile_tells():
        return True
    _wish.transformed = False
    _noted(*arrays)
    return _wish.transformed


@cache
def _compile_tells() -> bool:
    """Returns whether `mx.compile` calls its function where MLX differentiates.

    All of MLX's compiled functions would have no gradients otherwise. It is asked all
    the same: a product without derivatives would have a gradient of zero, silently.
    """
    array, found = mx.array(0.0), []

    def noted(array: mx.array) -> mx.array:
        _wish.transformed = False
        _noted(array)
        found.append(_wish.transformed)
        return array

    noted(array)  # compiles
    mx.grad(noted)(array)
    mx.jvp(noted, [array], [array])
    mx.vmap(noted)(array[None])
    return all(found[1:])


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
        for all arrays that follow; under `without_vjp`, and outside of transformations,
        it is just `ours`. A gradient with respect to integers (codes, scales that are
        bytes, indices) raises a ValueError.
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
        shorter = backward_of_x and backward_of_x()
        if shorter:
            (cotangent,) = _each(cotangent)  # no parts have this way
            of_x = differentiable(shorter, partial(_backward_of_x, stock, primals[0]))
            known[0] = of_x(cotangent, *primals[1:])
        # MLX asks for all gradients; those of integers go to `_without_gradient`.
        return tuple(known.get(i, mx.zeros(())) for i in range(len(primals)))

    @product.jvp
    def tangent(
        primals: tuple[mx.array, ...], tangents: tuple[mx.array | None, ...]
    ) -> Results:
        moving = {i: t for i, t in enumerate(tangents) if t is not None}

        def of_moving(*values: mx.array) -> Results:
            moved = dict(zip(moving, values, strict=True))
            return stock(*(moved.get(i, each) for i, each in enumerate(primals)))

        starts = [primals[i] for i in moving]
        results, along = mx.jvp(of_moving, starts, list(moving.values()))
        return tuple(along) if len(results) > 1 else along[0]

    call = cast(Product, product)

    def chosen(*arrays: mx.array) -> mx.array:
        if _wish.without_vjp or not _are_transformed(*arrays):
            return ours(*arrays)
        return call(*(e if _is_float(e) else _without_gradient(e) for e in arrays))

    return chosen


def _backward_of_x(
    stock: Product, x: mx.array, cotangent: mx.array, *weight: mx.array
) -> mx.array:
    """Returns the gradient of x through the stock product, which is linear in x."""
    (grad,) = mx.vjp(lambda x: stock(x, *weight), [mx.zeros_like(x)], [cotangent])[1]
    return grad


@mx.custom_function
def _without_gradient(integers: mx.array) -> mx.array:
    """Returns integers as they are; MLX calls the vjp only if it is asked for one."""
    return integers


@_without_gradient.vjp
def _refuse(integers: mx.array, _: mx.array, __: mx.array) -> NoReturn:
    raise ValueError(
        f"no gradient wrt {dtype_name(integers.dtype)} {integers.shape}: the codes of "
        f"quantized weights, scales that are bytes and indices have none"
    )


def _each(results: Results) -> list[mx.array]:
    return [results] if isinstance(results, mx.array) else [*results]


def _is_float(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)
