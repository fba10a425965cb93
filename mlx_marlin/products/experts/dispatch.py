"""Decides who serves experts' products, ours or stock MLX, and prepares the run."""

from dataclasses import replace
from math import prod

import mlx.core as mx

from mlx_marlin import guard, state
from mlx_marlin.backends import experts_launch, planner, selection
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.planning.problem import MOST_ELEMENTS, largest_array
from mlx_marlin.products.autodiff import differentiable
from mlx_marlin.products.dispatch import PreparedCall, traced_call
from mlx_marlin.products.eligibility import (
    not_here,
    refuse_variance,
    target,
    unsupported,
)
from mlx_marlin.products.experts.reference import (
    Flat,
    flat_indices,
    stock_gated,
    stock_in_turn,
    stock_of,
)
from mlx_marlin.products.experts.request import (
    GatherRequest,
    pairs_of_row,
    problem_of_one,
)
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import DTYPE_BYTES, FORMATS, TILE_N


@state.cache(maxsize=4096)
def product_of(kind: GatherRequest) -> PreparedCall | None:
    """Returns the prepared product of a kind of call; None where stock serves it.

    It takes x, the rows' indices or None, the experts', codes, scales and biases.

    Raises:
        ValueError: If the kind must not vary, and our kernels do not take it.
    """
    reason = why_not_gather(kind)
    if reason:
        refuse_variance(kind.invariant, reason)
        return None
    if selection.backend() == "cuda":
        return _on_cuda(kind)
    problem = problem_of_one(kind)
    free = selection.backend() == "metal" and selection.forced_backend() is None
    if free and planner.gather_reason(problem, kind.experts, kind.is_sorted, target()):
        return None
    plan = planner.choose_gather(problem, kind.experts, target())
    fault = guard.why_not(plan)
    if fault:
        refuse_variance(kind.invariant, fault)
        return None
    product = differentiable(experts_launch.gather_product(plan), stock_of(kind))

    def run(
        x: mx.array, lhs: mx.array | None, rhs: mx.array, *weight: mx.array
    ) -> mx.array:
        sources, experts = flat_indices(x, lhs, rhs, kind.pairs)
        rows = x.reshape(-1, kind.k).astype(kind.dtype)
        y = product(rows, *weight, sources, experts)
        return y.reshape(*kind.pairs, 1, kind.n)

    return PreparedCall(run)


def why_not_gather(kind: GatherRequest) -> str | None:
    """Says why stock MLX serves a kind of call; None if our kernels do."""
    known = FORMATS.get((kind.mode, kind.bits))
    if known is None:
        return f"{kind.mode} {kind.bits}-bit is not one of our formats"
    wrong = known.why_not(kind.group_size, kind.k, kind.layout)
    if wrong is not None or kind.has_global_scale:
        return wrong or "our kernels take no global scale here"
    if not kind.transpose or len(kind.x_shape) < 2 or kind.x_shape[-2] != 1:
        return "our kernels take single rows times transposed weights"
    if dtype_name(kind.dtype) not in DTYPE_BYTES:
        return f"our kernels do not compute in {dtype_name(kind.dtype)}"
    if not prod(kind.pairs) or not prod(kind.x_shape) or not kind.experts * kind.n:
        return "there is nothing to add up"
    rows = max(prod(kind.pairs), prod(kind.x_shape[:-1]))
    if largest_array(rows, kind.n, kind.k, kind.bits) >= MOST_ELEMENTS:
        return "our kernels count in 32 bits, and an array is too large for that"
    return not_here(kind.on_cpu) or _why_not_on_cuda(kind)


def _why_not_on_cuda(kind: GatherRequest) -> str | None:
    if selection.backend() != "cuda":
        return None
    if kind.invariant:
        return "our CUDA kernels take no experts with invariant=True"
    all_rows = kind.experts * kind.n
    whole = largest_array(1, all_rows, kind.k, kind.bits)
    if kind.layout == "mlx" and whole >= MOST_ELEMENTS:
        return "our CUDA kernels count MLX's words in 32 bits, and there are more"
    return unsupported(problem_of_one(kind), kind.transpose)


def _cuda_product(
    kind: GatherRequest, each: int, gate: str | None = None
) -> Flat | None:
    """Returns the product of our CUDA kernel; None if it failed its check here."""
    device = target()
    assert isinstance(device, CudaDevice)
    asked = problem_of_one(kind), kind.experts, each, device
    plan = planner.choose_cuda_gather(*asked, gate, kind.biased)
    return None if guard.why_not(plan) else experts_launch.cuda_gather_product(plan)


def _on_cuda(kind: GatherRequest) -> PreparedCall | None:
    each = pairs_of_row(kind)
    ours = _cuda_product(kind, each)
    if ours is None:
        return None
    product = differentiable(ours, stock_in_turn(kind, each))

    def in_turn(x: mx.array, _: None, rhs: mx.array, *weight: mx.array) -> mx.array:
        experts = mx.broadcast_to(rhs, kind.pairs).astype(mx.uint32)
        return product(x.astype(kind.dtype), *weight, experts)

    def named(
        x: mx.array, lhs: mx.array | None, rhs: mx.array, *weight: mx.array
    ) -> mx.array:
        sources, experts = flat_indices(x, lhs, rhs, kind.pairs)
        y = product(x.astype(kind.dtype), *weight, experts, sources)
        return y.reshape(*kind.pairs, 1, kind.n)

    return traced_call(in_turn if each else named)


@state.cache(maxsize=4096)
def serve_gated(kind: GatherRequest, gate: str) -> PreparedCall | None:
    """Returns the product with packed experts of gate, which gates that of up.

    It takes x, codes and scales of gate, those of up, both biases if there are, and the
    experts of pairs; None where no kernel of ours does so, or rows of x are not in
    turn.
    """
    each = pairs_of_row(kind)
    packed = kind.layout == "marlin" and kind.n % TILE_N == 0
    if selection.backend() != "cuda" or not packed or not each:
        return None
    if why_not_gather(replace(kind, n=2 * kind.n)):  # of both weights
        return None
    ours = _cuda_product(kind, each, gate)
    if ours is None:
        return None
    product = differentiable(ours, stock_gated(kind, each, gate))

    def run(
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        second: mx.array,
        second_scales: mx.array,
        *given: mx.array,
    ) -> mx.array:
        *both, rhs = given
        experts = mx.broadcast_to(rhs, kind.pairs).astype(mx.uint32)
        x = x.astype(kind.dtype)
        return product(x, w, scales, scales, second, second_scales, *both, experts)

    return traced_call(run)
