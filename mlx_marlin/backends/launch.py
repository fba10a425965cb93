"""Launches the kernels of plans. It decides nothing."""

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import cast

import mlx.core as mx

from mlx_marlin import state
from mlx_marlin.backends import arguments, kernels, registry, selection, source
from mlx_marlin.backends.base import Backend
from mlx_marlin.backends.kernels import IN_CONSTANT, readable
from mlx_marlin.planning.dense_plan import DensePlan
from mlx_marlin.planning.epilogue import PLAIN, Rotation
from mlx_marlin.planning.launches import reduce_threadgroup, reduce_threads
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights import dtypes as weights_dtypes

REMEMBERED = 4096
"""Plans that `plans_built` lists at most."""

Product = Callable[..., mx.array]
"""Takes x [..., k] of m rows, codes, scales and biases, and returns y [..., n].

If the problem has an epilogue, bias [n], multiplier [..., n] and residual [..., n]
follow; absent operands may be any placeholder array. If it has a rotation, the
positions of the rows (int32) and the freqs of `mx.fast.rope`, float32 [features / 2],
follow, and the weights [features] of the norms of q and k if heads are normalized; y
then is [m, heads, 1, features].

For a batch of products x is [batch, m, k] and y [batch, m, n]; the batch is the first
dimension of the weight's arrays. If the epilogue has parts, the result is a tuple of
arrays [..., columns], although it is annotated as one array."""


def plans_built() -> list[Plan]:
    """Returns the plans that were prepared last, oldest first, without duplicates."""
    return list(dict.fromkeys(list(_built)))


def product(plan: Plan) -> Product:
    """Builds the call that runs a plan.

    Returns:
        A function from x [..., k] in the problem's dtype, codes, scales and biases in
        the problem's layout to y [..., n] in the problem's dtype. Packed scales contain
        the biases: the argument is not read, unless it is a global scale, float32 [2].
        If the problem has an epilogue or a norm, bias, multiplier and residual follow,
        in the problem's dtype; absent operands are not read. After them come the
        positions and freqs of a rotation, both weights of its norms if it has them,
        and the norm's weight [k].
        If the epilogue has parts, the function returns a tuple of results [...,
        columns], or with a rotation [m, heads, 1, features].
    """
    _built.append(plan)
    return unrecorded_product(plan)


def unrecorded_product(plan: Plan) -> Product:
    """Builds the same call as `product` without listing the plan in `plans_built`."""
    multiply = _multiply(plan)
    if not plan.needs_second_pass:
        return multiply
    reduce = reduction(plan)
    return lambda x, w, scales, biases, *operands: reduce(
        multiply(x, w, scales, biases), *operands, rows=x.shape[:-1]
    )


def dense_product(plan: DensePlan) -> Product:
    """Builds the call that decodes a weight and multiplies it with MLX's own product.

    Returns:
        A function as `product` builds it, without an epilogue's arrays. If the problem
        is a batch, x and the weights are broadcast.
    """
    decoders = [_decoder(plan, block) for block in plan.chunks]

    def multiply(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array
    ) -> mx.array:
        parts = []
        for decode in decoders:
            weight = decode(w, scales, biases)
            if plan.problem.batch > 1:
                whole = weight.reshape(*w.shape[:-3], plan.padded_n, -1)
                weight = whole[..., : plan.problem.n, :]
            parts.append(x @ (weight.T if plan.transposed else weight))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    return multiply


def dequantized(plan: DensePlan) -> Callable[[mx.array, mx.array, mx.array], mx.array]:
    """Builds the call that decodes a whole weight.

    Returns:
        A function from codes, scales and biases to the weight [n, k] in the problem's
        dtype.
    """
    problem = plan.problem
    return _decoder(plan, (0, plan.rows, 0, problem.k))


def decoded_blocks(
    plan: DensePlan, w: mx.array, scales: mx.array, biases: mx.array
) -> list[mx.array]:
    """Returns the blocks of a weight that `dense_product` decodes, in order."""
    return [_decoder(plan, block)(w, scales, biases) for block in plan.chunks]


def _decoder(
    plan: DensePlan, block: tuple[int, int, int, int]
) -> Callable[[mx.array, mx.array, mx.array], mx.array]:
    problem = plan.problem
    backend = selection.active()
    text = backend.decode_source(problem)
    kernel = backend.kernel(text, 0)
    template = kernels.template(arguments.weight_template(problem))
    _, rows, _, length = block
    threads, threadgroup = plan.decode_threads(block)
    shape = mx.array((plan.rows, problem.k, *block), mx.int32)
    inputs = kernels.inputs_of(
        text, source.OPERANDS[1:], {"shape": shape, "numbers": shape}
    )
    dtype = weights_dtypes.dtype(problem.dtype)

    def decode(w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        if problem.global_scale:
            biases = biases.view(mx.uint8)
        return kernel(
            inputs=inputs(readable(w), readable(scales), readable(biases)),
            template=template,
            grid=(threads, 1, 1),
            threadgroup=(threadgroup, 1, 1),
            output_shapes=((rows, length),),
            output_dtypes=(dtype,),
        )[0]

    return decode


def reduction(plan: Plan) -> Callable[..., mx.array]:
    """Builds the call that adds a split plan's partial sums, in ascending k.

    Returns:
        A function from partial sums, float32 of `workspace_shape`, and the arrays of
        the epilogue, if any, to y [m, n] or [*rows, n] in the problem's dtype.
    """
    problem = plan.problem
    backend = registry.of_plan(plan)
    text = backend.reduce_source(plan)
    kernel = backend.kernel(text, 0)
    template = kernels.template(backend.reduce_template(plan))
    numbers = _numbers(backend, plan)
    if "schedule" in numbers:
        numbers["schedule"] = mx.array(arguments.epilogue_schedule(plan), mx.int32)
    inputs = kernels.inputs_of(text, ("partials", *source.EPILOGUE_OPERANDS), numbers)
    columns = _columns(text, problem)
    grid, threadgroup = (
        (reduce_threads(problem), 1, 1),
        (reduce_threadgroup(problem), 1, 1),
    )
    dtypes = [weights_dtypes.dtype(problem.dtype)] * len(columns)

    def reduce(
        partials: mx.array,
        *operands: mx.array,
        rows: tuple[int, ...] = problem.result_shape[:-1],
    ) -> mx.array:
        results = kernel(
            inputs=inputs(readable(partials), *map(readable, operands)),
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=[(*rows, n) for n in columns],
            output_dtypes=dtypes,
        )
        return _in_parts(results, problem)

    return reduce


_built: deque[Plan] = state.register(deque(maxlen=REMEMBERED))


def _multiply(plan: Plan) -> Product:
    problem = plan.problem
    backend = registry.of_plan(plan)
    text = backend.product_source(plan)
    kernel = backend.kernel(text, plan.threadgroup_bytes)
    dtype = mx.float32 if plan.is_split else weights_dtypes.dtype(problem.dtype)
    by_slots = plan.reduction == "workspace"
    slots = plan.workspace_shape if by_slots else None
    template = kernels.template(backend.product_template(plan))
    grid = (plan.num_threadgroups * plan.threads, 1, 1)
    threadgroup = (plan.threads, 1, 1)
    arrays = (
        *source.OPERANDS,
        *source.EPILOGUE_OPERANDS,
        *_of_rotation(problem.epilogue.rotation),
        *source.NORM,
    )
    inputs = kernels.inputs_of(text, arrays, _numbers(backend, plan))
    words = problem.n * problem.k * problem.bits // 32
    least = problem.batch * min(problem.n * problem.groups, words)
    small = least < IN_CONSTANT
    start: dict[str, float] = {"init_value": 0.0} if text.atomic else {}
    columns = _columns(text, problem)
    shapes = partial(_shapes, problem, columns)
    dtypes = [dtype] * len(columns)
    n = problem.n
    fixed = [slots] if slots else None

    def multiply_plain(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *_: mx.array
    ) -> mx.array:
        # Serves most calls. Steps of the general function cost the host up to 1 us.
        return kernel(
            inputs=inputs(x, w, scales, biases),
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=fixed or [(*x.shape[:-1], n)],
            output_dtypes=dtypes,
        )[0]

    # The epilogue of a split plan belongs to its reduction.
    is_plain = plan.is_split or problem.epilogue == PLAIN
    is_plain = is_plain and problem.norm is None
    if is_plain and not (problem.global_scale or small or start):
        return multiply_plain

    def multiply(
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array,
        *operands: mx.array,
    ) -> mx.array:
        if problem.global_scale:
            biases = biases.view(mx.uint8)
        if small:
            w, scales, biases = readable(w), readable(scales), readable(biases)
        results = kernel(
            inputs=inputs(x, w, scales, biases, *map(readable, operands)),
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=fixed or shapes(x.shape[:-1]),
            output_dtypes=dtypes,
            **start,
        )
        return results[0] if plan.is_split else _in_parts(results, problem)

    return multiply


def _of_rotation(rotation: Rotation | None) -> tuple[str, ...]:
    """Returns the names of a rotation's arrays in the order of the arguments."""
    if rotation is None:
        return ()
    norms = source.HEAD_NORMS if rotation.norm is not None else ()
    return (*source.ROTATION, *norms)


def _columns(text: source.Source, problem: Problem) -> tuple[int, ...]:
    """Returns the numbers of columns of the arrays that a kernel writes."""
    if text.output_names == ("out",):
        return (problem.columns,)
    return problem.epilogue.parts


def _shapes(
    problem: Problem, columns: tuple[int, ...], rows: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Returns the shapes of a kernel's results with these numbers of columns."""
    rotation = problem.epilogue.rotation
    if rotation is None:
        return [(*rows, n) for n in columns]
    features = rotation.features
    return [(problem.m, n // features, 1, features) for n in columns]


def _in_parts(results: list[mx.array], problem: Problem) -> mx.array:
    """Returns the result, or a tuple of results if the epilogue has parts.

    If a kernel wrote the parts into one array, they are slices of it without a copy.
    """
    parts = problem.epilogue.parts
    if not parts:
        return results[0]
    if len(results) == 1:
        flat, rows = results[0].flatten(), results[0].shape[:-1]
        ends = [math.prod(rows) * end for end in accumulate(parts)]
        results = [
            flat[end - math.prod(rows) * columns : end].reshape(*rows, columns)
            for end, columns in zip(ends, parts, strict=True)
        ]
    return cast(mx.array, tuple(results))


def _numbers(backend: Backend, plan: Plan) -> dict[str, mx.array]:
    """Returns the arrays of integers that a plan's kernels read, by their names.

    They are never padded: kernels for Metal declare them in `constant`.
    """
    named = backend.numbers(plan)
    return {name: mx.array(numbers, mx.int32) for name, numbers in named.items()}
