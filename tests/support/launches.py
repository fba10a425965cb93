"""Calls of single kernels: of those that are no products, and of halves of products."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import mlx.core as mx

from mlx_marlin.backends import graph, selection
from mlx_marlin.planning.block_plans import (
    AddNormPlan,
    CombinePlan,
    HeadsPlan,
    RepackPlan,
    RoutePlan,
)
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.epilogue import Heads
from mlx_marlin.planning.plan import Plan
from mlx_marlin.weights.dtypes import dtype_name


def route(
    logits: mx.array, choices: int, of_all: bool, last: bool
) -> tuple[mx.array, mx.array]:
    """Returns the chosen experts of rows of logits, and their scores."""
    *rows, experts = logits.shape
    dtype = dtype_name(logits.dtype)
    plan = RoutePlan(prod(rows), dtype, experts, choices, of_all, last)
    chosen, scores = graph.call(plan)(logits)
    return chosen, scores


def combine(results: mx.array, scores: mx.array, residual: mx.array) -> mx.array:
    """Returns a residual plus the results of experts times their scores."""
    *_, choices, _, n = results.shape
    plan = CombinePlan(residual.size // n, dtype_name(results.dtype), n, choices)
    total: mx.array = graph.call(plan)(results, scores, residual)
    return total


def rotate_heads(
    heads: Heads,
    qkv: mx.array,
    positions: mx.array,
    freqs: mx.array,
    norms: Sequence[mx.array] = (),
) -> tuple[mx.array, mx.array]:
    """Returns the normalized and rotated heads of q and k."""
    streams, tokens, _ = qkv.shape
    per_stream = positions.size > 1
    plan = HeadsPlan(heads, dtype_name(qkv.dtype), streams, tokens, per_stream)
    q, k = graph.call(plan)(qkv, positions.reshape(-1), freqs, *norms)
    return q, k


def add_norm(
    x: mx.array, y: mx.array, weight: mx.array, epsilon: float
) -> tuple[mx.array, mx.array]:
    """Returns the sum of two arrays and its norm."""
    n = x.shape[-1]
    plan = AddNormPlan(x.size // n, dtype_name(x.dtype), n, epsilon)
    total, normed = graph.call(plan)(x, y, weight)
    return total, normed


def repack(
    to: str, *, n: int, k: int, bits: int, group_size: int
) -> Callable[[mx.array], mx.array]:
    """Returns what moves the codes of a weight or a batch to a layout."""
    form = {"n": n, "k": k, "bits": bits, "group_size": group_size}
    axes = 2 if to == "marlin" else 3

    def move(w: mx.array) -> mx.array:
        plan = RepackPlan(to=to, batch=w.shape[: w.ndim - axes], **form)
        moved: mx.array = graph.call(plan)(w)
        return moved

    return move


def dequantized(plan: DequantizePlan) -> Callable[..., mx.array]:
    """Returns what decodes a whole weight."""
    side = plan.problem.n if plan.transposed else plan.problem.k
    unit = plan.side
    whole = replace(plan, chunk=-(-side // unit) * unit)
    return lambda *weight: graph.decoded_blocks(whole)(*weight)[0]


def reduction(plan: Plan) -> Callable[..., mx.array]:
    """Returns what adds partial sums to a result of the problem's shape."""
    backend = selection.of_plan(plan)
    _, reduce = backend.launches(plan)
    rows = plan.problem.result_shape[:-1]
    outputs = tuple(
        replace(each, shape=(*rows, *each.shape), leading=None)
        for each in reduce.outputs
    )
    return graph.run_alone(backend, replace(reduce, outputs=outputs))
