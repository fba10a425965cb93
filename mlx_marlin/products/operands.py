"""Adapts products to the arrays of a call: shapes, dtypes and absent operands."""

from collections.abc import Callable
from math import prod
from typing import cast

import mlx.core as mx

from mlx_marlin.backends import graph
from mlx_marlin.backends.graph import Product
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.gather_plan import GatherPlan
from mlx_marlin.products.autodiff import differentiable
from mlx_marlin.products.reference.experts import flat_indices, stock_product
from mlx_marlin.products.request import Request, Run


def as_called(product: Product, request: Request) -> Run:
    """Returns a product that takes the arrays of a call.

    `product`: from x [..., k] and a weight's arrays in one dtype to y [..., n], or, of
    several weights, from x [batch, m, k] to y [batch, m, n].
    """
    # MLX has no gradient of a quantized product with a vector.
    if request.w_batch or len(request.x_shape) == 1:
        product = _of_matrices(product, request)
    if (
        request.x_dtype != request.dtype
        or not request.scales_alike
        or request.epilogue != PLAIN
    ):
        product = _converting(product, request)
    if request.layout == "marlin" or request.mode == "affine":
        return product

    def run(
        x: mx.array, w: mx.array, scales: mx.array, _: None, *given: mx.array
    ) -> mx.array:
        # Kernels of a mode without biases do not read them.
        return product(x, w, scales, scales, *given)

    return run


Reshape = Callable[[mx.array], mx.array]


def _of_matrices(product: Product, request: Request) -> Product:
    """Reshapes a batch to weights [batch, n, ...] and rows [batch, m, ...].

    A vector becomes a matrix of one row.
    """
    fold, unfold = _folding(request)
    batch = request.sizes[0]
    rows = (-1,) if batch == 1 else (batch, -1)
    first = len(request.w_batch) + 1  # the axis after the rows, or tiles of rows
    bias = int(request.epilogue.bias)

    def run(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *given: mx.array
    ) -> mx.array:
        w, scales, biases = (
            array.reshape(*rows, *array.shape[first:]) for array in (w, scales, biases)
        )
        operands = *given[:bias], *map(fold, given[bias:])
        y = product(fold(x), w, scales, biases, *operands)
        if request.epilogue.parts:
            return cast(mx.array, tuple(map(unfold, y)))
        return unfold(y)

    return run


def _folding(request: Request) -> tuple[Reshape, Reshape]:
    """Returns the reshape of [..., k] to matrices, and its inverse for results.

    A dimension with one weight becomes rows, which share the weight without copies. In
    the other dimensions x is broadcast, unless all weights multiply the same rows.
    """
    batch, m, _ = request.sizes
    whole = request.shape[:-1] if len(request.x_shape) > 1 else (*request.shape[:-1], 1)
    of_x = (1,) * (len(whole) - 1 - len(request.w_batch))
    is_row = [size == 1 for size in (*of_x, *request.w_batch, 1)]
    # The dimensions of weights come first in a batch, and last in one joined weight.
    order = sorted(range(len(whole)), key=lambda axis: is_row[axis] ^ request.is_shared)
    back = (*sorted(range(len(whole)), key=order.__getitem__), -1)
    ordered = [whole[axis] for axis in order]

    def fold(x: mx.array) -> mx.array:
        if request.is_shared:
            return x.reshape(m, x.shape[-1])
        x = mx.broadcast_to(x, (*whole, x.shape[-1]))
        return x.transpose(*order, -1).reshape(batch, m, x.shape[-1])

    def unfold(y: mx.array) -> mx.array:
        # y is the product of a batch, or one part of it.
        columns = y.size // prod(whole)
        return (
            y.reshape(*ordered, columns)
            .transpose(*back)
            .reshape(*request.shape[:-1], columns)
        )

    return fold, unfold


def _converting(product: Product, request: Request) -> Product:
    """Returns a product that converts its operands to the result's dtype."""
    epilogue = request.epilogue
    first = epilogue.bias + epilogue.operands
    # Positions and frequencies keep their dtypes.
    end = first + (2 if epilogue.rotation is not None else 0)

    def run(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *given: mx.array
    ) -> mx.array:
        if not request.scales_alike:
            scales = scales.astype(request.scale_dtype)
            biases = biases.astype(request.scale_dtype)
        operands = (
            array if first <= i < end else array.astype(request.dtype)
            for i, array in enumerate(given)
        )
        return product(x.astype(request.dtype), w, scales, biases, *operands)

    return run


def experts_call(request: Request, plan: GatherPlan) -> Run:
    """Returns the call of a plan for experts.

    It takes x, the row of x of each pair or None, the experts, codes, scales and
    biases, those of a second weight without biases if the request has a gate, and the
    biases [experts, n] that are added, if any.
    """
    assert request.experts is not None
    pairs = request.experts.pairs
    stock = stock_product(request, plan.pairs_per_row)
    product = differentiable(graph.gather_product(plan), stock)

    def consecutive(x: mx.array, _: None, rhs: mx.array, *weight: mx.array) -> mx.array:
        experts = mx.broadcast_to(rhs, pairs).astype(mx.uint32)
        return product(x.astype(request.dtype), *weight, experts)

    def indexed(
        x: mx.array, lhs: mx.array | None, rhs: mx.array, *weight: mx.array
    ) -> mx.array:
        sources, experts = flat_indices(x, lhs, rhs, pairs)
        y = product(x.astype(request.dtype), *weight, experts, sources)
        return y.reshape(*pairs, 1, request.n)

    return consecutive if plan.pairs_per_row else indexed
