"""Experts' products in stock MLX's operations, with the arguments of our kernel."""

from collections.abc import Callable
from math import prod

import mlx.core as mx

from mlx_marlin.products.reference.weight import (
    as_mlx,
    mode_of_mlx,
    plain,
    stock_groups,
)
from mlx_marlin.products.request import Request, Run, Shape

Product = Callable[..., mx.array]
"""Takes and returns the arrays of `graph.gather_product`."""


def flat_indices(
    x: mx.array, lhs: mx.array | None, rhs: mx.array, pairs: Shape
) -> tuple[mx.array, mx.array]:
    """Returns the row of x and the expert of each pair, both flat.

    `x`: activations [..., 1, k].
    """
    if lhs is None:
        batch = x.shape[:-2]
        lhs = mx.arange(prod(batch), dtype=mx.uint32).reshape(batch)
    return (_flat(lhs, pairs), _flat(rhs, pairs))


def _flat(indices: mx.array, pairs: Shape) -> mx.array:
    return mx.broadcast_to(indices, pairs).astype(mx.uint32).flatten()


def stock_product(request: Request, pairs_per_row: int) -> Product:
    """Returns stock MLX's product with one weight of each expert, or two of a gate."""
    assert request.experts is not None
    biased, gate = request.experts.biased, request.experts.gate

    def stock(
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array,
        *bias_and_indices: mx.array,
    ) -> mx.array:
        bias = bias_and_indices[0] if biased else None
        experts, *sources = bias_and_indices[biased:]
        rows = sources[0] if sources else mx.arange(experts.size) // pairs_per_row
        indices = rows.astype(mx.uint32), experts.flatten()
        x = x.reshape(-1, 1, request.k)
        y = _product(request, x, (w, scales, biases), indices).squeeze(-2)
        y = y if bias is None else y + bias[indices[1]]
        return y.reshape(*experts.shape, 1, request.n)

    def gated(
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array,
        second: mx.array,
        second_scales: mx.array,
        *added_and_experts: mx.array,
    ) -> mx.array:
        *added, experts = added_and_experts
        first = stock(x, w, scales, biases, *added[:1], experts)
        up = stock(x, second, second_scales, second_scales, *added[1:], experts)
        if gate == "silu":
            return first * mx.sigmoid(first) * up
        first, up = mx.minimum(first, 7), mx.clip(up, -7, 7)
        return first * mx.sigmoid(1.702 * first) * (up + 1)

    return gated if gate else stock


def stock_packed(request: Request) -> Run:
    """Returns stock MLX's product with packed weights, which are unpacked first."""
    assert request.experts is not None
    form = request.transpose, request.experts.is_sorted

    def run(
        x: mx.array,
        lhs: mx.array | None,
        rhs: mx.array,
        words: mx.array,
        scales: mx.array,
        _: mx.array,
        *bias: mx.array,
    ) -> mx.array:
        y = _product(request, x, (words, scales, scales), (lhs, rhs), *form)
        return y + mx.expand_dims(bias[0][rhs], -2) if bias else y

    return run


def _product(
    request: Request,
    x: mx.array,
    weight: tuple[mx.array, mx.array, mx.array],
    indices: tuple[mx.array | None, mx.array],
    transpose: bool = True,
    is_sorted: bool = False,
) -> mx.array:
    w, scales, biases = weight
    lhs_indices, rhs_indices = indices
    size = stock_groups(request.mode, request.bits, request.group_size)
    if size is None:
        # MLX's CPU device multiplies chosen matrices in float32 only.
        dtype = mx.float32 if request.on_cpu else request.dtype
        weights = plain(request.packed(w, scales), dtype)
        y = mx.gather_mm(
            x.astype(dtype),
            weights.swapaxes(-1, -2) if transpose else weights,
            lhs_indices,
            rhs_indices,
            sorted_indices=is_sorted,
        )
        return y.astype(request.dtype)
    words, factors, *rest = weight_of_mlx(request, w, scales, biases)
    y = mx.gather_qmm(
        x,
        words,
        factors,
        rest[0] if rest else None,
        lhs_indices,
        rhs_indices,
        transpose,
        size,
        request.bits,
        mode_of_mlx(request.mode),
        sorted_indices=is_sorted,
    )
    return y.astype(request.dtype)  # `as_mlx` may have made it float32


def weight_of_mlx(
    request: Request, w: mx.array, scales: mx.array, biases: mx.array
) -> tuple[mx.array, ...]:
    """Returns the same weight as codes, scales and biases that stock MLX reads."""
    if request.layout == "mlx":
        return (w, scales, biases) if request.mode == "affine" else (w, scales)
    return as_mlx(request.packed(w, scales), exact=True)
