"""Which products need kernels of their own: the plan's template says, not the size."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import mlx.core as mx
from cuda_compiling import Task
from cuda_products import (
    Shape,
    options,
    plan_of,
    product_of_ours,
    product_of_stock,
)
from cuda_weights import Format, biases_of_stock, zero_native

import mlx_marlin
from mlx_marlin.backends import selection
from mlx_marlin.backends.cuda import launches as cuda_arguments


def needed(
    formats: Sequence[Format], shapes: Sequence[Shape], rows: Sequence[int], layout: str
) -> list[Task]:
    """Returns what compiles all kernels of some products, each once.

    Nothing where there is no CUDA device.

    Stock MLX has kernels for 16, 32 and 64 rows, whatever the shape is, and takes
    longer to compile each than we do: these come first. The most rows below each power
    of two stand for the others.
    """
    if selection.backend() != "cuda":
        return []
    of_stock = {1 << (m - 1).bit_length(): m for m in sorted(rows)}
    tasks: list[Task] = [
        partial(evaluate, "stock", format, layout, shapes[0], m)
        for format, m in product(formats, of_stock.values())
    ]
    ours: dict[Hashable, Task] = {}
    for format, shape, m in product(formats, shapes, rows):
        found = instance(format, layout, shape, m)
        if found is not None:
            ours[found] = partial(evaluate, "ours", format, layout, shape, m)
    return [*tasks, *ours.values()]


def instance(format: Format, layout: str, shape: Shape, rows: int) -> Hashable:
    """Returns what tells the kernels of a product of ours apart; None if none runs."""
    x, weight = of_zeros(format, layout, shape, rows)
    product_of_ours(x, weight, format)  # plans it
    plan = plan_of(rows, shape, format, layout)
    if plan is None:
        return None
    reduce = cuda_arguments.reduce_template(plan) if plan.needs_second_pass else {}
    templates = (cuda_arguments.product_template(plan), reduce)
    return (
        str(format),
        plan.kernel,
        plan.threads,
        *(tuple(each.items()) for each in templates),
    )


def evaluate(name: str, format: Format, layout: str, shape: Shape, rows: int) -> None:
    """Evaluates a product of zeros, "ours" or "stock"."""
    k, n = shape
    x, weight = of_zeros(format, layout, shape, rows)
    if name == "ours":
        mx.eval(product_of_ours(x, weight, format))
        return
    native = zero_native(format, n, k)
    weight = (*native[:2], biases_of_stock(format, native))
    mx.eval(product_of_stock(x, weight, format))


def of_zeros(
    format: Format, layout: str, shape: Shape, rows: int
) -> tuple[mx.array, tuple[object, ...]]:
    """Returns x and what a product of ours takes as its weight, not evaluated."""
    k, n = shape
    x, native = mx.zeros((rows, k), format.type), zero_native(format, n, k)
    if layout == "mlx":
        return x, native
    packed = mlx_marlin.pack(*native, **options(format, format.mode))
    # Its shapes are all that is asked of it: nothing is moved.
    words, scales = (mx.zeros_like(each) for each in (packed.words, packed.scales))
    return x, (replace(packed, words=words, scales=scales),)
