"""Derivatives of our products, which are those of stock MLX, and graphs without them.

A graph that is built once and replayed reduces host overhead.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import NoReturn, cast

import mlx.core as mx

from mlx_marlin.backends.graph import Product
from mlx_marlin.weights.dtypes import dtype_name

Results = mx.array | tuple[mx.array, ...]
"""One result, or several from an epilogue with parts."""
Function = Callable[..., mx.array]
Call = tuple[int, mx.Stream, tuple[tuple[tuple[int, ...], mx.Dtype] | None, ...]]
"""The key of a graph: thread, stream, and shape and dtype of each argument."""
MOST_GRAPHS = 16
"""Graphs without derivatives that a function keeps. Further calls have derivatives."""


class _Thread(threading.local):
    without_vjp = False
    transformed = False


_thread = _Thread()


@contextmanager
def without_vjp() -> Iterator[None]:
    """Calls products without derivatives in this thread, which saves nodes in a graph.

    It is for tracing. A traced graph is never differentiated: in a transformation, MLX
    runs the function that it was traced from.
    """
    before, _thread.without_vjp = _thread.without_vjp, True
    try:
        yield
    finally:
        _thread.without_vjp = before


def are_without_vjp() -> bool:
    """Returns whether products are called without derivatives."""
    return _thread.without_vjp


def _note(*_: mx.array) -> tuple[()]:
    _thread.transformed = True
    return ()


_noted = mx.compile(_note, shapeless=True)


def _are_transformed(*arrays: mx.array) -> bool:
    """Returns whether MLX may differentiate a function of these arrays.

    MLX has no function for this question. A compiled function answers it: `mx.compile`
    replays its graph, here an empty one, unless the arrays belong to a transformation
    (grad, vjp, jvp, vmap, compile). Then it calls the Python function, as it also does
    the first time for a number of dimensions and dtypes.

    In threads other than the main one, the answer is True: a process in which such a
    thread called a compiled function of MLX (0.32.4) may abort when it ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return True
    if not _compile_detects():
        return True
    _thread.transformed = False
    _noted(*arrays)
    return _thread.transformed


@cache
def _compile_detects() -> bool:
    """Returns whether `mx.compile` calls its function in every transformation.

    MLX's own compiled functions depend on it. It is checked nevertheless, because a
    product without derivatives would silently have a gradient of zero.
    """
    array, found = mx.array(0.0), []

    def noted(array: mx.array) -> mx.array:
        _thread.transformed = False
        _noted(array)
        found.append(_thread.transformed)
        return array

    noted(array)  # compiles
    mx.grad(noted)(array)
    mx.jvp(noted, [array], [array])
    mx.vmap(noted)(array[None])
    return all(found[1:])


def differentiable(
    kernel_product: Product,
    stock: Product,
    backward_of_x: Callable[[], Product | None] | None = None,
) -> Product:
    """Returns a product with the derivatives of another one."""
    product = mx.custom_function(kernel_product)

    @product.vjp
    def backward(
        primals: tuple[mx.array, ...], cotangent: Results, _: Results
    ) -> tuple[mx.array, ...]:
        moving = [i for i, primal in enumerate(primals) if _is_float(primal)]

        def of_floats(*values: mx.array) -> Results:
            moved = dict(zip(moving, values, strict=True))
            return stock(*(moved.get(i, own) for i, own in enumerate(primals)))

        grads = mx.vjp(of_floats, [primals[i] for i in moving], _as_list(cotangent))[1]
        known = dict(zip(moving, grads, strict=True))
        shorter = backward_of_x and backward_of_x()
        if shorter:
            (cotangent,) = _as_list(cotangent)  # there are no parts here
            of_x = differentiable(shorter, partial(_backward_of_x, stock, primals[0]))
            known[0] = of_x(cotangent, *primals[1:])
        # MLX asks for all gradients; those of integers go to `_without_gradient`.
        return tuple(known.get(i, mx.zeros(())) for i in range(len(primals)))

    @product.jvp
    def forward(
        primals: tuple[mx.array, ...], tangents: tuple[mx.array | None, ...]
    ) -> Results:
        moving = {i: t for i, t in enumerate(tangents) if t is not None}

        def of_moving(*values: mx.array) -> Results:
            moved = dict(zip(moving, values, strict=True))
            return stock(*(moved.get(i, own) for i, own in enumerate(primals)))

        starts = [primals[i] for i in moving]
        results, tangent = mx.jvp(of_moving, starts, list(moving.values()))
        return tuple(tangent) if len(results) > 1 else tangent[0]

    call = cast(Product, product)

    def chosen(*arrays: mx.array) -> mx.array:
        if _thread.without_vjp or not _are_transformed(*arrays):
            return kernel_product(*arrays)
        return call(
            *(own if _is_float(own) else _without_gradient(own) for own in arrays)
        )

    return chosen


def _backward_of_x(
    stock: Product, x: mx.array, cotangent: mx.array, *weight: mx.array
) -> mx.array:
    """Returns the gradient of x through the stock product, which is linear in x."""
    (grad,) = mx.vjp(lambda x: stock(x, *weight), [mx.zeros_like(x)], [cotangent])[1]
    return grad


@mx.custom_function
def _without_gradient(integers: mx.array) -> mx.array:
    """Returns integers unchanged. MLX calls the vjp only if it needs this gradient."""
    return integers


@_without_gradient.vjp
def _refuse(integers: mx.array, _: mx.array, __: mx.array) -> NoReturn:
    raise ValueError(
        f"no gradient wrt {dtype_name(integers.dtype)} {integers.shape}: the codes of "
        f"quantized weights, scales that are bytes and indices have none"
    )


def _as_list(results: Results) -> list[mx.array]:
    return [results] if isinstance(results, mx.array) else [*results]


def _is_float(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)


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
    return threading.get_ident(), mx.default_stream(mx.default_device()), tuple(types)


def _without_derivatives(function: Function, calls: Sequence[Call]) -> Function:
    """Traces a function for some kinds of call. No array is evaluated."""
    # MLX keeps graphs by function, so this has to be another one.
    compiled = cast(Function, mx.compile(lambda *arrays: function(*arrays)))
    with without_vjp():
        for _, stream, types in calls:
            with mx.stream(stream):
                compiled(*(None if own is None else mx.zeros(*own) for own in types))
    return compiled
