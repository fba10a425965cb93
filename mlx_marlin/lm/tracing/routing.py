"""Routing of a mixture of experts: the choice, the scores, and the weighted sum."""

from dataclasses import dataclass
from math import prod

import mlx.core as mx

from mlx_marlin import guard
from mlx_marlin.backends import graph, selection
from mlx_marlin.planning.block_plans import CombinePlan, RoutePlan
from mlx_marlin.products.autodiff import are_without_vjp, differentiable
from mlx_marlin.weights.dtypes import dtype_name


@dataclass(frozen=True, slots=True)
class Routing:
    """Routing rule: a row chooses the experts with the largest logits."""

    choices: int  # Experts of a row
    # Whether scores are the softmax over all experts. Otherwise over the chosen ones
    of_all: bool = False
    # Whether the last of equal logits are chosen, as by a stable ascending sort.
    # Otherwise the first, as by a stable sort of negated logits. (Some families sort
    # rounded probabilities; here logits are compared.)
    last: bool = False


def has_kernel(logits: mx.array, routing: Routing) -> bool:
    """Returns whether the routing kernel supports these logits and this rule."""
    if logits.size == 0:
        return False
    plan = _plan(logits, routing)
    if RoutePlan not in selection.traits().launches or not plan.is_possible:
        return False
    known = plan.dtype in selection.traits().dtypes
    return known and guard.remembered_fault(plan) is None


def choose_experts(logits: mx.array, routing: Routing) -> tuple[mx.array, mx.array]:
    """Runs the routing kernel.

    `logits`: router logits [..., experts] that `has_kernel` accepts.
    """
    run = graph.call(_plan(logits, routing))
    if are_without_vjp():
        experts, scores = run(logits)
        return experts, scores
    experts, _ = run(mx.stop_gradient(logits))
    return experts, scores_of(logits, experts, routing)


def _plan(logits: mx.array, routing: Routing) -> RoutePlan:
    *rows, experts = logits.shape
    dtype = dtype_name(logits.dtype)
    how = routing.choices, routing.of_all, routing.last
    return RoutePlan(prod(rows), dtype, experts, *how)


def weighted_sum(results: mx.array, scores: mx.array, residual: mx.array) -> mx.array:
    """Returns the residual plus the sum of the experts' results times their scores.

    `results`: results of the chosen experts [..., choices, 1, n], in a dtype that the
    kernels support.
    `scores`: scores in float32 [..., choices].
    `residual`: residual [..., n], in the dtype of `results`.
    """
    *rows_shape, choices, _, n = results.shape
    if scores.shape != (*rows_shape, choices) or residual.shape != (*rows_shape, n):
        raise ValueError(
            f"results {results.shape}, scores {scores.shape} and residual "
            f"{residual.shape}, expected [..., choices, 1, n], [..., choices], [..., n]"
        )
    rows = residual.size // n
    plan = CombinePlan(rows, dtype_name(results.dtype), n, choices)
    if guard.remembered_fault(plan):
        return stock_sum(results, scores, residual)
    call = differentiable(graph.call(plan), stock_sum)
    return call(results, scores, residual)


def scores_of(logits: mx.array, experts: mx.array, routing: Routing) -> mx.array:
    """Returns the scores of chosen experts, as differentiable MLX operations."""
    logits = logits.astype(mx.float32)
    if routing.of_all:
        return mx.take_along_axis(mx.softmax(logits, axis=-1), experts, axis=-1)
    return mx.softmax(mx.take_along_axis(logits, experts, axis=-1), axis=-1)


def stock_sum(results: mx.array, scores: mx.array, residual: mx.array) -> mx.array:
    """Does what `weighted_sum` does, as MLX operations."""
    weighted = results.astype(mx.float32) * scores[..., None, None]
    total = weighted.sum(axis=(-3, -2))
    return (residual.astype(mx.float32) + total).astype(results.dtype)
