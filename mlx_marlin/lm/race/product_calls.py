"""The calls that a race times, by a plan or by stock MLX, and their operands."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import mlx.core as mx

from mlx_marlin.backends import graph
from mlx_marlin.backends.graph import Product
from mlx_marlin.lm.race.model_products import ModelProduct, stock_parts
from mlx_marlin.measure import operands
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.gather_plan import AnyPlan, GatherPlan
from mlx_marlin.planning.measurement import product_of
from mlx_marlin.planning.problem import Problem, in_stock_mlx
from mlx_marlin.products.operands import experts_call
from mlx_marlin.products.request import Request

ARRAYS = 3
"""Arrays of a weight in one layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A plan or stock MLX in the race for a product."""

    plan: AnyPlan | None  # The plan, or None for stock MLX
    layout: str  # The layout of the weight that it reads


def reading(index: int, call: Product) -> Product:
    """Returns a call that reads the arrays of one layout, and all that follow."""
    return lambda x, *arrays: call(
        x,
        *arrays[ARRAYS * index : ARRAYS * (index + 1)],
        *arrays[len(arrays) - len(arrays) % ARRAYS :],
    )


def activations(
    product: ModelProduct, m: int, count: int
) -> tuple[mx.array, list[tuple[mx.array, ...]]]:
    """Returns rows of x, and the experts that they choose for each weight."""
    request = product.request(m, product.layout)
    shape, dtype = request.x_shape, request.dtype
    x = mx.random.normal(shape, key=mx.random.key(0)).astype(dtype)
    if request.experts is None:
        return x, [()] * count
    choices = product.product.choices
    return x, [(_experts(request, m, choices, seed),) for seed in range(count)]


def _experts(request: Request, m: int, choices: int, seed: int) -> mx.array:
    """Returns distinct random experts for each row, sorted if the request is."""
    experts = request.experts
    assert experts is not None
    drawn = mx.random.uniform(shape=(m, experts.experts), key=mx.random.key(seed))
    chosen = mx.argsort(drawn, axis=-1)[:, :choices].astype(mx.uint32)
    return mx.sort(chosen.flatten()) if experts.is_sorted else chosen


def call(product: ModelProduct, m: int, entry: Entry) -> Product:
    """Returns what computes m rows of a product, from x and a weight's arrays."""
    request = product.request(m, entry.layout)
    if request.experts is not None:
        gathered = _gathered(request, request.experts.is_sorted, entry.plan)
        # The sum of `timing.chain` keeps x's shape: one result of each row.
        return (
            gathered
            if request.experts.is_sorted
            else lambda *arrays: gathered(*arrays)[:, :1]
        )
    if entry.plan is None:
        problem = in_stock_mlx(product_of(request.problem))
        assert problem is not None
        return _in_parts(problem, stock_parts(product))
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


def _gathered(request: Request, is_sorted: bool, plan: AnyPlan | None) -> Product:
    """Returns the product of experts, from x, a weight and the experts of the rows."""
    if plan is not None:
        assert isinstance(plan, GatherPlan)
        run = experts_call(request, plan)

        def ours(x: mx.array, *arrays: mx.array) -> mx.array:
            *weight, experts = arrays
            y: mx.array = run(x, None, experts, *weight)
            return y

        return ours
    has_biases = request.mode == "affine"
    multiply = partial(
        mx.gather_qmm,
        transpose=True,
        group_size=request.group_size,
        bits=request.bits,
        mode=request.mode,
        sorted_indices=is_sorted,
    )

    def stock(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, experts: mx.array
    ) -> mx.array:
        second = biases if has_biases else None
        y: mx.array = multiply(x, w, scales, second, rhs_indices=experts)
        return y

    return stock
