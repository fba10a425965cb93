"""Products of layers, whose arrays are known to belong together."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.products.linear import as_tuple
from mlx_marlin.products.matmul import DEFAULT_FORMAT, Options, prepared_call
from mlx_marlin.products.reference.epilogue import split_apart
from mlx_marlin.products.reference.weight import NativeWeight
from mlx_marlin.products.request import NO_EPILOGUE
from mlx_marlin.weights.packed_weight import PackedWeight

GATED = Epilogue(activation="silu", gated=True)


def packed_product(
    x: mx.array,
    w: PackedWeight,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    *,
    invariant: bool = False,
    transpose: bool = True,
) -> mx.array:
    """Multiplies x [..., k] by a packed weight.

    Args:
        x: Activations [..., k].
        w: The weight.
        bias: Bias [n] of the layer.
        residual: Summands, of the result's shape.
        invariant: As for `linear`.
        transpose: Whether the product is x @ w.T, or x [..., n] @ w without bias and
            residual.

    Returns:
        The product [..., n] or [..., k], plus bias and residual.
    """
    if bias is None and residual is None:
        options = transpose, None, None, "affine", NO_EPILOGUE, invariant, None
        run = prepared_call(x, w, None, None, options).run
        return run(x, w.words, w.scales, w.biases_or_global_scale)
    epilogue = bias is not None, None, False, residual is not None, ()
    run = prepared_call(
        x, w, None, None, (transpose, *DEFAULT_FORMAT, epilogue, invariant, None)
    ).run
    operands = [array for array in (bias, residual) if array is not None]
    return run(x, w.words, w.scales, w.biases_or_global_scale, *operands)


def packed_parts(
    x: mx.array,
    w: PackedWeight,
    parts: tuple[int, ...],
    bias: mx.array | None = None,
    *,
    invariant: bool = False,
) -> tuple[mx.array, ...]:
    """Multiplies x [..., k] by several packed weights that are joined, as `linears`.

    Args:
        x: Activations [..., k].
        w: The joined weight.
        parts: Rows of each weight, which add up to n.
        bias: Biases [n] of all layers.
        invariant: As for `linear`.

    Returns:
        A product [..., rows] for each weight.
    """
    epilogue = bias is not None, None, False, False, parts
    options = True, *DEFAULT_FORMAT, epilogue, invariant, None
    prepared = prepared_call(x, w, None, None, options)
    if prepared.reason is not None:
        return split_apart(packed_product(x, w, bias, invariant=invariant), parts)
    operands = [] if bias is None else [bias]
    arrays = w.words, w.scales, w.biases_or_global_scale
    return as_tuple(prepared.run(x, *arrays, *operands))


def fused_linear(
    x: mx.array,
    weight: PackedWeight | NativeWeight,
    epilogue: Epilogue,
    operands: Sequence[mx.array],
    epsilon: float | None = None,
) -> mx.array | tuple[mx.array, ...] | None:
    """Multiplies x [..., k] by a weight, with any epilogue and an RMSNorm.

    It is for calls that are traced: its look-up takes longer than those of the other
    functions.

    Args:
        x: Activations [..., k].
        weight: The weight [n, k].
        epilogue: What follows the product.
        operands: The epilogue's arrays, and with an RMSNorm last its weight [k], in the
            dtype of x.
        epsilon: RMSNorm epsilon, or None.

    Returns:
        The result, a tuple if the epilogue has parts; None if stock MLX would serve
        the call.
    """
    arrays: tuple[mx.array | None, ...]
    options: Options
    if isinstance(weight, PackedWeight):
        options = True, *DEFAULT_FORMAT, epilogue, False, epsilon
        prepared = prepared_call(x, weight, None, None, options)
        arrays = weight.words, weight.scales, weight.biases_or_global_scale
    else:
        w, scales, biases, format = weight
        options = True, *format, epilogue, False, epsilon
        prepared = prepared_call(x, w, scales, biases, options)
        arrays = w, scales, biases
    return None if prepared.reason is not None else prepared.run(x, *arrays, *operands)
