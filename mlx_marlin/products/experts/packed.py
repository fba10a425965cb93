"""Products with packed experts, for layers that hold their arrays themselves."""

from dataclasses import replace

import mlx.core as mx

from mlx_marlin.products.dispatch import PreparedCall, calls, remember
from mlx_marlin.products.experts.dispatch import prepare
from mlx_marlin.products.experts.request import (
    ArrayType,
    GatherOptions,
    packed_request,
)
from mlx_marlin.products.request import CPU
from mlx_marlin.weights.packed_weight import PackedWeight

Options = tuple[ArrayType | None, ArrayType, GatherOptions, str | None]
"""Indices of rows and of experts, the other options, and how one weight gates another.
"""


def gather_packed(
    x: mx.array,
    w: PackedWeight,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    *,
    transpose: bool = True,
    sorted_indices: bool = False,
    invariant: bool = False,
    bias: mx.array | None = None,
) -> mx.array:
    """Multiplies rows by packed weights that indices select.

    `x`: activations [..., m, k].
    `bias`: of each weight [experts, n].
    """
    if rhs_indices is None:
        rhs_indices = mx.arange(w.words.shape[0], dtype=mx.uint32)
    added = [bias] if bias is not None and _is_fused(bias, x, w) else []
    lhs = None if lhs_indices is None else (lhs_indices.shape, lhs_indices.dtype)
    rhs = rhs_indices.shape, rhs_indices.dtype
    options = transpose, sorted_indices, invariant, bool(added)
    prepared = _prepared((x.shape, x.dtype), w, (lhs, rhs, options, None))
    weight = w.words, w.scales, w.scales
    y = prepared.run(x, lhs_indices, rhs_indices, *weight, *added)
    if bias is None or added:
        return y
    return y + mx.expand_dims(bias[rhs_indices], -2)


def gather_gated(
    x: mx.array,
    gate: PackedWeight,
    up: PackedWeight,
    indices: mx.array,
    gating: str = "silu",
    biases: tuple[mx.array, ...] = (),
) -> mx.array | None:
    """Multiplies rows by packed experts of gate and of up, and gates.

    `x`: activations [..., k].
    `indices`: the experts of each row [..., choices].
    `biases`: of gate and of up [experts, n], or none.
    """
    if gate.kind != up.kind:
        raise ValueError(f"up is {up.kind}, expected as gate: {gate.kind}")
    if not all(_is_fused(bias, x, gate) for bias in biases):
        return None
    # The shape with one row per expert. A view would cost the host 2 us (docs/lab).
    rows = (*x.shape[:-1], 1, 1, *x.shape[-1:]), x.dtype
    rhs = indices.shape, indices.dtype
    options = True, False, False, bool(biases)
    prepared = _prepared(rows, gate, (None, rhs, options, gating))
    if prepared.reason is not None:
        return None
    weights = gate.words, gate.scales, up.words, up.scales
    return prepared.run(x, *weights, *biases, indices)


def _prepared(x: ArrayType, w: PackedWeight, options: Options) -> PreparedCall:
    key = *x, w.kind, options, mx.default_device() == CPU
    known = calls.get(key)
    if known is not None:
        return known
    lhs, rhs, call, gate = options
    request = replace(packed_request(x, w, lhs, rhs, call), gate=gate)
    return remember(key, prepare(request))


def _is_fused(bias: mx.array, x: mx.array, w: PackedWeight) -> bool:
    """Returns whether a kernel adds a bias of each expert, which has x's dtype."""
    return bias.dtype == x.dtype and bias.shape == (*w.batch, w.n)
