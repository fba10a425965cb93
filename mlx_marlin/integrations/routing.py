"""Which experts the rows of a mixture choose, and the sum of what these return."""

from dataclasses import dataclass

import mlx.core as mx

from mlx_marlin import gather_launch
from mlx_marlin.derivatives import are_left_out
from mlx_marlin.integrations.known_layers import runs_on_cuda
from mlx_marlin.kernels import SIMD_WIDTH
from mlx_marlin.packing import dtype_name
from mlx_marlin.problem import MOST_ELEMENTS

MOST_EXPERTS = 1024
"""Of a row that a warp keeps in its registers: 32 a lane."""
DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Routing:
    """How a row chooses experts: those with the largest logits, of equal ones any.

    Attributes:
        choices: Experts of a row.
        of_all: Whether scores are the softmax over all experts, not over the chosen.
    """

    choices: int
    of_all: bool = False


def choose_experts(logits: mx.array, routing: Routing) -> tuple[mx.array, mx.array]:
    """Returns the experts that rows choose, and their scores.

    Args:
        logits: Of each row [..., experts].
        routing: How they choose.

    Returns:
        Indices, uint32 [..., choices], and scores in float32 [..., choices].
    """
    experts = logits.shape[-1]
    few = routing.choices <= min(SIMD_WIDTH, experts) and experts <= MOST_EXPERTS
    if few and _is_ours(logits):
        return gather_launch.route(logits, routing.choices, routing.of_all)
    return stock_choice(logits, routing)


def weighted_sum(results: mx.array, scores: mx.array, residual: mx.array) -> mx.array:
    """Returns a residual plus what experts made of rows, times their scores.

    Args:
        results: Of each row's choices [..., choices, 1, n].
        scores: In float32 [..., choices].
        residual: Summands [..., n], in the dtype of `results`.

    Returns:
        The sums [..., n], rounded once, in the dtype of `results`.
    """
    if _is_ours(results) and residual.dtype == results.dtype:
        return gather_launch.combine(results, scores, residual)
    return stock_sum(results, scores, residual)


def stock_choice(logits: mx.array, routing: Routing) -> tuple[mx.array, mx.array]:
    """Likewise, in MLX's operations, which have derivatives."""
    largest = mx.argpartition(-logits, kth=routing.choices - 1, axis=-1)
    experts = mx.stop_gradient(largest[..., : routing.choices])
    logits = logits.astype(mx.float32)
    if routing.of_all:
        scores = mx.take_along_axis(mx.softmax(logits, axis=-1), experts, axis=-1)
    else:
        scores = mx.softmax(mx.take_along_axis(logits, experts, axis=-1), axis=-1)
    return experts, scores


def stock_sum(results: mx.array, scores: mx.array, residual: mx.array) -> mx.array:
    """Likewise."""
    weighted = results.astype(mx.float32) * scores[..., None, None]
    total = weighted.sum(axis=(-3, -2))
    return (residual.astype(mx.float32) + total).astype(results.dtype)


def _is_ours(array: mx.array) -> bool:
    """Returns whether a kernel of ours takes an array: where nobody differentiates."""
    known = dtype_name(array.dtype) in DTYPES and 0 < array.size < MOST_ELEMENTS
    return known and are_left_out() and runs_on_cuda()
