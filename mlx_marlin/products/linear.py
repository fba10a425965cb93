"""Products with an epilogue: `linear`, `linears` for joined weights, and layers'.

The arrays of a layer are known to belong together.
"""

from collections.abc import Sequence
from typing import NoReturn, cast

import mlx.core as mx

from mlx_marlin.argument_types import check_activation
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.products.dispatch import PreparedCall
from mlx_marlin.products.matmul import (
    DEFAULT_FORMAT,
    Options,
    Stream,
    on_stream,
    prepared_call,
    refuse_types,
)
from mlx_marlin.products.reference.epilogue import check_operands, split_apart
from mlx_marlin.products.reference.weight import NativeWeight
from mlx_marlin.products.request import NO_EPILOGUE, EpilogueKey, epilogue_of
from mlx_marlin.weights.packed_weight import PackedWeight


@on_stream
def linear(
    x: mx.array,
    w: mx.array | PackedWeight,
    /,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    *,
    bias: mx.array | None = None,
    activation: str | None = None,
    multiply: mx.array | None = None,
    residual: mx.array | None = None,
    invariant: bool = False,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    stream: Stream = None,
) -> mx.array:
    """Multiplies by the transposed weight and applies an epilogue in the same kernel.

    The result is `activation(x @ w.T + bias) * multiply + residual`, computed in
    float32 and rounded once. If stock MLX serves the product, the epilogue consists of
    MLX's operations, and each of them rounds.

    Args:
        x: Activations [..., k].
        w: Codes, uint32 [..., n, k * bits / 32], or a weight from `pack` or `quantize`.
        scales: Scales [..., n, k / group_size]; a packed weight carries its own.
        biases: Biases of the groups, same shape as `scales`.
        bias: Bias [n] of the layer.
        activation: "silu", "gelu" or "gelu_approx", as in `mlx.nn`.
        multiply: Factors [..., n], such as the other half of a gated layer.
        residual: Summands [..., n].
        invariant: Whether a row's bits must not depend on the number of rows. A row
            then gets the same result in any batch.
        group_size: Weights that share a scale. Default: the mode's, or the packed
            weight's own.
        bits: Bits of a code. Default: as for `group_size`.
        mode: MLX's name of the quantization scheme.
        stream: Stream or device to run on.

    Returns:
        The result [..., n], in the dtype of `quantized_matmul`'s product.

    Raises:
        TypeError: If `scales` is missing for a weight that is not packed.
        ValueError: If the arguments do not belong together, or only stock MLX can serve
            a call with `invariant=True`.
    """
    has = bias is not None, activation, multiply is not None, residual is not None
    options: Options = True, group_size, bits, mode, (*has, ()), invariant, None
    try:
        prepared = prepared_call(x, w, scales, biases, options)
    except TypeError:
        check_activation(activation)
        raise
    check_operands(_result_shape(x, w), bias, multiply, residual)
    operands = [array for array in (bias, multiply, residual) if array is not None]
    if isinstance(w, PackedWeight):
        return prepared.run(x, w.words, w.scales, w.biases_or_global_scale, *operands)
    return prepared.run(x, w, scales, biases, *operands)


@on_stream
def linears(
    x: mx.array,
    w: mx.array | PackedWeight,
    /,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    *,
    parts: Sequence[int],
    bias: mx.array | None = None,
    invariant: bool = False,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    stream: Stream = None,
) -> tuple[mx.array, ...]:
    """Multiplies by several weights that share x, in one launch.

    The weights are joined along n: `mx.concatenate` of their codes, scales and biases.

    Args:
        x: Activations [..., k].
        w: Codes of all weights, uint32 [n, k * bits / 32], or a packed weight.
        scales: Scales [n, k / group_size]; a packed weight carries its own.
        biases: Biases of the groups, same shape as `scales`.
        parts: Rows of each weight, 2 to 6 numbers that add up to n.
        bias: Biases [n] of all layers.
        invariant: As for `linear`.
        group_size: Weights that share a scale. Default: the mode's, or the packed
            weight's own.
        bits: Bits of a code. Default: as for `group_size`.
        mode: MLX's name of the quantization scheme.
        stream: Stream or device to run on.

    Returns:
        A product [..., rows] for each weight. Our kernels return contiguous arrays;
        stock MLX returns columns of one array.

    Raises:
        TypeError: If `scales` is missing for a weight that is not packed.
        ValueError: If the arguments do not belong together.
    """
    try:
        epilogue = bias is not None, None, False, False, tuple(parts)
    except TypeError:
        raise TypeError(
            f"parts={parts!r} must be a sequence of 2 to 6 ints, "
            f"got {type(parts).__name__}"
        ) from None
    epilogue_of(epilogue)  # checks the parts
    if isinstance(w, PackedWeight) and w.batch:
        raise ValueError(f"w is a batch {w.batch} of packed weights, expected one")
    n = sum(parts)
    if getattr(w, "shape", ())[-2:-1] != (n,):
        _refuse_rows(x, w, scales, biases, epilogue[-1])
    options = True, group_size, bits, mode, epilogue, invariant, None
    prepared = prepared_call(x, w, scales, biases, options)
    check_operands((*x.shape[:-1], n), bias, None, None)
    if prepared.reason is not None:
        y = linear(
            x,
            w,
            scales,
            biases,
            bias=bias,
            invariant=invariant,
            group_size=group_size,
            bits=bits,
            mode=mode,
        )
        return split_apart(y, tuple(parts))
    operands = [] if bias is None else [bias]
    if isinstance(w, PackedWeight):
        weight = w.words, w.scales, w.biases_or_global_scale
        return as_tuple(prepared.run(x, *weight, *operands))
    return as_tuple(prepared.run(x, w, scales, biases, *operands))


def _refuse_rows(
    x: mx.array,
    w: mx.array | PackedWeight,
    scales: mx.array | None,
    biases: mx.array | None,
    parts: tuple[int, ...],
) -> NoReturn:
    if not isinstance(w, mx.array | PackedWeight):
        refuse_types(x, w, scales, biases)
    if len(w.shape) < 2:
        raise ValueError(f"w has shape {w.shape}, expected [n, k * bits / 32]")
    raise ValueError(f"parts={parts} do not add up to the weight's {w.shape[-2]} rows")


def as_tuple(results: mx.array) -> tuple[mx.array, ...]:
    """Returns the result of a call with parts, with its type: a tuple of arrays."""
    return cast(tuple[mx.array, ...], results)


def _result_shape(x: mx.array, w: mx.array | PackedWeight) -> tuple[int, ...]:
    before, batch = x.shape[:-1], w.shape[:-2]
    if batch:
        before = (*mx.broadcast_shapes(before[:-1], batch), *before[-1:])
    return (*before, w.shape[-2])


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
