"""Products of layers, whose arrays are known to belong together."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.products.dispatch import PreparedCall
from mlx_marlin.products.linear import as_tuple
from mlx_marlin.products.matmul import DEFAULT_FORMAT, prepared_call
from mlx_marlin.products.reference.epilogue import check_operands, split_apart
from mlx_marlin.products.reference.weight import NativeWeight
from mlx_marlin.products.request import NO_EPILOGUE, EpilogueKey
from mlx_marlin.weights.packed_weight import PackedWeight

GATED = Epilogue(activation="silu", gated=True)
Weight = PackedWeight | NativeWeight
Arrays = tuple[mx.array | None, ...]


def layer_product(
    x: mx.array,
    weight: Weight,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    *,
    invariant: bool = False,
    transpose: bool = True,
) -> mx.array:
    """Multiplies x [..., k] by a weight.

    `x`: activations [..., k].
    `bias`: bias [n] of the layer.
    `transpose`: whether the product is x @ w.T, or x [..., n] @ w without bias and
    residual.
    """
    epilogue = NO_EPILOGUE
    operands: Sequence[mx.array] = ()
    if bias is not None or residual is not None:
        epilogue = bias is not None, None, False, residual is not None, ()
        operands = [array for array in (bias, residual) if array is not None]
    prepared, arrays = _prepared(x, weight, epilogue, invariant, transpose)
    if operands and not isinstance(weight, PackedWeight):
        n = weight[0].shape[-2]  # the bias of a layer in MLX's layout can be replaced
        check_operands((*x.shape[:-1], n), bias, None, residual)
    return prepared.run(x, *arrays, *operands)


def layer_parts(
    x: mx.array,
    weight: Weight,
    parts: tuple[int, ...],
    bias: mx.array | None = None,
    *,
    invariant: bool = False,
) -> tuple[mx.array, ...]:
    """Multiplies x [..., k] by several weights that are joined, as `linears` does.

    `x`: activations [..., k].
    `bias`: biases [n] of all layers.
    """
    epilogue = bias is not None, None, False, False, parts
    prepared, arrays = _prepared(x, weight, epilogue, invariant)
    if prepared.reason is not None:
        return split_apart(layer_product(x, weight, bias, invariant=invariant), parts)
    check_operands((*x.shape[:-1], sum(parts)), bias, None, None)
    operands = [] if bias is None else [bias]
    return as_tuple(prepared.run(x, *arrays, *operands))


def fused_linear(
    x: mx.array,
    weight: Weight,
    epilogue: Epilogue,
    operands: Sequence[mx.array],
    epsilon: float | None = None,
) -> mx.array | tuple[mx.array, ...] | None:
    """Multiplies x [..., k] by a weight, with any epilogue and an RMSNorm.

    It is for calls that are traced: its look-up takes longer than those of the other
    functions.

    `x`: activations [..., k].
    `weight`: the weight [n, k].
    `operands`: the epilogue's arrays, and with an RMSNorm last its weight [k], in the
    dtype of x.
    """
    prepared, arrays = _prepared(x, weight, epilogue, epsilon=epsilon)
    return None if prepared.reason is not None else prepared.run(x, *arrays, *operands)


def _prepared(
    x: mx.array,
    weight: Weight,
    epilogue: EpilogueKey | Epilogue,
    invariant: bool = False,
    transpose: bool = True,
    epsilon: float | None = None,
) -> tuple[PreparedCall, Arrays]:
    """Returns the prepared call for a weight, and the weight's arrays for it."""
    if isinstance(weight, PackedWeight):
        options = transpose, *DEFAULT_FORMAT, epilogue, invariant, epsilon
        prepared = prepared_call(x, weight, None, None, options)
        return prepared, (weight.words, weight.scales, weight.biases_or_global_scale)
    w, scales, biases, format = weight
    known = transpose, *format, epilogue, invariant, epsilon
    return prepared_call(x, w, scales, biases, known), (w, scales, biases)
