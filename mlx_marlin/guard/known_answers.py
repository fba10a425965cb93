"""Checks a plan's kernel variants on small problems with known answers."""

from dataclasses import replace
from functools import singledispatch
from typing import Any, cast

import mlx.core as mx

from mlx_marlin.backends import graph, selection
from mlx_marlin.backends.base import Probe
from mlx_marlin.backends.build import IN_CONSTANT
from mlx_marlin.guard import experts, operands, reference
from mlx_marlin.guard.miniatures import miniatures
from mlx_marlin.guard.reference import (
    FAR,
    OF_FUNCTIONS,
    Answer,
    EpilogueArrays,
    evaluate,
    norm_factor,
    rotated,
    rounding,
    running,
    wide,
)
from mlx_marlin.planning.block_plans import (
    AddNormPlan,
    CombinePlan,
    HeadsPlan,
    RepackPlan,
    RoutePlan,
)
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.epilogue import PLAIN, Heads
from mlx_marlin.planning.gather_plan import GatherPlan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights import dtypes
from mlx_marlin.weights.tile_conversion import tiles_of_rows

STREAMS = (2, 8)
"""MLX passes fewer than eight positions in another address space, for which the kernel
is compiled again."""
ROWS = 3
FIRST = 37
"""Position of the first token."""


@singledispatch
def fault_of(plan: object) -> str | None:
    """Returns what is wrong with the kernels of a plan; None if nothing is.

    The kernel instances of a product run on a small problem with ragged m and n,
    several groups and, if the plan splits tiles, several splits. Results are compared
    with float64. Then one row of x becomes NaN, and all other rows of the result must
    stay bitwise equal.
    """
    raise TypeError(f"no known answer of {plan!r}")


fault_of.register(RoutePlan, experts.fault_of_route)
fault_of.register(CombinePlan, experts.fault_of_combine)


@fault_of.register(DequantizePlan)
@fault_of.register(GatherPlan)
def _fault_of_miniatures(plan: DequantizePlan | GatherPlan) -> str | None:
    is_gather = isinstance(plan, GatherPlan)
    check: Any = experts.fault_of if is_gather else _fault_of_dequantized
    return next(filter(None, map(check, miniatures(plan))), None)


def fault_of_probe(probe: Probe) -> str | None:
    """Returns what is wrong with the results of a probe; None if nothing is."""
    return probe.fault(output_of_probe(probe))


def output_of_probe(probe: Probe) -> list[float]:
    """Returns the elements of a probe's output."""
    with running():
        run = graph.run_alone(selection.active(), probe.launch)
        output = run(mx.zeros((IN_CONSTANT,)))
    evaluate(output)
    return cast(list[float], output.tolist())


@fault_of.register(RepackPlan)
def _fault_of_repack(plan: RepackPlan) -> str | None:
    size = 32 if plan.order == "k32" else 64
    form = {"bits": plan.bits, "group_size": size}
    n, k = 51, 17 * 64 + (size if size == 32 else 0)
    with mx.stream(mx.cpu):
        shape = (2, n, k * plan.bits // 8)
        drawn = mx.random.randint(0, 256, shape, mx.uint8, key=mx.random.key(0))
        rows = drawn.view(mx.uint32)
        tiles = tiles_of_rows(rows, n, k, **form)
        mx.eval(rows, tiles)
    given, expected = (rows, tiles) if plan.to == "marlin" else (tiles, rows)
    small = RepackPlan(to=plan.to, batch=(2,), n=n, k=k, **form)
    with running():
        moved = graph.call(small)(given)
    evaluate(moved)
    if mx.array_equal(moved, expected).item():
        return None
    return "it moved codes to wrong positions"


@fault_of.register(Plan)
def _fault_of_products(plan: Plan) -> str | None:
    """Checks small plans of one problem, which differ in the division of the work."""
    plans = miniatures(plan)
    problem = plans[0].problem
    batch = (problem.batch,) if problem.batch > 1 else ()
    x = operands.activations(problem, (*batch, problem.m, problem.k))
    weight = operands.draw(problem, batch)
    arrays = _drawn_epilogue_arrays(problem)
    given = _as_arguments(problem, x, arrays)
    with mx.stream(mx.cpu):
        answer = reference.product(problem, x, weight, arrays)
    for small in plans:
        with running():
            run = graph.product(small, listed=False)

        def result(x: mx.array, run: graph.Product = run) -> mx.array:
            return _whole(run(x, *weight.stored, *given), problem)

        with running():
            y = result(x)
        wrong = reference.difference(y, answer)
        if wrong is None and small is plans[0] and small.reduction != "atomic":
            wrong = _fault_of_nan(y, x, result)
        if wrong is not None:
            return wrong
    return None


def _fault_of_nan(y: mx.array, x: mx.array, result: graph.Product) -> str | None:
    """Checks that a NaN affects only its row, and that results are reproducible."""
    with mx.stream(mx.cpu):
        rows = x.reshape(-1, x.shape[-1])
        rows[-1, 0] = mx.nan
        with_nan = rows.reshape(x.shape)
        mx.eval(with_nan)
    with running():
        again = result(with_nan)
    evaluate(again)
    with mx.stream(mx.cpu):
        before, after = (array.reshape(len(rows), -1) for array in (y, again))
        if not mx.isnan(after[-1]).all().item():
            return "NaN in x did not come out of its row"
        if not mx.array_equal(before[:-1], after[:-1]).item():
            return "rows changed when another row became NaN, or from run to run"
    return None


def _fault_of_dequantized(plan: DequantizePlan) -> str | None:
    problem = plan.problem
    weight = operands.draw(problem)
    axis = 0 if plan.transposed else 1
    with running():
        parts = graph.decoded_blocks(plan)(*weight.stored)
        decoded = mx.concatenate(parts, axis=axis)
    with mx.stream(mx.cpu):
        off = reference.rounding(weight.exact, problem.dtype)
        answer = Answer(weight.exact, off + mx.abs(weight.magnitude) * 2.0**-20)
    return reference.difference(decoded, answer)


def _drawn_epilogue_arrays(problem: Problem) -> EpilogueArrays:
    epilogue, rotation = problem.epilogue, problem.epilogue.rotation

    def drawn(seed: int, *shape: int) -> mx.array:
        return operands.normals(problem, shape, seed)

    arrays = EpilogueArrays(
        bias=drawn(2, problem.n) if epilogue.bias else None,
        multiply=drawn(3, *problem.result_shape) if epilogue.multiply else None,
        residual=drawn(4, *problem.result_shape) if epilogue.residual else None,
        norm=None if problem.norm is None else drawn(5, problem.k),
    )
    if rotation is None:
        return arrays
    features = rotation.features
    with mx.stream(mx.cpu):
        positions = mx.arange(problem.m if rotation.per_row else 1) + 3
        positions[-1] = FAR
        freqs = mx.power(10000.0, mx.arange(0, features, 2) / features)
        mx.eval(positions, freqs)
    norms = () if rotation.norm is None else (drawn(6, features), drawn(7, features))
    return replace(arrays, positions=positions, freqs=freqs, head_norms=norms)


def _as_arguments(
    problem: Problem, x: mx.array, arrays: EpilogueArrays
) -> list[mx.array]:
    """Returns the arguments of `graph.product` after the weight."""
    if problem.epilogue == PLAIN and problem.norm is None:
        return []
    elementwise = (arrays.bias, arrays.multiply, arrays.residual)
    given = [x if array is None else array for array in elementwise]
    others = (arrays.positions, arrays.freqs, *arrays.head_norms, arrays.norm)
    return [*given, *(array for array in others if array is not None)]


def _whole(y: mx.array, problem: Problem) -> mx.array:
    """Returns the results of all parts, concatenated."""
    if not problem.epilogue.parts:
        return y
    axis = 1 if problem.epilogue.rotation is not None else -1
    return mx.concatenate([*y], axis=axis)


@fault_of.register(HeadsPlan)
def fault_of_rotation(plan: HeadsPlan) -> str | None:
    """Returns how the kernel that rotates heads differs from its answer, or None."""
    counts = STREAMS if plan.per_stream else STREAMS[:1]
    faults = (_rotation_fault(replace(plan, streams=count)) for count in counts)
    return next(filter(None, faults), None)


def _rotation_fault(plan: HeadsPlan) -> str | None:
    heads, dtype = plan.heads, dtypes.dtype(plan.dtype)
    streams, tokens = rows = plan.streams, plan.tokens
    features = heads.features
    with mx.stream(mx.cpu):
        keys = mx.random.split(mx.random.key(0), 2)
        qkv = mx.random.normal((*rows, heads.columns), key=keys[0])
        norms = mx.random.uniform(0.5, 2, (2, features), key=keys[1]).astype(dtype)
        weights = () if heads.norm is None else (norms[0] + 0, norms[1] + 0)
        qkv = qkv.astype(dtype)
        freqs = mx.power(100.0, mx.arange(0, features, 2) / features)
        count = streams if plan.per_stream else 1
        first = FIRST - 5 * mx.arange(count)
        first[-1] = FAR
        mx.eval(qkv, freqs, first, *weights)
    with running():
        results = graph.call(plan)(qkv, first, freqs, *weights)
    with mx.stream(mx.cpu):
        points = wide(qkv).reshape(streams * tokens, -1)[:, : heads.rotated_columns]
        positions = (first[:, None] + mx.arange(tokens)) + mx.zeros((streams, 1))
        arrays = EpilogueArrays(
            positions=positions.flatten(), freqs=freqs, head_norms=weights
        )
        answer = rotated(Answer(points, mx.zeros_like(points)), heads.rotation, arrays)
        off = answer.bound + mx.abs(answer.values) * OF_FUNCTIONS
        off = off + rounding(answer.values, plan.dtype)
        parts = [_by_streams(array, heads, rows) for array in (answer.values, off)]
    faults = map(reference.difference, results, map(Answer, *parts))
    return next(filter(None, faults), None)


def _by_streams(array: mx.array, heads: Heads, rows: tuple[int, int]) -> list[mx.array]:
    """Returns q and k [streams, heads, tokens, features] of rows [rows, heads, ...]."""
    array = array.reshape(*rows, -1, heads.features).transpose(0, 2, 1, 3)
    q, k = mx.split(array, [heads.heads], axis=1)
    return [q, k]


@fault_of.register(AddNormPlan)
def fault_of_add_norm(plan: AddNormPlan) -> str | None:
    """Returns how the kernel that adds and normalizes rows differs, or None."""
    n, dtype, epsilon = plan.n, dtypes.dtype(plan.dtype), plan.epsilon
    with mx.stream(mx.cpu):
        keys = mx.random.split(mx.random.key(0), 3)
        x, y = (mx.random.normal((ROWS, n), key=key).astype(dtype) for key in keys[:2])
        weight = mx.random.uniform(0.5, 2, (n,), key=keys[2]).astype(dtype)
        mx.eval(x, y, weight)
    with running():
        total, normed = graph.call(replace(plan, rows=ROWS))(x, y, weight)
    evaluate(total, normed)
    with mx.stream(mx.cpu):
        values, name = wide(x) + wide(y), plan.dtype
        answer = Answer(values, rounding(values, name))
    fault = reference.difference(total, answer)
    if fault is not None:
        return fault
    with mx.stream(mx.cpu):
        rows = wide(total)
        values = rows * norm_factor(rows, epsilon) * wide(weight)
        bound = mx.abs(values) * OF_FUNCTIONS + rounding(values, name)
    return reference.difference(normed, Answer(values, bound))
