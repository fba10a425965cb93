"""Prepares the call of a request, by our kernels or stock MLX, for a caller's arrays.

A decision is made once for each request and kept until `state.reset`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NoReturn, cast

import mlx.core as mx

from mlx_marlin import decision_log, guard, state
from mlx_marlin.backends import graph, selection
from mlx_marlin.backends.graph import Product
from mlx_marlin.planning.dequantize_plan import DequantizePlan, dequantize_plan
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.gather_plan import AnyPlan, GatherPlan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products import serving
from mlx_marlin.products.autodiff import differentiable, traced
from mlx_marlin.products.reference import experts as stock_experts
from mlx_marlin.products.reference.epilogue import (
    with_epilogue,
    with_norm,
    with_placeholders,
)
from mlx_marlin.products.reference.experts import flat_indices, stock_packed
from mlx_marlin.products.reference.weight import native_product, stock_product
from mlx_marlin.products.request import CPU, NOTHING, Request, Run, Shape
from mlx_marlin.weights.formats import TILE_N

MOST_CALLS = 4096
"""Prepared calls that are kept."""


@dataclass(slots=True)
class PreparedCall:
    """A request's product, ready to run."""

    # The product. It may be replaced by a faster one after a call, so read it each time
    run: Run
    # Why stock MLX serves the request; None if our kernels do
    reason: str | None = None
    # Whether `run` is MLX's own product, with an epilogue in MLX's operations
    is_stock: bool = False


Key = tuple[Shape, mx.Dtype, object, object, bool]
"""What decides who serves a call: shape and dtype of x, the kind of the weight
(`PackedWeight.kind`, or shapes and dtypes of its arrays in MLX's layout), the options
of the call, and whether it runs on the CPU.

A warm call builds it from its arguments, of tuples: the hash of another object would be
a call of Python code.
"""
calls: dict[Key, PreparedCall] = state.register({})
"""All prepared calls. A dictionary takes a third of the time of `lru_cache`."""


def remember(key: Key, prepared: PreparedCall) -> PreparedCall:
    """Keeps a prepared call among at most `MOST_CALLS`, and returns it."""
    if len(calls) >= MOST_CALLS:
        calls.clear()
    calls[key] = prepared
    return prepared


def is_permanent(prepared: PreparedCall) -> bool:
    """Returns whether stock MLX serves a call until `state.reset`.

    Our kernels may serve a call that runs on the CPU once the default device is a GPU.
    """
    on_cpu = mx.default_device() == CPU
    return prepared.is_stock and not (on_cpu and selection.may_hand_over())


def prepare(request: Request) -> PreparedCall:
    """Decides who serves a request, and prepares the call.

    Of experts that stock MLX serves, only the plain product with packed weights is
    prepared; callers compute the others.
    """
    if request.experts is None and not (prod(request.shape) and prod(request.x_shape)):
        decision_log.stock(request, NOTHING)
        return PreparedCall(_zeros(request), NOTHING)
    answer = serving.serve(request, serving.here())
    if isinstance(answer, serving.Refusal):
        return _by_stock(request, answer.reason)
    decision_log.ours(request, answer)
    run = _by_plan(request, answer)
    replays = selection.traits().replays_graphs and request.transpose
    return traced_call(run) if replays else PreparedCall(run)


def _by_stock(request: Request, reason: str) -> PreparedCall:
    refuse_variance(request.invariant, reason)
    experts, is_stock = request.experts, request.layout == "mlx"
    if experts is None or not experts.gate:
        decision_log.stock(request, reason)
    if experts is None:
        run = _stock(request)
    else:
        run = _callers_own if is_stock or experts.gate else stock_packed(request)
    return PreparedCall(run, reason, is_stock)


def refuse_variance(invariant: bool, reason: str) -> None:
    """Raises a ValueError if stock MLX would serve an invariant product."""
    if invariant:
        raise ValueError(
            f"invariant=True cannot be kept, because stock MLX would serve the call: "
            f"{reason}"
        )


def _by_plan(request: Request, plan: AnyPlan) -> Run:
    if isinstance(plan, GatherPlan):
        return experts_call(request, plan)
    product = _decoded(plan) if isinstance(plan, DequantizePlan) else _planned(plan)
    problem, stock = plan.problem, _stock(request)
    if not request.transpose:
        run = differentiable(product, stock)
        # MLX broadcasts plain products itself, without copies of x.
        return run if problem.batch > 1 else as_called(run, request)
    of_x = partial(_backward, problem) if request.layout == "marlin" else None
    return as_called(differentiable(product, stock, of_x), request)


def _callers_own(*_: object) -> NoReturn:
    raise AssertionError("callers compute what stock MLX serves")


def _stock(request: Request) -> Product:
    """Returns stock MLX's product."""
    is_packed = request.layout == "marlin"
    stock = _stock_packed(request) if is_packed else _native(request)
    if request.epilogue != PLAIN:
        stock = with_epilogue(stock, request.epilogue)
    return stock if request.norm is None else with_norm(stock, request.norm)


def _native(request: Request) -> Product:
    """Returns MLX's own product, without epilogue and norm."""
    transpose = request.transpose
    format = request.group_size, request.bits, request.mode
    if request.mode == "affine":
        return lambda x, w, scales, biases: native_product(
            x, (w, scales, biases, format), transpose
        )
    # Our kernels take the scales in place of absent biases.
    return lambda x, w, scales, _: native_product(
        x, (w, scales, None, format), transpose
    )


def _stock_packed(request: Request) -> Product:
    """Returns stock MLX's product of a packed weight, without epilogue and norm."""
    n, has_scale = request.n, request.global_scale

    def stock(
        x: mx.array, words: mx.array, scales: mx.array, biases_or_global_scale: mx.array
    ) -> mx.array:
        packed = request.packed(
            words,
            scales,
            # Those of a batch that are multiplied as one are whole tiles.
            n if n % TILE_N else words.shape[-3] * TILE_N,
            biases_or_global_scale[:1] if has_scale else None,
        )
        return stock_product(x, packed, request.transpose)

    return stock


def traced_call(run: Run) -> PreparedCall:
    """Returns a call whose graph is built once.

    A traced graph avoids what MLX does with a CUDA kernel's template arguments and text
    at every call (measured, docs/lab), and the Python code between its parts.
    """
    prepared = PreparedCall(run)
    prepared.run = traced(run, partial(setattr, prepared, "run"))
    return prepared


def _planned(plan: Plan) -> Product:
    problem = plan.problem
    product = graph.product(plan)
    if problem.epilogue == PLAIN and problem.norm is None:
        return product
    return with_placeholders(product, problem.epilogue)


def _decoded(plan: DequantizePlan) -> Product:
    product = graph.dequantized_product(plan)
    epilogue = plan.problem.epilogue
    return product if epilogue == PLAIN else with_epilogue(product, epilogue)


@state.cache(MOST_CALLS)
def _backward(problem: Problem) -> Product | None:
    """Returns the product x @ w, which is the gradient of x.

    Returns None if stock MLX computes that gradient.
    """
    if problem.epilogue != PLAIN or problem.norm is not None:
        return None
    plan = dequantize_plan(problem, transposed=False)
    return None if guard.why_not(plan) else graph.dequantized_product(plan)


def _zeros(request: Request) -> Run:
    def zeros(*_: mx.array) -> mx.array:
        return mx.zeros(request.shape, request.dtype)

    if request.epilogue == PLAIN or request.epilogue.gated:
        return zeros
    return with_epilogue(zeros, request.epilogue)


def as_called(product: Product, request: Request) -> Run:
    """Returns a product that takes the arrays of a call.

    `product`: from x [..., k] and a weight's arrays in one dtype to y [..., n], or, of
    several weights, from x [batch, m, k] to y [batch, m, n].
    """
    # MLX has no gradient of a quantized product with a vector.
    if request.w_batch or len(request.x_shape) == 1:
        product = _of_matrices(product, request)
    if (
        request.x_dtype != request.dtype
        or not request.scales_alike
        or request.epilogue != PLAIN
    ):
        product = _converting(product, request)
    if request.layout == "marlin" or request.mode == "affine":
        return product

    def run(
        x: mx.array, w: mx.array, scales: mx.array, _: None, *given: mx.array
    ) -> mx.array:
        # Kernels of a mode without biases do not read them.
        return product(x, w, scales, scales, *given)

    return run


Reshape = Callable[[mx.array], mx.array]


def _of_matrices(product: Product, request: Request) -> Product:
    """Reshapes a batch to weights [batch, n, ...] and rows [batch, m, ...].

    A vector becomes a matrix of one row.
    """
    fold, unfold = _folding(request)
    batch = request.sizes[0]
    rows = (-1,) if batch == 1 else (batch, -1)
    first = len(request.w_batch) + 1  # the axis after the rows, or tiles of rows
    bias = int(request.epilogue.bias)

    def run(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *given: mx.array
    ) -> mx.array:
        w, scales, biases = (
            array.reshape(*rows, *array.shape[first:]) for array in (w, scales, biases)
        )
        operands = *given[:bias], *map(fold, given[bias:])
        y = product(fold(x), w, scales, biases, *operands)
        if request.epilogue.parts:
            return cast(mx.array, tuple(map(unfold, y)))
        return unfold(y)

    return run


def _folding(request: Request) -> tuple[Reshape, Reshape]:
    """Returns the reshape of [..., k] to matrices, and its inverse for results.

    A dimension with one weight becomes rows, which share the weight without copies. In
    the other dimensions x is broadcast, unless all weights multiply the same rows.
    """
    batch, m, _ = request.sizes
    whole = request.shape[:-1] if len(request.x_shape) > 1 else (*request.shape[:-1], 1)
    of_x = (1,) * (len(whole) - 1 - len(request.w_batch))
    is_row = [size == 1 for size in (*of_x, *request.w_batch, 1)]
    # The dimensions of weights come first in a batch, and last in one joined weight.
    order = sorted(range(len(whole)), key=lambda axis: is_row[axis] ^ request.is_shared)
    back = (*sorted(range(len(whole)), key=order.__getitem__), -1)
    ordered = [whole[axis] for axis in order]

    def fold(x: mx.array) -> mx.array:
        if request.is_shared:
            return x.reshape(m, x.shape[-1])
        x = mx.broadcast_to(x, (*whole, x.shape[-1]))
        return x.transpose(*order, -1).reshape(batch, m, x.shape[-1])

    def unfold(y: mx.array) -> mx.array:
        # y is the product of a batch, or one part of it.
        columns = y.size // prod(whole)
        return (
            y.reshape(*ordered, columns)
            .transpose(*back)
            .reshape(*request.shape[:-1], columns)
        )

    return fold, unfold


def _converting(product: Product, request: Request) -> Product:
    """Returns a product that converts its operands to the result's dtype."""
    epilogue = request.epilogue
    first = epilogue.bias + epilogue.operands
    # Positions and frequencies keep their dtypes.
    end = first + (2 if epilogue.rotation is not None else 0)

    def run(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *given: mx.array
    ) -> mx.array:
        if not request.scales_alike:
            scales = scales.astype(request.scale_dtype)
            biases = biases.astype(request.scale_dtype)
        operands = (
            array if first <= i < end else array.astype(request.dtype)
            for i, array in enumerate(given)
        )
        return product(x.astype(request.dtype), w, scales, biases, *operands)

    return run


def experts_call(request: Request, plan: GatherPlan) -> Run:
    """Returns the call of a plan for experts.

    It takes x, the row of x of each pair or None, the experts, codes, scales and
    biases, those of a second weight without biases if the request has a gate, and the
    biases [experts, n] that are added, if any.
    """
    assert request.experts is not None
    pairs = request.experts.pairs
    stock = stock_experts.stock_product(request, plan.pairs_per_row)
    product = differentiable(graph.gather_product(plan), stock)

    def consecutive(x: mx.array, _: None, rhs: mx.array, *weight: mx.array) -> mx.array:
        experts = mx.broadcast_to(rhs, pairs).astype(mx.uint32)
        return product(x.astype(request.dtype), *weight, experts)

    def indexed(
        x: mx.array, lhs: mx.array | None, rhs: mx.array, *weight: mx.array
    ) -> mx.array:
        sources, experts = flat_indices(x, lhs, rhs, pairs)
        y = product(x.astype(request.dtype), *weight, experts, sources)
        return y.reshape(*pairs, 1, request.n)

    return consecutive if plan.pairs_per_row else indexed
