"""Products with a packed weight's arrays, for layers that hold them themselves."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.products.dispatch import (
    PreparedCall,
    memory,
    remembered,
    serve_packed,
)
from mlx_marlin.products.matmul import CPU, several
from mlx_marlin.products.reference_epilogue import split_apart

_products, _parts, _gated = memory(), memory(), memory()
EPILOGUES = {
    (bias, residual): Epilogue(bias=bias, residual=residual)
    for bias in (False, True)
    for residual in (False, True)
}
"""What a layer has: by whether there is a bias, and whether there are summands."""
GATED = Epilogue(activation="silu", gated=True)


def packed_product(
    x: mx.array,
    words: mx.array,
    scales: mx.array,
    n: int,
    k: int,
    group_size: int,
    bits: int,
    mode: str,
    bias: mx.array | None = None,
    invariant: bool = False,
    transpose: bool = True,
    batch: tuple[int, ...] = (),
    residual: mx.array | None = None,
) -> mx.array:
    """Multiplies x [..., k] by a packed weight's arrays.

    Args:
        x: Activations [..., k].
        words: Codes, as in `PackedWeight`.
        scales: Scales and biases, likewise.
        n: Rows of the weight.
        k: Columns of the weight.
        group_size: Weights that share a scale.
        bits: Bits of a code.
        mode: The scheme, as in `PackedWeight`.
        bias: Bias [n] of the layer.
        invariant: As for `linear`.
        transpose: Whether the product is x @ w.T or x [..., n] @ w; if the latter,
            there is no bias and no residual.
        batch: Leading axes of the arrays, as in `PackedWeight`.
        residual: Summands, of the result's shape.

    Returns:
        The product [..., n] or [..., k], plus the bias and the residual if there are.
    """
    key = (
        x.shape,
        x.dtype,
        n,
        k,
        group_size,
        bits,
        mode,
        scales.dtype,
        transpose,
        mx.default_device() == CPU,
        invariant,
        batch,
        bias is not None,
        residual is not None,
    )
    served = _products.get(key) or remembered(_products, key, _product(*key))
    if bias is None and residual is None:
        return served.run(x, words, scales, scales)
    given = [each for each in (bias, residual) if each is not None]
    return served.run(x, words, scales, scales, *given)


def packed_parts(
    x: mx.array,
    words: mx.array,
    scales: mx.array,
    n: int,
    k: int,
    group_size: int,
    bits: int,
    mode: str,
    parts: tuple[int, ...],
    bias: mx.array | None = None,
    invariant: bool = False,
) -> tuple[mx.array, ...]:
    """Multiplies x [..., k] by the arrays of several packed weights, as `linears`.

    Args:
        x: Activations [..., k].
        words: Codes of all weights, as in `PackedWeight`.
        scales: Scales and biases, likewise.
        n: Rows of all weights.
        k: Columns of a weight.
        group_size: Weights that share a scale.
        bits: Bits of a code.
        mode: The scheme, as in `PackedWeight`.
        parts: Rows of each weight, which add up to n.
        bias: Biases [n] of all layers.
        invariant: As for `linear`.

    Returns:
        A product [..., rows] for each weight.
    """
    key = (
        x.shape,
        x.dtype,
        n,
        k,
        group_size,
        bits,
        mode,
        scales.dtype,
        mx.default_device() == CPU,
        invariant,
        bias is None,
        parts,
    )
    served = _parts.get(key) or remembered(_parts, key, _in_parts(*key))
    if served.reason is not None:
        format = n, k, group_size, bits, mode
        y = packed_product(x, words, scales, *format, bias, invariant)
        return split_apart(y, parts)
    given = [] if bias is None else [bias]
    return several(served.run(x, words, scales, scales, *given))


def packed_gated(
    x: mx.array,
    words: mx.array,
    scales: mx.array,
    n: int,
    k: int,
    group_size: int,
    bits: int,
    mode: str,
) -> mx.array | None:
    """Multiplies x [..., k] by two packed weights as one, of which one gates the other.

    Args:
        x: Activations [..., k].
        words: Codes of gate and up, one after the other, as in `PackedWeight`.
        scales: Scales and biases, likewise.
        n: Rows of both weights, an even number.
        k: Columns of a weight.
        group_size: Weights that share a scale.
        bits: Bits of a code.
        mode: The scheme, as in `PackedWeight`.

    Returns:
        `silu(x @ gate.T) * (x @ up.T)`, [..., n / 2], rounded once; None where no
        kernel of ours has such an epilogue.
    """
    key = (
        x.shape,
        x.dtype,
        n,
        k,
        group_size,
        bits,
        mode,
        scales.dtype,
        True,  # transposed
        mx.default_device() == CPU,
    )
    served = _gated.get(key) or remembered(_gated, key, serve_packed(*key, GATED))
    return served.run(x, words, scales, scales) if served.reason is None else None


def packed_linear(
    x: mx.array,
    words: mx.array,
    scales: mx.array,
    n: int,
    k: int,
    group_size: int,
    bits: int,
    mode: str,
    epilogue: Epilogue,
    given: Sequence[mx.array],
    epsilon: float | None = None,
) -> mx.array | tuple[mx.array, ...] | None:
    """Multiplies x [..., k] by a packed weight's arrays, with any epilogue and a norm.

    Callers trace: this may take longer than the other calls.

    Args:
        x: Activations [..., k].
        words: Codes, as in `PackedWeight`.
        scales: Scales and biases, likewise.
        n: Rows of the weight.
        k: Columns of the weight.
        group_size: Weights that share a scale.
        bits: Bits of a code.
        mode: The scheme, as in `PackedWeight`.
        epilogue: What follows.
        given: Its arrays; at last the weight [k] of an RMS norm, in the dtype of x, if
            rows are normalized before.
        epsilon: As for `mx.fast.rms_norm`; None if rows are multiplied as they are.

    Returns:
        The result, in parts if the epilogue has them; None where stock MLX would serve
        the call.
    """
    format = n, k, group_size, bits, mode
    on_cpu = mx.default_device() == CPU
    call = x.shape, x.dtype, *format, scales.dtype, True, on_cpu, epilogue
    # Neither invariant nor with a global scale.
    served = serve_packed(*call, False, False, (), epsilon)
    if served.reason is not None:
        return None
    return served.run(x, words, scales, scales, *given)


def _product(
    x_shape: tuple[int, ...],
    x_dtype: mx.Dtype,
    n: int,
    k: int,
    group_size: int,
    bits: int,
    mode: str,
    scale_dtype: mx.Dtype,
    transpose: bool,
    on_cpu: bool,
    invariant: bool,
    batch: tuple[int, ...],
    biased: bool,
    summed: bool,
) -> PreparedCall:
    format = n, k, group_size, bits, mode
    epilogue = EPILOGUES[biased, summed]
    call = x_shape, x_dtype, *format, scale_dtype, transpose, on_cpu
    return serve_packed(*call, epilogue, invariant, False, batch)


def _in_parts(
    x_shape: tuple[int, ...],
    x_dtype: mx.Dtype,
    n: int,
    k: int,
    group_size: int,
    bits: int,
    mode: str,
    scale_dtype: mx.Dtype,
    on_cpu: bool,
    invariant: bool,
    unbiased: bool,
    parts: tuple[int, ...],
) -> PreparedCall:
    format = n, k, group_size, bits, mode
    epilogue = Epilogue(bias=not unbiased, parts=parts)
    call = x_shape, x_dtype, *format, scale_dtype, True, on_cpu
    return serve_packed(*call, epilogue, invariant)
