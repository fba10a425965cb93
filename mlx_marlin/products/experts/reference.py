"""Experts' products in stock MLX's own operations, as calls of ours have them."""

from collections.abc import Callable
from math import prod

import mlx.core as mx

from mlx_marlin.products.experts.request import GatherRequest, mode_of_mlx
from mlx_marlin.products.reference.weight import as_mlx, plain, stock_groups
from mlx_marlin.products.request import Shape
from mlx_marlin.weights.packed_weight import PackedWeight

Flat = Callable[..., mx.array]
"""From x [rows, k], codes, scales, biases, rows of x and experts, flat, to a row a
pair."""


def flat_indices(
    x: mx.array, lhs: mx.array | None, rhs: mx.array, pairs: Shape
) -> tuple[mx.array, mx.array]:
    """Returns the row of x and the expert of each pair."""
    if lhs is None:
        batch = x.shape[:-2]
        lhs = mx.arange(prod(batch), dtype=mx.uint32).reshape(batch)
    return tuple(  # type: ignore[return-value]
        mx.broadcast_to(each, pairs).astype(mx.uint32).flatten() for each in (lhs, rhs)
    )


def stock_of(kind: GatherRequest) -> Flat:
    """Returns stock MLX's product of a kind of call, with the arrays of ours."""

    def stock(x: mx.array, w: mx.array, *arrays: mx.array) -> mx.array:
        scales, biases, sources, experts = arrays
        y = _product(kind, x[:, None], (w, scales, biases), (sources, experts))
        return y.squeeze(-2)

    return stock


def stock_in_turn(kind: GatherRequest, each: int) -> Flat:
    """Likewise, of x and experts of any shape, and of rows as a plan has them."""
    flat = stock_of(kind)

    def stock(
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array,
        *given: mx.array,
    ) -> mx.array:
        bias = given[0] if kind.biased else None
        experts, *sources = given[kind.biased :]
        rows = sources[0] if sources else mx.arange(experts.size) // each
        pairs = rows.astype(mx.uint32), experts.flatten()
        y = flat(x.reshape(-1, kind.k), w, scales, biases, *pairs)
        y = y if bias is None else y + bias[pairs[1]]
        return y.reshape(*experts.shape, 1, kind.n)

    return stock


def stock_gated(kind: GatherRequest, each: int, gate: str) -> Flat:
    """Likewise, of gate and up."""
    stock = stock_in_turn(kind, each)

    def gated(
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array,
        second: mx.array,
        second_scales: mx.array,
        *given: mx.array,
    ) -> mx.array:
        *of_both, experts = given
        first = stock(x, w, scales, biases, *of_both[:1], experts)
        up = stock(x, second, second_scales, second_scales, *of_both[1:], experts)
        if gate == "silu":
            return first * mx.sigmoid(first) * up
        first, up = mx.minimum(first, 7), mx.clip(up, -7, 7)
        return first * mx.sigmoid(1.702 * first) * (up + 1)

    return gated


def stock_packed(
    kind: GatherRequest,
    x: mx.array,
    words: mx.array,
    scales: mx.array,
    lhs_indices: mx.array | None,
    rhs_indices: mx.array,
) -> mx.array:
    """Returns MLX's product, with packed weights that are unpacked for it."""
    weight, indices = (words, scales, scales), (lhs_indices, rhs_indices)
    return _product(kind, x, weight, indices, kind.transpose, kind.is_sorted)


def _product(
    kind: GatherRequest,
    x: mx.array,
    weight: tuple[mx.array, mx.array, mx.array],
    indices: tuple[mx.array | None, mx.array],
    transpose: bool = True,
    is_sorted: bool = False,
) -> mx.array:
    w, scales, biases = weight
    lhs_indices, rhs_indices = indices
    size = stock_groups(kind.mode, kind.bits, kind.group_size)
    if size is None:
        # MLX's CPU device multiplies chosen matrices in float32 only.
        dtype = mx.float32 if kind.on_cpu else kind.dtype
        weights = plain(_packed(kind, w, scales), dtype)
        y = mx.gather_mm(
            x.astype(dtype),
            weights.swapaxes(-1, -2) if transpose else weights,
            lhs_indices,
            rhs_indices,
            sorted_indices=is_sorted,
        )
        return y.astype(kind.dtype)
    words, factors, *rest = weight_of_mlx(kind, w, scales, biases)
    return mx.gather_qmm(
        x,
        words,
        factors,
        rest[0] if rest else None,
        lhs_indices,
        rhs_indices,
        transpose,
        size,
        kind.bits,
        mode_of_mlx(kind.mode),
        sorted_indices=is_sorted,
    )


def weight_of_mlx(
    kind: GatherRequest, w: mx.array, scales: mx.array, biases: mx.array
) -> tuple[mx.array, ...]:
    """Returns codes, scales and biases that mean the same to stock MLX."""
    if kind.layout == "mlx":
        return (w, scales, biases) if kind.mode == "affine" else (w, scales)
    return as_mlx(_packed(kind, w, scales))


def _packed(kind: GatherRequest, words: mx.array, scales: mx.array) -> PackedWeight:
    return PackedWeight(
        words=words,
        scales=scales,
        n=kind.n,
        k=kind.k,
        group_size=kind.group_size,
        bits=kind.bits,
        mode=kind.mode,
    )
