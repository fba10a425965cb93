"""Known answers of what computes, chooses and adds up experts."""

from dataclasses import replace

import mlx.core as mx

from mlx_marlin.backends import graph
from mlx_marlin.guard import operands, reference
from mlx_marlin.guard.operands import Operands
from mlx_marlin.guard.reference import Answer, evaluate, running
from mlx_marlin.planning.block_plans import CombinePlan, RoutePlan
from mlx_marlin.planning.gather_plan import GatherPlan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights import dtypes
from mlx_marlin.weights.formats import TILE_N

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
        chosen, scores = graph.call(replace(plan, rows=ROWS))(logits)
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
        answer = Answer(values, values * 2.0**-16)
    return reference.difference(scores, answer)


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
        y = graph.call(plan)(results, scores, residual)
    with mx.stream(mx.cpu):
        terms = reference.wide(results[:, :, 0]) * reference.wide(scores)[..., None]
        values = reference.wide(residual) + terms.sum(1)
        size = mx.abs(reference.wide(residual)) + mx.abs(terms).sum(1)
        bound = size * 2.0**-18 + reference.rounding(values, plan.dtype)
        answer = Answer(values, bound)
    return reference.difference(y, answer)


def fault_of(plan: GatherPlan) -> str | None:
    """Returns how the result of a small plan differs from its known answer, or None."""
    problem, gather = plan.problem, plan.gather
    rows = problem.m // plan.pairs_per_row if plan.pairs_per_row else problem.m + 1
    x = operands.activations(problem, (rows, problem.k))
    experts, sources = _choices(plan, rows)
    weight = operands.draw(_of_all_experts(problem, plan.experts))
    count = 2 if gather.gate else 1
    first_tiles = [_first_tiles(plan.experts, index) for index in range(count)]
    stored = [_stored(problem, weight, tiles) for tiles in first_tiles]
    biases = [
        operands.normals(problem, (plan.experts, problem.n), seed) for seed in (2, 3)
    ][: count * gather.bias]
    second = stored[1][:2] if gather.gate else ()
    indices = (experts,) if plan.pairs_per_row else (experts, sources)
    with running():
        product = graph.gather_product(plan)
        y = product(x, *stored[0], *second, *biases, *indices)
        y = y.reshape(problem.m, problem.n)
    with mx.stream(mx.cpu):
        answers = _sums(problem, x, weight, first_tiles, experts, sources)
        for index, bias in enumerate(biases):
            values = answers[index].values + reference.wide(bias)[experts]
            answers[index] = Answer(values, answers[index].bound)
        answer = answers[0]
        if gather.gate:
            answer = reference.gated(gather.gate, *answers)
        answer = reference.rounded(problem, answer)
    return reference.difference(y, answer)


def _of_all_experts(problem: Problem, experts: int) -> Problem:
    """Returns a problem whose weight contains the weights of all experts.

    The weight of every expert begins at another tile of 32 rows. So one weight is drawn
    and decoded for all of them, and no two are equal.
    """
    tiles = -(-problem.n // TILE_N) + experts - 1
    return replace(problem, n=TILE_N * tiles)


def _first_tiles(experts: int, index: int) -> list[int]:
    """Returns the first tile of weight `index` of each expert.

    The weights of one expert begin at different tiles.
    """
    return [(expert + 2 * index) % experts for expert in range(experts)]


def _stored(
    problem: Problem, weight: Operands, first_tiles: list[int]
) -> tuple[mx.array, ...]:
    """Returns codes, scales and biases [experts, ...] of the weights at these tiles.

    If n does not fill the last packed tile, the tile has rows of another expert too.
    """
    is_packed = problem.layout == "marlin"
    size = -(-problem.n // TILE_N) if is_packed else problem.n
    unit = 1 if is_packed else TILE_N
    with mx.stream(mx.cpu):
        stored = tuple(
            mx.stack([array[unit * tile : unit * tile + size] for tile in first_tiles])
            for array in weight.stored
        )
        mx.eval(stored)
    return stored


def _choices(plan: GatherPlan, rows: int) -> tuple[mx.array, mx.array]:
    """Returns the expert and the row of each pair.

    Most pairs choose the last expert and some the first; one expert has one pair, one
    has two, and the others have none.
    """
    with mx.stream(mx.cpu):
        pair = mx.arange(plan.problem.m)
        chosen = mx.where(pair % 5 == 1, 0, plan.experts - 1)
        chosen = mx.where(pair == 3, 1, chosen)
        chosen = mx.where(pair % 100 // 2 == 2, 2, chosen)
        if plan.pairs_per_row:
            sources = pair // plan.pairs_per_row
        else:
            sources = (pair * 7 + 1) % rows
        both = chosen.astype(mx.uint32), sources.astype(mx.uint32)
        mx.eval(both)
    return both


def _sums(
    problem: Problem,
    x: mx.array,
    weight: Operands,
    first_tiles: list[list[int]],
    experts: mx.array,
    sources: mx.array,
) -> list[Answer]:
    """Returns the products of pairs with each weight of their experts, and bounds."""
    total, bound = reference.sums(problem, reference.wide(x), weight)

    def of_pairs(all_columns: mx.array, tiles: list[int]) -> mx.array:
        columns = [
            all_columns[:, TILE_N * tile : TILE_N * tile + problem.n] for tile in tiles
        ]
        return mx.stack(columns)[experts, sources]

    return [
        Answer(of_pairs(total, tiles), of_pairs(bound, tiles)) for tiles in first_tiles
    ]
