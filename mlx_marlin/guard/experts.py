"""Known answers of experts' products."""

from dataclasses import replace

import mlx.core as mx

from mlx_marlin.backends import experts_launch
from mlx_marlin.backends.cuda.experts.plan import CudaGatherPlan
from mlx_marlin.backends.metal.experts.plan import GatherPlan
from mlx_marlin.guard import operands, reference
from mlx_marlin.guard.operands import Operands
from mlx_marlin.guard.reference import Answer
from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights.formats import TILE_N


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
    weight = operands.draw(_of_all_experts(problem, plan.experts))
    experts, sources = _choices(problem.m, plan.experts, len(x))
    first = [*range(plan.experts)]
    stored = _stored(problem, weight, first)
    y = experts_launch.gather_product(plan)(x, *stored, sources, experts)
    with mx.stream(mx.cpu):
        (sums,) = _sums(problem, x, weight, [first], experts, sources)
        return y, reference.rounded(problem, sums)


def _cuda(plan: CudaGatherPlan) -> tuple[mx.array, Answer]:
    problem = plan.problem
    rows = problem.m // plan.each if plan.each else problem.m + 1
    x = operands.activations(problem, (rows, problem.k))
    experts, sources = _choices(problem.m, plan.experts, rows, plan.each)
    weight = operands.draw(_of_all_experts(problem, plan.experts))
    count = 2 if plan.gate else 1
    first = [_first_tiles(plan.experts, nth) for nth in range(count)]
    stored = [_stored(problem, weight, each) for each in first]
    biases = [
        operands.normals(problem, (plan.experts, problem.n), seed) for seed in (2, 3)
    ][: count * plan.bias]
    second = stored[1][:2] if plan.gate else ()
    named = () if plan.each else (sources,)
    y = experts_launch.cuda_gather_product(plan)(
        x, *stored[0], *second, *biases, experts, *named
    )
    with mx.stream(mx.cpu):
        sums = _sums(problem, x, weight, first, experts, sources)
        for nth, bias in enumerate(biases):
            added = reference.wide(bias)[experts]
            sums[nth] = Answer(sums[nth].values + added, sums[nth].bound)
        if plan.gate:
            return y, reference.rounded(
                problem, reference.gated(plan.gate, sums[0], sums[1])
            )
        return y, reference.rounded(problem, sums[0])


def _of_all_experts(problem: Problem, experts: int) -> Problem:
    """Returns a problem whose weight has the weights of all experts in it.

    Each begins a tile of 32 rows after another one: one weight is drawn and decoded for
    all of them, and no two are equal.
    """
    tiles = -(-problem.n // TILE_N) + experts - 1
    return replace(problem, n=TILE_N * tiles)


def _first_tiles(experts: int, nth: int) -> list[int]:
    """Returns where the nth weight of each expert begins: not where its others do."""
    return [(expert + 2 * nth) % experts for expert in range(experts)]


def _stored(
    problem: Problem, weight: Operands, first: list[int]
) -> tuple[mx.array, ...]:
    """Returns codes, scales and biases [experts, ...], by the tiles where they begin.

    Packed tiles have rows of another expert where n does not fill the last one.
    """
    is_packed = problem.layout == "marlin"
    size = -(-problem.n // TILE_N) if is_packed else problem.n
    unit = 1 if is_packed else TILE_N
    with mx.stream(mx.cpu):
        stored = tuple(
            mx.stack([each[unit * tile : unit * tile + size] for tile in first])
            for each in weight.stored
        )
        mx.eval(stored)
    return stored


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


def _sums(
    problem: Problem,
    x: mx.array,
    weight: Operands,
    first: list[list[int]],
    experts: mx.array,
    sources: mx.array,
) -> list[Answer]:
    """Returns the products of pairs with each weight of their experts, and errors."""
    total, off = reference.sums(problem, reference.wide(x), weight)

    def of_pairs(all_columns: mx.array, tiles: list[int]) -> mx.array:
        columns = [
            all_columns[:, TILE_N * tile : TILE_N * tile + problem.n] for tile in tiles
        ]
        return mx.stack(columns)[experts, sources]

    return [Answer(of_pairs(total, each), of_pairs(off, each)) for each in first]
