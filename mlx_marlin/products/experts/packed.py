"""Products with packed experts, for layers that hold their arrays themselves."""

from dataclasses import replace

import mlx.core as mx

from mlx_marlin import state
from mlx_marlin.backends import selection
from mlx_marlin.products.dispatch import Key, PreparedCall, remembered
from mlx_marlin.products.experts.dispatch import product_of
from mlx_marlin.products.experts.reference import stock_packed
from mlx_marlin.products.experts.request import GatherRequest, packed_request
from mlx_marlin.products.request import CPU, PackedArrays

Decision = tuple[GatherRequest, PreparedCall | None]
"""A request and its prepared call; None if stock MLX serves it."""

_known: dict[Key, Decision] = state.register({})
_gated: dict[Key, Decision] = state.register({})


def gather_packed(
    x: mx.array,
    weight: PackedArrays,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    *,
    transpose: bool = True,
    sorted_indices: bool = False,
    invariant: bool = False,
    bias: mx.array | None = None,
) -> mx.array:
    """Multiplies rows by packed weights that indices select.

    Args:
        x: Activations [..., m, k].
        weight: All weights; the batch of their format is (experts,).
        lhs_indices: As for `gather_qmm`.
        rhs_indices: As for `gather_qmm`.
        transpose: As for `gather_qmm`.
        sorted_indices: As for `gather_qmm`.
        invariant: As for `gather_qmm`.
        bias: Of each weight [experts, n].

    Returns:
        The products [..., m, n], one for each pair of indices, plus their biases.
    """
    words, scales, _, format = weight
    if rhs_indices is None:
        rhs_indices = mx.arange(words.shape[0], dtype=mx.uint32)
    added = [bias] if bias is not None and _is_fused(bias, x, weight) else []
    lhs = None if lhs_indices is None else (lhs_indices.shape, lhs_indices.dtype)
    rhs = rhs_indices.shape, rhs_indices.dtype
    options = transpose, sorted_indices, invariant, bool(added)
    on_cpu = mx.default_device() == CPU
    key = x.shape, x.dtype, format, scales.dtype, lhs, rhs, options, on_cpu
    decision = _known.get(key)
    if decision is None:
        request = packed_request((x.shape, x.dtype), weight, lhs, rhs, options)
        decision = remembered(_known, key, (request, product_of(request)))
    request, prepared = decision
    if prepared is None:
        y, added = stock_packed(request, x, words, scales, lhs_indices, rhs_indices), []
    else:
        y = prepared.run(x, lhs_indices, rhs_indices, words, scales, scales, *added)
    if bias is None or added:
        return y
    return y + mx.expand_dims(bias[rhs_indices], -2)


def gather_gated(
    x: mx.array,
    gate: PackedArrays,
    up: PackedArrays,
    indices: mx.array,
    gating: str = "silu",
    biases: tuple[mx.array, ...] = (),
) -> mx.array | None:
    """Multiplies rows by packed experts of gate and of up, and gates.

    Args:
        x: Activations [..., k].
        gate: Weights of gate.
        up: Weights of up, of the same format.
        indices: The experts of each row [..., choices].
        gating: How gate gates up, one of `planning.gather_plan.GATES`.
        biases: Of gate and of up [experts, n], or none.

    Returns:
        For example `silu(x @ gate.T) * (x @ up.T)`, [..., choices, 1, n], rounded once;
        None if no kernel computes it.
    """
    if not all(_is_fused(bias, x, gate) for bias in biases):
        return None
    words, scales, _, format = gate
    rhs = indices.shape, indices.dtype
    on_cpu = mx.default_device() == CPU
    fused = gating, bool(biases)
    key = x.shape, x.dtype, format, scales.dtype, rhs, fused, on_cpu
    decision = _gated.get(key)
    if decision is None:
        # The shape with one row per expert. A view would cost the host 2 us (docs/lab).
        rows = (*x.shape[:-1], 1, 1, format[1]), x.dtype
        options = True, False, False, bool(biases)
        request = packed_request(rows, gate, None, rhs, options)
        request = replace(request, gate=gating)
        decision = remembered(_gated, key, (request, product_of(request)))
    prepared = decision[1]
    if prepared is None:
        return None
    return prepared.run(x, words, scales, up[0], up[1], *biases, indices)


def _is_fused(bias: mx.array, x: mx.array, weight: PackedArrays) -> bool:
    """Returns whether a kernel adds a bias of each expert, which has x's dtype."""
    n, *_, batch = weight[-1]
    fits = bias.dtype == x.dtype and bias.shape == (*batch, n)
    return fits and selection.traits().fuses_experts
