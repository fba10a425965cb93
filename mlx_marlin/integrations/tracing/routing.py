"""Which experts the rows of a mixture choose, and the sum of what these return."""

from dataclasses import dataclass

import mlx.core as mx

from mlx_marlin import guard
from mlx_marlin.backends import experts_launch, selection
from mlx_marlin.products.autodiff import are_without_vjp, differentiable
from mlx_marlin.weights.dtypes import dtype_name


@dataclass(frozen=True, slots=True)
class Routing:
    """How a row chooses experts: those with the largest logits.

    Attributes:
        choices: Experts of a row.
        of_all: Whether scores are the softmax over all experts, not over the chosen.
        last: Whether of equal logits the last are chosen, not the first: what a stable
            sort finds at the end of logits, not at the start of negative ones. (Some
            families order probabilities that are rounded; here logits decide.)
    """

    choices: int
    of_all: bool = False
    last: bool = False


def is_ours(logits: mx.array, routing: Routing) -> bool:
    """Returns whether a kernel of ours chooses experts by such logits."""
    kernels, experts = selection.active().routing, logits.shape[-1]
    if kernels is None or logits.size == 0:
        return False
    if not kernels.supports(experts, routing.choices, dtype_name(logits.dtype)):
        return False
    how = routing.choices, routing.of_all, routing.last
    return guard.route_fault(logits.dtype, experts, *how) is None


def choose_experts(logits: mx.array, routing: Routing) -> tuple[mx.array, mx.array]:
    """Returns the experts that rows choose, and their scores, by a kernel.

    Args:
        logits: Of each row [..., experts]; `is_ours` says which.
        routing: How they choose.

    Returns:
        Indices, uint32 [..., choices], and scores in float32 [..., choices].
    """
    how = routing.choices, routing.of_all, routing.last
    if are_without_vjp():
        return experts_launch.route(logits, *how)
    experts, _ = experts_launch.route(mx.stop_gradient(logits), *how)
    return experts, scores_of(logits, experts, routing)


def weighted_sum(results: mx.array, scores: mx.array, residual: mx.array) -> mx.array:
    """Returns a residual plus what experts made of rows, times their scores.

    Args:
        results: Of each row's choices [..., choices, 1, n], in a dtype of our kernels.
        scores: In float32 [..., choices].
        residual: Summands [..., n], in the dtype of `results`.

    Returns:
        The sums [..., n], rounded once, in the dtype of `results`.
    """
    *_, choices, _, n = results.shape
    if guard.combine_fault(results.dtype, n, choices):
        return stock_sum(results, scores, residual)
    return differentiable(experts_launch.combine, stock_sum)(results, scores, residual)


def scores_of(logits: mx.array, experts: mx.array, routing: Routing) -> mx.array:
    """Returns the scores of chosen experts in MLX's operations, with derivatives."""
    logits = logits.astype(mx.float32)
    if routing.of_all:
        return mx.take_along_axis(mx.softmax(logits, axis=-1), experts, axis=-1)
    return mx.softmax(mx.take_along_axis(logits, experts, axis=-1), axis=-1)


def stock_sum(results: mx.array, scores: mx.array, residual: mx.array) -> mx.array:
    """Does what `weighted_sum` does, in MLX's operations."""
    weighted = results.astype(mx.float32) * scores[..., None, None]
    total = weighted.sum(axis=(-3, -2))
    return (residual.astype(mx.float32) + total).astype(results.dtype)
