"""Decides whether our kernel or stock MLX serves experts' products."""

from typing import NoReturn

import mlx.core as mx

from mlx_marlin import decision_log
from mlx_marlin.backends import launcher, selection
from mlx_marlin.planning.gather_plan import GatherPlan
from mlx_marlin.planning.verdict import Refusal
from mlx_marlin.products import serving
from mlx_marlin.products.autodiff import differentiable
from mlx_marlin.products.dispatch import PreparedCall, traced_call
from mlx_marlin.products.eligibility import refuse_variance
from mlx_marlin.products.experts.reference import (
    flat_indices,
    stock_gated,
    stock_packed,
    stock_product,
)
from mlx_marlin.products.experts.request import GatherRequest
from mlx_marlin.products.request import Run


def prepare(request: GatherRequest) -> PreparedCall:
    """Decides who serves a request, and prepares the call.

    Of what stock MLX serves, only the plain product with packed weights is prepared;
    callers compute the others. The call takes x, the row of x of each pair or None, the
    experts, codes, scales, biases and, if the request has them, the biases [experts, n]
    that are added. If the request has a gate, it takes x, codes and scales of gate,
    those of up, the biases of both if the request has them, and the experts.
    """
    answer = serving.serve(request, serving.here())
    if isinstance(answer, Refusal):
        refuse_variance(request.invariant, answer.reason)
        if not request.gate:
            decision_log.stock(request, answer.reason)
        is_stock = request.layout == "mlx"
        run = _callers_own if is_stock or request.gate else _stock_call(request)
        return PreparedCall(run, answer.reason, is_stock)
    assert isinstance(answer, GatherPlan)
    decision_log.ours(request, answer)
    build = _gated_call if request.gate else single_weight_call
    run = build(request, answer)
    return traced_call(run) if selection.traits().replays_graphs else PreparedCall(run)


def _callers_own(*_: object) -> NoReturn:
    raise AssertionError("callers compute what stock MLX serves")


def _stock_call(request: GatherRequest) -> Run:
    def run(
        x: mx.array,
        lhs: mx.array | None,
        rhs: mx.array,
        words: mx.array,
        scales: mx.array,
        _: mx.array,
        *bias: mx.array,
    ) -> mx.array:
        y = stock_packed(request, x, words, scales, lhs, rhs)
        return y + mx.expand_dims(bias[0][rhs], -2) if bias else y

    return run


def single_weight_call(request: GatherRequest, plan: GatherPlan) -> Run:
    """Returns the call of a plan for experts with one weight each, as `prepare`
    does."""
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


def _gated_call(request: GatherRequest, plan: GatherPlan) -> Run:
    stock = stock_gated(request, plan.pairs_per_row, str(request.gate))
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
