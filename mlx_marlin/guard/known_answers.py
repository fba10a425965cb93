"""Checks a plan's kernel variants on small problems with known answers."""

from dataclasses import replace
from typing import cast

import mlx.core as mx

from mlx_marlin.backends import kernels, launch, selection
from mlx_marlin.backends.base import Probe
from mlx_marlin.backends.repack_launch import repack
from mlx_marlin.guard import experts, operands, reference
from mlx_marlin.guard.heads import FAR
from mlx_marlin.guard.reference import Answer, EpilogueArrays
from mlx_marlin.guard.variants import AnyPlan, miniatures
from mlx_marlin.planning.dense_plan import DensePlan
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights.tile_conversion import tiles_of_rows


def fault_of(plan: AnyPlan) -> str | None:
    """Returns what is wrong with the kernels of a plan; None if nothing is.

    The plan's variants run on a small problem with ragged m and n, several groups and,
    if the plan splits tiles, several splits. Results are compared with float64. Then
    one row of x becomes NaN, and all other rows of the result must stay bitwise equal.

    Args:
        plan: The plan to check; the call compiles its kernels.
    """
    small_plans = miniatures(plan)
    products = [small for small in small_plans if isinstance(small, Plan)]
    if products:
        return _fault_of_products(products)
    return next(filter(None, map(_fault_of, small_plans)), None)


def _fault_of(small: AnyPlan) -> str | None:
    if isinstance(small, DensePlan):
        return _fault_of_dense(small)
    assert not isinstance(small, Plan)
    return experts.fault_of(small)


def fault_of_probe(probe: Probe) -> str | None:
    """Returns what is wrong with the results of a probe; None if nothing is."""
    return probe.fault(output_of_probe(probe))


def output_of_probe(probe: Probe) -> list[float]:
    """Returns the elements of a probe's output."""
    size, dtype = probe.output
    results = selection.active().kernel(probe.source, 0)(
        inputs=(mx.zeros((kernels.IN_CONSTANT,)),),
        template=kernels.template(dict(probe.template)),
        grid=(probe.threadgroups * probe.threads, 1, 1),
        threadgroup=(probe.threads, 1, 1),
        output_shapes=((size,),),
        output_dtypes=(getattr(mx, dtype),),
    )
    return cast(list[float], results[0].tolist())


def fault_of_repack(to: str, bits: int, order: str) -> str | None:
    """Returns what is wrong with a repack kernel; None if nothing is.

    Args:
        to: The layout of the result, "mlx" or "marlin".
        bits: Bits of a code.
        order: The order of k, "k32" or "k64".
    """
    size = 32 if order == "k32" else 64
    form = {"bits": bits, "group_size": size}
    n, k = 51, 17 * 64 + (size if size == 32 else 0)
    with mx.stream(mx.cpu):
        shape = (2, n, k * bits // 8)
        drawn = mx.random.randint(0, 256, shape, mx.uint8, key=mx.random.key(0))
        rows = drawn.view(mx.uint32)
        tiles = tiles_of_rows(rows, n, k, **form)
        mx.eval(rows, tiles)
    given, expected = (rows, tiles) if to == "marlin" else (tiles, rows)
    moved = repack(to, n=n, k=k, **form)(given)
    if mx.array_equal(moved, expected).item():
        return None
    return "it moved codes to wrong positions"


def _fault_of_products(plans: list[Plan]) -> str | None:
    """Checks plans of one problem, which differ in the division of the work."""
    problem = plans[0].problem
    batch = (problem.batch,) if problem.batch > 1 else ()
    x = operands.activations(problem, (*batch, problem.m, problem.k))
    weight = operands.draw(problem, batch)
    arrays = _drawn_epilogue_arrays(problem)
    given = _as_arguments(problem, x, arrays)
    with mx.stream(mx.cpu):
        answer = reference.product(problem, x, weight, arrays)
    for plan in plans:
        run = launch.unrecorded_product(plan)

        def result(x: mx.array, run: launch.Product = run) -> mx.array:
            return _whole(run(x, *weight.stored, *given), problem)

        y = result(x)
        wrong = reference.difference(y, answer)
        if wrong is None and plan is plans[0] and plan.reduction != "atomic":
            wrong = _fault_of_nan(y, x, result)
        if wrong is not None:
            return wrong
    return None


def _fault_of_nan(y: mx.array, x: mx.array, result: launch.Product) -> str | None:
    """Checks that a NaN affects only its row, and that results are reproducible."""
    with mx.stream(mx.cpu):
        rows = x.reshape(-1, x.shape[-1])
        rows[-1, 0] = mx.nan
        with_nan = rows.reshape(x.shape)
        mx.eval(with_nan)
    again = result(with_nan)
    mx.eval(again)
    with mx.stream(mx.cpu):
        before, after = (array.reshape(len(rows), -1) for array in (y, again))
        if not mx.isnan(after[-1]).all().item():
            return "NaN in x did not come out of its row"
        if not mx.array_equal(before[:-1], after[:-1]).item():
            return "rows changed when another row became NaN, or from run to run"
    return None


def _fault_of_dense(plan: DensePlan) -> str | None:
    problem = plan.problem
    weight = operands.draw(problem)
    blocks = launch.decoded_blocks(plan, *weight.stored)
    axis = 0 if plan.transposed else 1
    decoded = mx.concatenate(blocks, axis=axis)
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
        positions = mx.arange(problem.m if rotation.per_row else 1, dtype=mx.int32) + 3
        positions[-1] = FAR
        freqs = mx.power(10000.0, mx.arange(features // 2) / (features / 2))
        mx.eval(positions, freqs)
    norms = () if rotation.norm is None else (drawn(6, features), drawn(7, features))
    return replace(arrays, positions=positions, freqs=freqs, head_norms=norms)


def _as_arguments(
    problem: Problem, x: mx.array, arrays: EpilogueArrays
) -> list[mx.array]:
    """Returns the arguments of `launch.product` after the weight."""
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
