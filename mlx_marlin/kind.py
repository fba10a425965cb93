"""A kind of call, and how its arrays become the matrices that a product takes."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import mlx.core as mx

from mlx_marlin.launch import Product
from mlx_marlin.problem import PLAIN, Epilogue

Shape = tuple[int, ...]
Run = Callable[..., mx.array]
"""From x, codes, scales, biases and an epilogue's arrays, as the caller has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A correct call, as far as deciding needs to know it.

    Attributes:
        x_shape: Shape of the activations.
        x_dtype: Their dtype.
        shape: Shape of the result.
        dtype: Its dtype.
        n: Rows of the weight.
        k: Columns of the weight, or of x.
        batched: Whether there are several weights.
        scale_dtype: Dtype that scales and biases are brought to.
        scales_alike: Whether they have it already.
        mode: The quantization scheme.
        bits: Bits of a code.
        group_size: Weights that share a scale.
        transpose: Whether the product is x @ w.T.
        layout: "mlx" or "marlin".
        on_cpu: Whether the call is to run on the CPU.
        epilogue: What follows the product.
        invariant: Whether a row's bits must not depend on the others.
        global_scale: Whether the place of biases has the weight's global scale.
    """

    x_shape: Shape
    x_dtype: mx.Dtype
    shape: Shape
    dtype: mx.Dtype
    n: int
    k: int
    batched: bool
    scale_dtype: mx.Dtype
    scales_alike: bool
    mode: str
    bits: int
    group_size: int
    transpose: bool
    layout: str
    on_cpu: bool
    epilogue: Epilogue
    invariant: bool
    global_scale: bool = False


def as_rows(product: Product, kind: Kind) -> Run:
    """Lets a product of matrices take arrays as the caller has them.

    Args:
        product: From x [m, k] and a weight's arrays in one dtype to y [m, n].
        kind: What the caller has.
    """
    rows = (prod(kind.x_shape[:-1]), kind.x_shape[-1])
    shape = kind.shape
    if kind.x_dtype != kind.dtype or not kind.scales_alike or kind.epilogue != PLAIN:
        product = _converting(product, kind)

    def run(
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        *given: mx.array,
    ) -> mx.array:
        if biases is None:
            biases = scales  # not read
        y = product(x.reshape(rows), w, scales, biases, *given)
        return y.reshape(shape)

    if len(kind.x_shape) == 2 and kind.mode == "affine":
        return product
    return run


def _converting(product: Product, kind: Kind) -> Product:
    matrix = (prod(kind.shape[:-1]), kind.shape[-1])
    bias = kind.epilogue.bias

    def run(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *given: mx.array
    ) -> mx.array:
        if not kind.scales_alike:
            scales = scales.astype(kind.scale_dtype)
            biases = biases.astype(kind.scale_dtype)
        finish = (
            array.astype(kind.dtype).reshape(array.size if bias and not i else matrix)
            for i, array in enumerate(given)
        )
        return product(x.astype(kind.dtype), w, scales, biases, *finish)

    return run
