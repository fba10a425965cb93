"""Products with a packed weight, for layers that hold its arrays themselves."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_marlin import state
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.products.dispatch import Memory, prepare, remembered
from mlx_marlin.products.linear import as_tuple
from mlx_marlin.products.reference.epilogue import split_apart
from mlx_marlin.products.request import (
    CPU,
    PackedArrays,
    packed_kind,
    packed_request,
)

EPILOGUES = {
    (bias, residual): Epilogue(bias=bias, residual=residual)
    for bias in (False, True)
    for residual in (False, True)
}
"""The epilogue of a layer, by whether it has a bias and a residual."""
GATED = Epilogue(activation="silu", gated=True)

_products: Memory = state.register({})
_parts: Memory = state.register({})
_linears: Memory = state.register({})


def packed_product(
    x: mx.array,
    weight: PackedArrays,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    *,
    invariant: bool = False,
    transpose: bool = True,
) -> mx.array:
    """Multiplies x [..., k] by a packed weight.

    Args:
        x: Activations [..., k].
        weight: The weight.
        bias: Bias [n] of the layer.
        residual: Summands, of the result's shape.
        invariant: As for `linear`.
        transpose: Whether the product is x @ w.T, or x [..., n] @ w without bias and
            residual.

    Returns:
        The product [..., n] or [..., k], plus bias and residual.
    """
    words, scales, operand, format = weight
    key = (
        x.shape,
        x.dtype,
        format,
        scales.dtype,
        operand is scales,
        transpose,
        mx.default_device() == CPU,
        invariant,
        bias is None,
        residual is None,
    )
    prepared = _products.get(key)
    if prepared is None:
        request = packed_request(
            x,
            packed_kind(weight),
            EPILOGUES[bias is not None, residual is not None],
            transpose=transpose,
            invariant=invariant,
        )
        prepared = remembered(_products, key, prepare(request))
    if bias is None and residual is None:
        return prepared.run(x, words, scales, operand)
    operands = [array for array in (bias, residual) if array is not None]
    return prepared.run(x, words, scales, operand, *operands)


def packed_parts(
    x: mx.array,
    weight: PackedArrays,
    parts: tuple[int, ...],
    bias: mx.array | None = None,
    *,
    invariant: bool = False,
) -> tuple[mx.array, ...]:
    """Multiplies x [..., k] by several packed weights that are joined, as `linears`.

    Args:
        x: Activations [..., k].
        weight: The joined weight.
        parts: Rows of each weight, which add up to n.
        bias: Biases [n] of all layers.
        invariant: As for `linear`.

    Returns:
        A product [..., rows] for each weight.
    """
    words, scales, operand, format = weight
    on_cpu = mx.default_device() == CPU
    alone = operand is scales, bias is None
    key = x.shape, x.dtype, format, scales.dtype, on_cpu, invariant, alone, parts
    prepared = _parts.get(key)
    if prepared is None:
        epilogue = Epilogue(bias=bias is not None, parts=parts)
        kind = packed_kind(weight)
        request = packed_request(x, kind, epilogue, invariant=invariant)
        prepared = remembered(_parts, key, prepare(request))
    if prepared.reason is not None:
        y = packed_product(x, weight, bias, invariant=invariant)
        return split_apart(y, parts)
    operands = [] if bias is None else [bias]
    return as_tuple(prepared.run(x, words, scales, operand, *operands))


def packed_linear(
    x: mx.array,
    weight: PackedArrays,
    epilogue: Epilogue,
    operands: Sequence[mx.array],
    epsilon: float | None = None,
) -> mx.array | tuple[mx.array, ...] | None:
    """Multiplies x [..., k] by a packed weight, with any epilogue and an RMSNorm.

    It is for calls that are traced: its look-up takes longer than those of the other
    functions.

    Args:
        x: Activations [..., k].
        weight: The weight.
        epilogue: What follows the product.
        operands: The epilogue's arrays, and with an RMSNorm last its weight [k], in the
            dtype of x.
        epsilon: RMSNorm epsilon, or None.

    Returns:
        The result, a tuple if the epilogue has parts; None if stock MLX would serve
        the call.
    """
    words, scales, operand, format = weight
    on_cpu = mx.default_device() == CPU
    call = x.shape, x.dtype, on_cpu, epilogue, epsilon
    key = *call, format, scales.dtype, operand is scales
    prepared = _linears.get(key)
    if prepared is None:
        request = packed_request(x, packed_kind(weight), epilogue, norm=epsilon)
        prepared = remembered(_linears, key, prepare(request))
    if prepared.reason is not None:
        return None
    return prepared.run(x, words, scales, operand, *operands)
