"""Decides who serves a kind of call, our kernels or stock MLX, and prepares the run.

A kind of call is its shapes, dtypes, options and device. Deciding is cached; a call
that is wrong raises here, in MLX's own words where MLX has them.
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from operator import index

import mlx.core as mx

from mlx_marlin import guard, state
from mlx_marlin.backends import launch, planner, selection, tuned_results
from mlx_marlin.backends.launch import Product
from mlx_marlin.planning.dense_plan import DensePlan, dense_plan
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.measurement import Result
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products import eligibility
from mlx_marlin.products.autodiff import differentiable
from mlx_marlin.products.graph_cache import traced
from mlx_marlin.products.reference_epilogue import (
    of_normalized,
    then_finished,
    with_all_operands,
)
from mlx_marlin.products.request import Kind, Run, Shape, as_called
from mlx_marlin.products.stock_weight import native_product, stock_product
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import MODE_DEFAULTS, TILE_N
from mlx_marlin.weights.packed_weight import PackedWeight

KINDS = 4096
"""Kinds of call that are remembered."""


@dataclass(slots=True)
class PreparedCall:
    """Who serves a kind of call, ready to run; `reason` says why if it is stock MLX.

    `run` may become a quicker one after a call: ask for it each time. `is_stock` is
    whether it is nothing but MLX's own product, with an epilogue in its operations.
    """

    run: Run
    reason: str | None = None
    is_stock: bool = False


Memory = dict[tuple[object, ...], PreparedCall]
"""What was decided, by all that decides it."""

_memories: list[Memory] = []


def memory() -> Memory:
    """Makes a memory of decisions, which `forget` empties.

    A dictionary with a flat key is a third of the way through `serve_packed`: no call
    of Python's, and no hash of an epilogue.
    """
    made: Memory = state.register({})
    _memories.append(made)
    return made


def is_for_good(served: PreparedCall) -> bool:
    """Returns whether a call stays stock MLX's until `forget`.

    One that runs on the CPU may be ours as soon as the default device is a GPU.
    """
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    return served.is_stock and not (on_cpu and selection.may_hand_over())


def remembered(
    known: Memory, key: tuple[object, ...], served: PreparedCall
) -> PreparedCall:
    """Keeps a decision, and returns it."""
    if len(known) >= KINDS:
        known.clear()
    known[key] = served
    return served


@state.cache(KINDS)
def serve_native(
    x_shape: Shape,
    x_dtype: mx.Dtype,
    w_shape: Shape,
    w_dtype: mx.Dtype,
    scales_shape: Shape,
    scales_dtype: mx.Dtype,
    biases_shape: Shape | None,
    biases_dtype: mx.Dtype | None,
    transpose: bool,
    group_size: int | None,
    bits: int | None,
    mode: str,
    on_cpu: bool,
    epilogue: Epilogue = PLAIN,
    invariant: bool = False,
) -> PreparedCall:
    """Decides a call whose weight is in MLX's layout.

    Raises:
        ValueError: If the arguments do not belong together.
    """
    if not x_shape:
        raise ValueError("x has no dimensions, expected [..., k]")
    # Integers of other libraries are equal to Python's, and caches tell them not apart.
    bits = None if bits is None else index(bits)
    group_size = None if group_size is None else index(group_size)
    if bits == 0:  # MLX divides by it
        raise ValueError("bits=0, expected the bits of a code or None")

    biased = biases_shape is not None

    def stock(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None
    ) -> mx.array:
        biases = biases if biased else None  # our kernels get the scales instead
        return native_product(x, w, scales, biases, transpose, group_size, bits, mode)

    biases = None if biases_shape is None else mx.zeros(biases_shape, biases_dtype)
    # Never evaluated: MLX checks the arguments and tells the result's shape and dtype.
    result = stock(
        mx.zeros(x_shape, x_dtype),
        mx.zeros(w_shape, w_dtype),
        mx.zeros(scales_shape, scales_dtype),
        biases,
    )
    # MLX does not check this and reads past the end of the scales.
    if scales_shape[:-1] != w_shape[:-1]:
        raise ValueError(
            f"scales has shape {scales_shape}, expected a row for each row of w, "
            f"which has shape {w_shape}"
        )
    fitting = MODE_DEFAULTS[mode]
    given = fitting[0] if group_size is None else group_size, bits or fitting[1]
    # Nor this: small floats come in one size, and MLX takes it whatever is said.
    if mode != "affine" and given != fitting:
        raise ValueError(
            f"mode={mode!r} has group_size={fitting[0]} and bits={fitting[1]}, "
            f"got group_size={given[0]} and bits={given[1]}"
        )
    kind = Kind(
        x_shape=x_shape,
        x_dtype=x_dtype,
        shape=result.shape,
        dtype=result.dtype,
        n=w_shape[-2],
        k=x_shape[-1],
        w_batch=w_shape[:-2],
        scale_dtype=mx.result_type(scales_dtype, biases_dtype or scales_dtype),
        scales_alike=(biases_dtype or scales_dtype) == scales_dtype,
        mode=mode,
        bits=given[1],
        group_size=given[0],
        transpose=transpose,
        layout="mlx",
        on_cpu=on_cpu,
        epilogue=epilogue,
        invariant=invariant,
    )
    return _decide(kind, stock)


@state.cache(KINDS)
def serve_packed(
    x_shape: Shape,
    x_dtype: mx.Dtype,
    n: int,
    k: int,
    group_size: int,
    bits: int,
    mode: str,
    scale_dtype: mx.Dtype,
    transpose: bool,
    on_cpu: bool,
    epilogue: Epilogue = PLAIN,
    invariant: bool = False,
    global_scale: bool = False,
    batch: Shape = (),
    norm: float | None = None,
) -> PreparedCall:
    """Decides a call whose weight is packed: ours, else unpacked for stock MLX.

    Raises:
        ValueError: If x does not fit the weight, or a batch has a global scale.
    """
    inner, outer = (k, n) if transpose else (n, k)
    if not x_shape or x_shape[-1] != inner:
        raise ValueError(
            f"x has shape {x_shape}, expected [..., {inner}] for the packed weight "
            f"{(*batch, n, k)} with transpose={transpose}"
        )
    if batch and global_scale:
        raise ValueError(
            f"w is a batch {batch} of packed weights with a global_scale, expected one "
            f"weight or none with a global_scale"
        )
    before = broadcast(x_shape[:-2], batch)

    def stock(
        x: mx.array, words: mx.array, scales: mx.array, third: mx.array
    ) -> mx.array:
        packed = PackedWeight(
            words=words,
            scales=scales,
            # Those of a batch that are multiplied as one are whole tiles.
            n=n if n % TILE_N else words.shape[-3] * TILE_N,
            k=k,
            group_size=group_size,
            bits=bits,
            mode=mode,
            global_scale=third[:1] if global_scale else None,
        )
        return stock_product(x, packed, transpose)

    kind = Kind(
        x_shape=x_shape,
        x_dtype=x_dtype,
        shape=(*before, *x_shape[-2:-1], outer // (2 if epilogue.gated else 1)),
        dtype=x_dtype
        if scale_dtype == mx.uint8
        else mx.result_type(x_dtype, scale_dtype),
        n=n,
        k=k,
        w_batch=batch,
        scale_dtype=scale_dtype,
        scales_alike=True,
        mode=mode,
        bits=bits,
        group_size=group_size,
        transpose=transpose,
        layout="marlin",
        on_cpu=on_cpu,
        epilogue=epilogue,
        invariant=invariant,
        global_scale=global_scale,
        norm=norm,
    )
    return _decide(kind, stock)


def broadcast(x_batch: Shape, w_batch: Shape) -> Shape:
    """Returns the dimensions of a result before its last two.

    Raises:
        ValueError: If those of x and w do not fit.
    """
    try:
        return tuple(mx.broadcast_shapes(x_batch, w_batch))
    except ValueError:
        raise ValueError(
            f"x has {x_batch} before its rows and w {w_batch} before its own, which "
            f"cannot be broadcast"
        ) from None


def _decide(kind: Kind, stock: Product) -> PreparedCall:
    epilogue = kind.epilogue
    if not prod(kind.shape) or not prod(kind.x_shape):
        return PreparedCall(_nothing_added_up(kind), "there is nothing to add up")
    if epilogue != PLAIN:
        stock = then_finished(stock, epilogue)
    if kind.norm is not None:
        stock = of_normalized(stock, kind.norm)
    reason = eligibility.not_here(kind.on_cpu) or eligibility.not_ours(kind)
    if reason:
        eligibility.refuse_variance(kind.invariant, reason)
        return PreparedCall(stock, reason, is_stock=kind.layout == "mlx")
    batch, m, n = kind.sizes
    problem = Problem(
        m=m,
        n=n,
        k=kind.k,
        batch=batch,
        group_size=kind.group_size,
        bits=kind.bits,
        mode=kind.mode,
        dtype=dtype_name(kind.dtype),
        scale_dtype=dtype_name(kind.scale_dtype),
        layout=kind.layout,
        epilogue=epilogue,
        invariant=kind.invariant,
        global_scale=kind.global_scale,
        norm=kind.norm,
    )
    if not kind.transpose:
        return _decide_not_transposed(kind, problem, stock)
    plan = plan_of(problem)
    if isinstance(plan, str):
        return PreparedCall(stock, plan, is_stock=kind.layout == "mlx")
    reason = _fault_of(plan)
    if reason:
        return PreparedCall(stock, reason, is_stock=kind.layout == "mlx")
    product = _decoded(plan) if isinstance(plan, DensePlan) else _planned(plan)
    of_x = partial(_backward, problem) if kind.layout == "marlin" else None
    run = as_called(differentiable(product, stock, of_x), kind)
    return traced_call(run) if selection.backend() == "cuda" else PreparedCall(run)


def plan_of(problem: Problem) -> Plan | DensePlan | str:
    """Returns the plan that serves x @ w.T, or why stock MLX serves it.

    The plan's kernels may still fail their check.

    Raises:
        ValueError: If stock MLX would serve for lack of a kernel, and the product must
            not vary.
    """
    reason = eligibility.unsupported(problem)
    if reason:
        eligibility.refuse_variance(problem.invariant, reason)
        return reason
    measured = _measured(problem)
    dense = None if measured else _dense(problem)
    reason = None if dense else eligibility.faster_elsewhere(problem, measured)
    return reason or dense or _plan(problem, measured)


def _decide_not_transposed(
    kind: Kind, problem: Problem, stock: Product
) -> PreparedCall:
    reason = eligibility.unsupported(problem, transpose=False)
    if reason:
        eligibility.refuse_variance(kind.invariant, reason)
        return PreparedCall(stock, reason, is_stock=kind.layout == "mlx")
    back = dense_plan(problem, transposed=False)
    reason = _fault_of(back)
    if reason:
        return PreparedCall(stock, reason, is_stock=kind.layout == "mlx")
    product = differentiable(launch.dense_product(back), stock)
    # Plain products are broadcast by MLX, which repeats no x.
    return PreparedCall(product if problem.batch > 1 else as_called(product, kind))


def traced_call(run: Run) -> PreparedCall:
    """Serves by a call whose graph is built once.

    A traced graph spares what MLX does with a CUDA kernel's template arguments and text
    in every call (measured, docs/lab), and Python between its parts.
    """
    served = PreparedCall(run)
    served.run = traced(run, partial(setattr, served, "run"))
    return served


def _fault_of(plan: Plan | DensePlan) -> str | None:
    """Returns why a plan's kernels must not be used; None if they may.

    Raises:
        ValueError: If stock MLX would serve, and the product must not vary.
    """
    fault = guard.why_not(plan)
    if fault:
        eligibility.refuse_variance(plan.problem.invariant, fault)
    return fault


def _plan(problem: Problem, measured: Result | None) -> Plan:
    return measured.plan if measured else planner.choose(problem, eligibility.target())


def _planned(plan: Plan) -> Product:
    problem = plan.problem
    product = launch.product(plan)
    if problem.epilogue == PLAIN and problem.norm is None:
        return product
    return with_all_operands(product, problem.epilogue)


def _decoded(plan: DensePlan) -> Product:
    product = launch.dense_product(plan)
    epilogue = plan.problem.epilogue
    return product if epilogue == PLAIN else then_finished(product, epilogue)


def _dense(problem: Problem) -> DensePlan | None:
    # A choice for speed, like handing over.
    if not selection.may_hand_over():
        return None
    return planner.choose_dense(problem, eligibility.target())


@state.cache(KINDS)
def _backward(problem: Problem) -> Product | None:
    """Returns the product with the weight as it is, for the gradient of x.

    None where stock MLX computes that gradient.
    """
    if problem.epilogue != PLAIN or problem.norm is not None:
        return None
    plan = dense_plan(problem, transposed=False)
    return None if guard.why_not(plan) else launch.dense_product(plan)


def _nothing_added_up(kind: Kind) -> Run:
    def zeros(*_: mx.array) -> mx.array:
        return mx.zeros(kind.shape, kind.dtype)

    if kind.epilogue == PLAIN or kind.epilogue.gated:
        return zeros
    return then_finished(zeros, kind.epilogue)


def _measured(problem: Problem) -> Result | None:
    return tuned_results.find(problem, eligibility.target(), selection.backend())
