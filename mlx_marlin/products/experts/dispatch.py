"""Decides whether our kernel or stock MLX serves experts' products."""

from math import prod

import mlx.core as mx

from mlx_marlin import decision_log, guard, state
from mlx_marlin.backends import launcher, planner, selection
from mlx_marlin.planning.gather_plan import GatherPlan, GatherProblem
from mlx_marlin.planning.problem import MOST_ELEMENTS, largest_array
from mlx_marlin.products.autodiff import differentiable
from mlx_marlin.products.dispatch import PreparedCall, traced_call
from mlx_marlin.products.eligibility import not_here, refuse_variance, target
from mlx_marlin.products.experts.reference import (
    flat_indices,
    stock_gated,
    stock_product,
)
from mlx_marlin.products.experts.request import (
    GatherRequest,
    pairs_of_row,
    problem_of_one,
)
from mlx_marlin.products.request import Run
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import DTYPE_BYTES, FORMATS


@state.cache(maxsize=4096)
def product_of(request: GatherRequest) -> PreparedCall | None:
    """Returns the prepared call of a request, or None if stock MLX serves it; cached.

    The call takes x, the row of x of each pair or None, the experts, codes, scales,
    biases and, if the request has them, the biases [experts, n] that are added.

    Raises:
        ValueError: If the request is invariant and stock MLX would have to serve it.
    """
    plan = plan_of(request)
    reason = plan if isinstance(plan, str) else guard.why_not(plan)
    if isinstance(plan, str) or reason is not None:
        refuse_variance(request.invariant, str(reason))
        decision_log.stock(request, str(reason))
        return None
    decision_log.ours(request, plan)
    return _prepared(_single_weight_call(request, plan))


def plan_of(request: GatherRequest) -> GatherPlan | str:
    """Returns the plan of a request, or the reason why stock MLX serves it.

    The plan's kernel may still fail its check.
    """
    reason = why_not_gather(request)
    if reason is not None:
        return reason
    gather = gather_problem(request)
    if selection.may_hand_over():
        reason = planner.gather_handover(gather, target())
    return planner.choose_gather(gather, target()) if reason is None else reason


@state.cache(maxsize=4096)
def serve_gated(request: GatherRequest, gate: str) -> PreparedCall | None:
    """Returns the prepared call that gates the products of two packed weights; cached.

    The call takes x, codes and scales of gate, those of up, the biases [experts, n] of
    both if the request has them, and the experts.

    Args:
        request: The request for one of both weights.
        gate: How gate gates up, one of `gather_plan.GATES`.

    Returns:
        The call, or None if no kernel fuses both products.
    """
    fuses = selection.traits().fuses_experts
    if not fuses or why_not_gather(request, gate):
        return None
    plan = planner.choose_gather(gather_problem(request, gate), target())
    if guard.why_not(plan):
        return None
    decision_log.ours(request, plan)
    return _prepared(_gated_call(request, plan, gate))


def why_not_gather(request: GatherRequest, gate: str | None = None) -> str | None:
    """Returns why stock MLX serves a request, or None if our kernel can.

    Args:
        request: The request.
        gate: As for `serve_gated`; None for one weight.
    """
    reason = not_ours(request, gate) or not_here(request.on_cpu)
    if reason:
        return reason
    return selection.active().unsupported(gather_problem(request, gate), target())


def not_ours(request: GatherRequest, gate: str | None = None) -> str | None:
    """Returns what part of a request no kernel computes, or None.

    Args:
        request: The request.
        gate: As for `why_not_gather`.
    """
    known = FORMATS.get((request.mode, request.bits))
    if known is None:
        return f"{request.mode} {request.bits}-bit is not one of our formats"
    wrong = known.why_not(request.group_size, request.k, request.layout)
    if wrong is not None or request.has_global_scale:
        return wrong or "our kernels for experts take no global scale"
    if not request.transpose or len(request.x_shape) < 2 or request.x_shape[-2] != 1:
        return "our kernels for experts take single rows times transposed weights"
    if dtype_name(request.dtype) not in DTYPE_BYTES:
        return f"our kernels do not compute in {dtype_name(request.dtype)}"
    if (
        not prod(request.pairs)
        or not prod(request.x_shape)
        or not request.experts * request.n
    ):
        return "there is nothing to add up"
    rows = max(prod(request.pairs), prod(request.x_shape[:-1]))
    columns = request.n * (2 if gate else 1)
    if largest_array(rows, columns, request.k, request.bits) >= MOST_ELEMENTS:
        return "our kernels count in 32 bits, and an array is too large for that"
    return None


def gather_problem(request: GatherRequest, gate: str | None = None) -> GatherProblem:
    """Returns what planning has to know of a request."""
    return GatherProblem(
        problem=problem_of_one(request),
        experts=request.experts,
        pairs_per_row=pairs_of_row(request),
        is_sorted=request.is_sorted,
        gate=gate,
        bias=request.biased,
    )


def _single_weight_call(request: GatherRequest, plan: GatherPlan) -> Run:
    stock = stock_product(request, plan.pairs_per_row)
    product = differentiable(launcher.gather_product(plan), stock)

    def consecutive(x: mx.array, _: None, rhs: mx.array, *weight: mx.array) -> mx.array:
        experts = mx.broadcast_to(rhs, request.pairs).astype(mx.uint32)
        return product(x.astype(request.dtype), *weight, experts)

    def indexed(
        x: mx.array, lhs: mx.array | None, rhs: mx.array, *weight: mx.array
    ) -> mx.array:
        sources, experts = flat_indices(x, lhs, rhs, request.pairs)
        y = product(x.astype(request.dtype), *weight, experts, sources)
        return y.reshape(*request.pairs, 1, request.n)

    return consecutive if plan.pairs_per_row else indexed


def _gated_call(request: GatherRequest, plan: GatherPlan, gate: str) -> Run:
    stock = stock_gated(request, plan.pairs_per_row, gate)
    product = differentiable(launcher.gather_product(plan), stock)

    def run(
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        second: mx.array,
        second_scales: mx.array,
        *biases_and_experts: mx.array,
    ) -> mx.array:
        *biases, rhs = biases_and_experts
        experts = mx.broadcast_to(rhs, request.pairs).astype(mx.uint32)
        x = x.astype(request.dtype)
        return product(x, w, scales, scales, second, second_scales, *biases, experts)

    return run


def _prepared(run: Run) -> PreparedCall:
    return traced_call(run) if selection.traits().replays_graphs else PreparedCall(run)
