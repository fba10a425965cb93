"""The distinct products of a model's layers, and the calls that a race times."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.backends import graph
from mlx_marlin.backends.graph import Product
from mlx_marlin.layers.guarded_parameters import native_weight
from mlx_marlin.layers.joined import whole
from mlx_marlin.lm.report.layer_uses import LayerUse, Target, uses_of
from mlx_marlin.measure import operands
from mlx_marlin.measure.timing import Weight
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.gather_plan import AnyPlan, AnyProblem, GatherPlan
from mlx_marlin.planning.measurement import product_of
from mlx_marlin.planning.problem import Problem, in_stock_mlx
from mlx_marlin.products.dispatch import experts_call
from mlx_marlin.products.packing import pack, unpack
from mlx_marlin.products.request import Request

MOST_LAYERS = 8
"""Most layers whose weights a chain reads in turn."""


def weights(use: LayerUse, layout: str, count: int) -> list[Weight]:
    """Returns the arrays of the first layers, in a layout."""
    return [_arrays(layer, layout) for layer in use.layers[:count]]


def layers_beyond_caches(use: LayerUse, m: int, device: PlanningDevice) -> int:
    """Returns how many layers have weights that exceed the caches together."""
    problem = use.problem(m)
    assert problem is not None
    product = product_of(problem)
    experts = min(product.m, use.batch[0]) if use.choices else 1
    needed = device.cache_bytes // (product.weight_bytes * experts) + 1
    return min(needed, MOST_LAYERS, len(use.layers))


def products_of(model: nn.Module, target: Target) -> list[LayerUse]:
    """Returns the distinct products that may be served by us or by stock MLX.

    The one that reads most comes first. Joined layers are those that hold the weights.
    """
    found: dict[AnyProblem, list[LayerUse]] = {}
    for use in uses_of(model, target):
        call = use.request
        if call is None or use.stays or not use.is_converted:
            continue
        if call.invariant or call.global_scale or not call.transpose:
            continue
        problem = use.problem(1)
        if problem is not None and in_stock_mlx(product_of(problem)) is not None:
            found.setdefault(problem, []).append(use)
    products = [
        replace(
            uses[0], layers=tuple(whole(layer) for use in uses for layer in use.layers)
        )
        for uses in found.values()
    ]
    return sorted(products, key=_bytes, reverse=True)


def single_products(
    model: nn.Module, layouts: Sequence[str]
) -> tuple[Counter[Problem], int]:
    """Returns the products of a model's layers that have one weight, with one row.

    An embedding counts if it is also the output head. Its weight stays in its layout,
    because rows of it are read too.
    """
    counts: Counter[Problem] = Counter()
    others = 0
    for use in uses_of(model, Target.of(None)):
        if use.request is None or use.batch:
            continue
        given = layouts
        if use.operation == "as_linear":
            given = (use.request.layout if use.is_converted else "mlx",)
        elif getattr(use.layers[0], "is_packed_only", False):
            given = ("marlin",)
        found = [use.problem(1, layout) for layout in given]
        for each in found:
            if isinstance(each, Problem):
                counts[each] += len(use.layers)
        others += len(use.layers) * (not any(found))
    return counts, others


def stock_parts(use: LayerUse) -> Sequence[int]:
    """Returns the rows of the weights that stock MLX multiplies one by one."""
    return use.call.epilogue.parts or (use.call.n,)


def _bytes(use: LayerUse) -> int:
    problem = use.problem(1)
    assert problem is not None
    return product_of(problem).weight_bytes * len(use.layers)


def _arrays(layer: Any, layout: str) -> tuple[mx.array, ...]:
    """Returns codes, scales and biases of a layer, or scales in place of biases."""
    packed = getattr(layer, "packed", None)
    if layout == "marlin":
        if packed is None:
            w, scales, biases, (group_size, bits, mode) = native_weight(layer)
            packed = pack(
                w, scales, biases, group_size=group_size, bits=bits, mode=mode
            )
        return packed.words, packed.scales, packed.scales
    if packed is not None:
        w, scales, *rest = unpack(packed)
        return w, scales, rest[0] if rest else scales
    w, scales, biases, _ = native_weight(layer)
    return w, scales, scales if biases is None else biases


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A plan or stock MLX in the race for a product."""

    plan: AnyPlan | None  # The plan, or None for stock MLX
    layout: str  # The layout of the weight that it reads


def activations(
    use: LayerUse, m: int, count: int
) -> tuple[mx.array, list[tuple[mx.array, ...]]]:
    """Returns rows of x, and the experts that they choose for each weight."""
    request = use.at(m)
    shape, dtype = request.x_shape, request.dtype
    x = mx.random.normal(shape, key=mx.random.key(0)).astype(dtype)
    if request.experts is None:
        return x, [()] * count
    return x, [(_experts(request, m, use.choices, seed),) for seed in range(count)]


def _experts(request: Request, m: int, choices: int, seed: int) -> mx.array:
    """Returns distinct random experts for each row, sorted if the request is."""
    experts = request.experts
    assert experts is not None
    drawn = mx.random.uniform(shape=(m, experts.experts), key=mx.random.key(seed))
    chosen = mx.argsort(drawn, axis=-1)[:, :choices].astype(mx.uint32)
    return mx.sort(chosen.flatten()) if experts.is_sorted else chosen


def call(use: LayerUse, m: int, entry: Entry) -> Product:
    """Returns what computes m rows of a product, from x and a weight's arrays."""
    request = use.at(m, entry.layout)
    if request.experts is not None:
        unbiased = replace(request.experts, biased=False)
        gathered = _gathered(replace(request, experts=unbiased), entry.plan)
        # The sum of `timing.chain` keeps x's shape: one result of each row.
        return (
            gathered if unbiased.is_sorted else lambda *arrays: gathered(*arrays)[:, :1]
        )
    if entry.plan is None:
        product = use.problem(m, entry.layout)
        assert product is not None
        problem = in_stock_mlx(product_of(product))
        assert problem is not None
        return _in_parts(problem, stock_parts(use))
    if isinstance(entry.plan, DequantizePlan):
        return graph.dequantized_product(entry.plan)
    assert not isinstance(entry.plan, GatherPlan)
    return graph.product(entry.plan, listed=False)


def _in_parts(problem: Problem, parts: Sequence[int]) -> Product:
    """Returns stock MLX's products of the layers that are joined, which x waits for."""
    multiply = operands.stock_product(problem)
    if len(parts) == 1:
        return multiply
    ends = [*accumulate(parts)]
    bounds = [*zip([0, *ends], ends, strict=False)]

    def product(x: mx.array, *weight: mx.array) -> mx.array:
        first, *others = (
            multiply(x, *(array[start:end] for array in weight))
            for start, end in bounds
        )
        waiting: mx.array = mx.depends(first, others)
        return waiting

    return product


def _gathered(request: Request, plan: AnyPlan | None) -> Product:
    """Returns the product of experts, from x, a weight and the experts of the rows."""
    if plan is not None:
        assert isinstance(plan, GatherPlan)
        run = experts_call(request, plan)

        def ours(x: mx.array, *arrays: mx.array) -> mx.array:
            *weight, experts = arrays
            y: mx.array = run(x, None, experts, *weight)
            return y

        return ours
    assert request.experts is not None
    has_biases = request.mode == "affine"
    multiply = partial(
        mx.gather_qmm,
        transpose=True,
        group_size=request.group_size,
        bits=request.bits,
        mode=request.mode,
        sorted_indices=request.experts.is_sorted,
    )

    def stock(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, experts: mx.array
    ) -> mx.array:
        second = biases if has_biases else None
        y: mx.array = multiply(x, w, scales, second, rhs_indices=experts)
        return y

    return stock
