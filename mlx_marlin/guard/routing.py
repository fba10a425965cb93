"""Known answers of the kernels that choose experts and add up their results."""

from dataclasses import replace

import mlx.core as mx

from mlx_marlin.backends import launcher
from mlx_marlin.guard import reference
from mlx_marlin.guard.answers import evaluate, running
from mlx_marlin.guard.reference import Answer
from mlx_marlin.planning.block_plans import CombinePlan, RoutePlan
from mlx_marlin.weights import dtypes

ROWS = 5
"""More than one row: MLX passes a single row's few scores in another address space, for
which a kernel is compiled again."""


def fault_of_route(plan: RoutePlan) -> str | None:
    """Returns how the kernel that chooses experts differs from its answer, or None."""
    experts, choices = plan.experts, plan.choices
    with mx.stream(mx.cpu):
        # Few numbers, so that many logits are equal, and with all their bits.
        drawn = mx.random.randint(-6, 6, (ROWS, experts), key=mx.random.key(0))
        logits = (drawn / 3).astype(dtypes.dtype(plan.dtype))
        mx.eval(logits)
    with running():
        chosen, scores = launcher.call(replace(plan, rows=ROWS))(logits)
    evaluate(chosen, scores)
    with mx.stream(mx.cpu):
        index = mx.arange(experts)
        order = drawn * experts + (index if plan.last else experts - 1 - index)
        expected = mx.argsort(-order, axis=-1)[:, :choices].astype(mx.uint32)
        if not mx.array_equal(mx.sort(chosen, axis=-1), mx.sort(expected, axis=-1)):
            return "it chose the wrong experts"
        wide = reference.wide(logits)
        of_chosen = mx.take_along_axis(wide, chosen, axis=-1)
        others = wide if plan.of_all else of_chosen
        values = mx.exp(of_chosen) / mx.exp(others).sum(-1, keepdims=True)
    return reference.difference(scores, Answer(values, values * 2.0**-16))


def fault_of_combine(plan: CombinePlan) -> str | None:
    """Returns how the kernel that adds results differs from its answer, or None."""
    faults = (_fault_of_sums(replace(plan, rows=rows)) for rows in (1, ROWS))
    return next(filter(None, faults), None)


def _fault_of_sums(plan: CombinePlan) -> str | None:
    dtype, rows = dtypes.dtype(plan.dtype), plan.rows
    n, choices = plan.n, plan.choices
    with mx.stream(mx.cpu):
        keys = mx.random.split(mx.random.key(0), 3)
        results = mx.random.normal((rows, choices, 1, n), key=keys[0])
        residual = mx.random.normal((rows, n), key=keys[1]).astype(dtype)
        scores = mx.random.uniform(-1, 1, (rows, choices), key=keys[2])
        results = results.astype(dtype)
        mx.eval(results, residual, scores)
    with running():
        y = launcher.call(plan)(results, scores, residual)
    with mx.stream(mx.cpu):
        terms = reference.wide(results[:, :, 0]) * reference.wide(scores)[..., None]
        values = reference.wide(residual) + terms.sum(1)
        size = mx.abs(reference.wide(residual)) + mx.abs(terms).sum(1)
        bound = size * 2.0**-18 + reference.rounding(values, plan.dtype)
        answer = Answer(values, bound)
    return reference.difference(y, answer)
