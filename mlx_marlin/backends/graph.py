"""Puts launches into MLX's graph: the only module that does. It decides nothing."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, cast

import mlx.core as mx

from mlx_marlin import state
from mlx_marlin.backends import kernels, selection
from mlx_marlin.backends.base import Backend
from mlx_marlin.backends.launch import Launch, Operand, Output
from mlx_marlin.backends.source import (
    EPILOGUE_OPERANDS,
    EXPERT_BIASES,
    HEAD_NORMS,
    NORM,
    OPERANDS,
    ROTATION,
    SECOND,
)
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.gather_plan import GatherPlan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights import dtypes

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
Run = Callable[..., Any]
"""From arrays to the output of a launch, or to a tuple of several outputs."""
Shapes = Callable[[Sequence[mx.array]], list[tuple[int, ...]]]

_built: deque[Plan] = state.register(deque(maxlen=REMEMBERED))


def plans_built() -> list[Plan]:
    """Returns the plans that were prepared last, oldest first, without duplicates."""
    return list(dict.fromkeys(list(_built)))


def product(plan: Plan, *, listed: bool = True) -> Product:
    """Builds the call that runs a plan."""
    if listed:
        _built.append(plan)
    problem, rotation = plan.problem, plan.problem.epilogue.rotation
    normed = HEAD_NORMS if rotation is not None and rotation.norm is not None else ()
    rotated = (*ROTATION, *normed) if rotation is not None else ()
    names = (*OPERANDS, *EPILOGUE_OPERANDS, *rotated, *NORM)
    run = _sequence(plan, names)
    if not problem.epilogue.parts:
        return run
    return lambda *arrays: _in_parts(run(*arrays), problem)


def gather_product(plan: GatherPlan) -> Product:
    """Builds the call that multiplies rows by the experts that they chose."""
    gather = plan.gather
    second = SECOND if gather.gate else ()
    biases = EXPERT_BIASES[: gather.weights] if gather.bias else ()
    sources = () if plan.pairs_per_row else ("sources",)
    names = (*OPERANDS, *second, *biases, "experts", *sources)
    return _sequence(plan, names)


def decoded_blocks(plan: DequantizePlan) -> Callable[..., list[mx.array]]:
    """Builds the call that decodes a weight block by block."""
    backend = selection.of_plan(plan)
    decoders = [
        _step(backend, launch, OPERANDS[1:]) for launch in backend.launches(plan)
    ]
    return lambda *weight: [decode(*weight) for decode in decoders]


def dequantized_product(plan: DequantizePlan) -> Product:
    """Builds the call that decodes a weight and multiplies it with MLX's own
    product."""
    decode, problem = decoded_blocks(plan), plan.problem

    def multiply(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array
    ) -> mx.array:
        parts = []
        for weight in decode(w, scales, biases):
            if problem.batch > 1:
                whole = weight.reshape(*w.shape[:-3], plan.padded_n, -1)
                weight = whole[..., : problem.n, :]
            parts.append(x @ (weight.T if plan.transposed else weight))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    return multiply


@state.cache(256)
def call(plan: Any) -> Run:
    """Returns the call of a plan with one launch that is no product; cached."""
    backend = selection.of_plan(plan)
    (launch,) = backend.launches(plan)
    return run_alone(backend, launch)


def run_alone(backend: Backend, launch: Launch) -> Run:
    """Builds the call of a launch from the arrays that it reads, in their order."""
    constant = dict(launch.integers)
    names = [each.name for each in launch.inputs if each.name not in constant]
    names = [*dict.fromkeys(names)]  # one array may stand in for others
    return _step(backend, launch, names)


def _sequence(plan: Plan | GatherPlan, arguments: Sequence[str]) -> Run:
    """Builds the call of a plan's launches, one after the other."""
    backend = selection.of_plan(plan)
    first, *others = backend.launches(plan)
    multiply = _step(backend, first, arguments)
    if not others:
        return multiply
    (second,), (partials,) = others, first.outputs
    reduce = _step(backend, second, (*arguments[:1], partials.name, *arguments[4:]))
    return lambda x, w, scales, biases, *operands: reduce(
        x, multiply(x, w, scales, biases), *operands
    )


def _step(backend: Backend, launch: Launch, arguments: Sequence[str]) -> Run:
    """Builds the call of one launch from arrays with these names."""
    kernel = backend.kernel(launch)
    # They are never padded: kernels for Metal declare them in `constant`.
    constants = tuple(mx.array(each, mx.int32) for _, each in launch.integers)
    names = (*dict(launch.integers), *arguments)
    pick = _picker([names.index(operand.name) for operand in launch.inputs])
    prepare = _preparation(launch.inputs, arguments)
    template = kernels.template(launch.template)
    grid, threadgroup = launch.grid, launch.threadgroup
    output_dtypes = [dtypes.dtype(output.dtype) for output in launch.outputs]
    start = {} if launch.start is None else {"init_value": launch.start}
    is_simple = prepare is None and not start and len(launch.outputs) == 1
    if is_simple and launch.outputs[0].leading is None:
        whole = [launch.outputs[0].shape]

        def fixed(*arrays: mx.array) -> mx.array:
            return kernel(
                inputs=pick((*constants, *arrays)),
                template=template,
                grid=grid,
                threadgroup=threadgroup,
                output_shapes=whole,
                output_dtypes=output_dtypes,
            )[0]

        return fixed
    # An output [..., n] for a first argument [..., k].
    is_plain = launch.outputs[0].leading == (arguments[0], 1)
    if is_simple and is_plain and len(launch.outputs[0].shape) == 1:
        (n,) = launch.outputs[0].shape

        def plain(*arrays: mx.array) -> mx.array:
            # Serves most calls. Steps of the general function cost the host up to 1 us.
            return kernel(
                inputs=pick((*constants, *arrays)),
                template=template,
                grid=grid,
                threadgroup=threadgroup,
                output_shapes=[(*arrays[0].shape[:-1], n)],
                output_dtypes=output_dtypes,
            )[0]

        return plain
    shapes = _shapes(launch.outputs, arguments)

    def step(*arrays: mx.array) -> Any:
        results = kernel(
            inputs=pick((*constants, *(prepare(arrays) if prepare else arrays))),
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=shapes(arrays),
            output_dtypes=output_dtypes,
            **start,
        )
        return results[0] if len(results) == 1 else tuple(results)

    return step


def _picker(order: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(order) == 1:
        (only,) = order
        return lambda arrays: (arrays[only],)
    return itemgetter(*order)


def _shapes(outputs: Sequence[Output], arguments: Sequence[str]) -> Shapes:
    """Returns what computes the shapes of outputs from the arguments of a call."""
    if all(output.leading is None for output in outputs):
        whole = [output.shape for output in outputs]
        return lambda _: whole
    leading = [
        (arguments.index(output.leading[0]), output.leading[1], output.shape)
        for output in outputs
        if output.leading is not None
    ]

    def shapes(arrays: Sequence[mx.array]) -> list[tuple[int, ...]]:
        found = ((arrays[i].shape, drop, shape) for i, drop, shape in leading)
        return [(*axes[: len(axes) - drop], *shape) for axes, drop, shape in found]

    return shapes


def _preparation(
    inputs: Sequence[Operand], arguments: Sequence[str]
) -> Callable[[Sequence[mx.array]], list[mx.array]] | None:
    """Returns what pads or reinterprets the arguments of a call; None if nothing."""
    pads = selection.traits().pads_small_inputs
    small, viewed = set[int](), dict[int, mx.Dtype]()
    for operand in inputs:
        if operand.may_be_small and pads and operand.name in arguments:
            small.add(arguments.index(operand.name))
        if operand.reinterpreted:
            viewed[arguments.index(operand.name)] = dtypes.dtype(operand.dtype)
    if not small and not viewed:
        return None

    def prepare(arrays: Sequence[mx.array]) -> list[mx.array]:
        given = [*arrays]
        for i, dtype in viewed.items():
            given[i] = given[i].view(dtype)
        for i in small:
            given[i] = kernels.readable(given[i])
        return given

    return prepare


def _in_parts(results: mx.array | tuple[mx.array, ...], problem: Problem) -> mx.array:
    """Returns a tuple of the results of an epilogue with parts.

    If a kernel wrote the parts into one array, they are slices of it without a copy.
    """
    if isinstance(results, tuple):
        return cast(mx.array, results)
    parts = problem.epilogue.parts
    flat, rows = results.flatten(), results.shape[:-1]
    ends = [math.prod(rows) * end for end in accumulate(parts)]
    return cast(
        mx.array,
        tuple(
            flat[end - math.prod(rows) * columns : end].reshape(*rows, columns)
            for end, columns in zip(ends, parts, strict=True)
        ),
    )
