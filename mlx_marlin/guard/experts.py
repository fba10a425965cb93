"""Known answers of experts' products."""

import mlx.core as mx

from mlx_marlin.backends import experts_launch
from mlx_marlin.backends.cuda.experts_plan import CudaGatherPlan
from mlx_marlin.backends.metal.experts_plan import GatherPlan
from mlx_marlin.guard import operands, reference
from mlx_marlin.guard.operands import Operands
from mlx_marlin.guard.reference import Answer
from mlx_marlin.planning.problem import Problem


def fault_of(plan: GatherPlan | CudaGatherPlan) -> str | None:
    """Returns how a small plan's results differ from their answer; None if not.

    Args:
        plan: A plan of few pairs; its kernel runs once.
    """
    y, answer = _metal(plan) if isinstance(plan, GatherPlan) else _cuda(plan)
    problem = plan.problem
    return reference.difference(y.reshape(problem.m, problem.n), answer)


def _metal(plan: GatherPlan) -> tuple[mx.array, Answer]:
    problem = plan.problem
    x = operands.activations(problem, (problem.m + 1, problem.k))
    weight = operands.draw(problem, (plan.experts,))
    experts, sources = _choices(problem.m, plan.experts, len(x))
    y = experts_launch.gather_product(plan)(x, *weight.stored, sources, experts)
    with mx.stream(mx.cpu):
        return y, _of_one(problem, _sums(problem, x[sources], weight, experts))


def _cuda(plan: CudaGatherPlan) -> tuple[mx.array, Answer]:
    problem = plan.problem
    rows = problem.m // plan.each if plan.each else problem.m + 1
    x = operands.activations(problem, (rows, problem.k))
    experts, sources = _choices(problem.m, plan.experts, rows, plan.each)
    weights = [operands.draw(problem, (plan.experts,), seed) for seed in (0, 5)]
    biases = [
        operands.activations(problem, (plan.experts, problem.n), seed)
        for seed in (2, 3)
    ]
    count = 2 if plan.gate else 1
    weights, biases = weights[:count], biases[: count * plan.bias]
    second = weights[1].stored[:2] if plan.gate else ()
    named = () if plan.each else (sources,)
    y = experts_launch.cuda_gather_product(plan)(
        x, *weights[0].stored, *second, *biases, experts, *named
    )
    with mx.stream(mx.cpu):
        sums = [_sums(problem, x[sources], weight, experts) for weight in weights]
        for nth, bias in enumerate(biases):
            added = reference.wide(bias)[experts]
            sums[nth] = Answer(sums[nth].values + added, sums[nth].bound)
        if plan.gate:
            return y, _gated(problem, sums[0].values, sums[1].values, plan.gate)
        return y, _of_one(problem, sums[0])


def _choices(
    pairs: int, experts: int, rows: int, each: int = 0
) -> tuple[mx.array, mx.array]:
    """Returns the expert and the row of each pair.

    Most pairs choose the last expert and some the first; one expert has one pair, one
    has two, and all others have none.
    """
    with mx.stream(mx.cpu):
        nth = mx.arange(pairs)
        chosen = mx.where(nth % 5 == 1, 0, experts - 1)
        chosen = mx.where(nth == 3, 1, chosen)
        chosen = mx.where(nth % 100 // 2 == 2, 2, chosen)
        sources = nth // each if each else (nth * 7 + 1) % rows
        both = chosen.astype(mx.uint32), sources.astype(mx.uint32)
        mx.eval(both)
    return both


def _sums(problem: Problem, x: mx.array, weight: Operands, experts: mx.array) -> Answer:
    """Returns the products of rows with their experts, and the error of the sums."""
    rows, nth = reference.wide(x), mx.arange(len(x))

    values = rows @ weight.exact.swapaxes(-1, -2)
    off = reference.error_of_sum(problem, rows, weight.magnitude)
    return Answer(values[experts, nth], off[experts, nth])


def _of_one(problem: Problem, sums: Answer) -> Answer:
    rounded = reference.rounding(sums.values, problem.dtype)
    return Answer(sums.values, sums.bound + rounded)


def _gated(problem: Problem, first: mx.array, up: mx.array, gate: str) -> Answer:
    if gate == "silu":
        y = reference.activated("silu", first) * up
    else:
        first, up = mx.minimum(first, 7), mx.clip(up, -7, 7)
        y = first * mx.sigmoid(1.702 * first) * (up + 1)
    size = mx.sqrt(mx.square(y).mean())
    off = size * reference.OF_PAIRS[problem.dtype]
    return Answer(y, off + reference.rounding(y, problem.dtype))
