"""The product that users call: checks, plans, runs ours or hands over to stock MLX.

What a call's shapes and dtypes decide is decided once and remembered (`dispatch`); what
remains for every call is a look-up and a kernel call.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn, cast

import mlx.core as mx

from mlx_marlin.argument_types import check_activation, check_format, is_integer
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.products.dispatch import (
    PreparedCall,
    is_for_good,
    memory,
    remembered,
    serve_native,
    serve_packed,
)
from mlx_marlin.products.reference_epilogue import check_operands, split_apart
from mlx_marlin.weights.packed_weight import PackedWeight

CPU = mx.Device(mx.cpu)
Stream = mx.Stream | mx.Device | None


def quantized_matmul(
    x: mx.array,
    w: mx.array | PackedWeight,
    /,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    stream: Stream = None,
) -> mx.array:
    """Multiplies activations by a quantized weight, as `mx.quantized_matmul` does.

    Weights of every scheme of MLX with `transpose=True` run on our kernels; everything
    else, and on a Mac what stock MLX serves faster, goes to `mx.quantized_matmul`.
    `why_not` tells which and why.

    Args:
        x: Activations [..., k].
        w: Codes, uint32 [..., n, k * bits / 32] as `mx.quantize` makes them, or a
            weight from `pack` or `quantize`. What stands before n is broadcast with
            what stands before the rows of x.
        scales: Scales [..., n, k / group_size]; only a packed weight carries its own.
        biases: Biases, same shape as `scales`.
        transpose: Whether the product is x @ w.T (w is [n, k]) or x @ w.
        group_size: Weights that share a scale. Default: the mode's, or the packed
            weight's own.
        bits: Bits of a code. Default: likewise.
        mode: MLX's name of the quantization scheme.
        stream: Stream or device to run on.

    Returns:
        The product [..., n], in the dtype that `mx.quantized_matmul` promotes to.

    Raises:
        TypeError: If `scales` is missing for a weight that is not packed.
        ValueError: If the arguments do not belong together.
    """
    if stream is not None:
        with mx.stream(stream):
            return quantized_matmul(
                x, w, scales, biases, transpose, group_size, bits, mode
            )
    served = _served(x, w, scales, biases, transpose, group_size, bits, mode)
    if isinstance(w, PackedWeight):
        return served.run(x, w.words, w.scales, w.biases_or_global_scale)
    return served.run(x, w, scales, biases)


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
    """Multiplies by the transposed weight and finishes the result in the same kernel.

    The result is `activation(x @ w.T + bias) * multiply + residual`, computed in
    float32 and rounded once. Where stock MLX serves the product, the same operations
    follow it, each with its own rounding.

    Args:
        x: Activations [..., k].
        w: Codes, uint32 [..., n, k * bits / 32], or a weight from `pack` or `quantize`.
        scales: Scales [..., n, k / group_size]; only a packed weight carries its own.
        biases: Biases of the groups, same shape as `scales`.
        bias: Bias [n] of the layer.
        activation: "silu", "gelu" or "gelu_approx", as in `mlx.nn`.
        multiply: Factors [..., n], such as the other half of a gated layer.
        residual: Summands [..., n].
        invariant: Whether a row's bits must not depend on how many rows there are, so
            that a batch gives each row what it would get alone.
        group_size: Weights that share a scale. Default: the mode's, or the packed
            weight's own.
        bits: Bits of a code. Default: likewise.
        mode: MLX's name of the quantization scheme.
        stream: Stream or device to run on.

    Returns:
        The result [..., n], in the dtype of `quantized_matmul`'s product.

    Raises:
        TypeError: If `scales` is missing for a weight that is not packed.
        ValueError: If the arguments do not belong together, or `invariant` is asked of
            a call that only stock MLX can serve.
    """
    if stream is not None:
        with mx.stream(stream):
            return linear(
                x,
                w,
                scales,
                biases,
                bias=bias,
                activation=activation,
                multiply=multiply,
                residual=residual,
                invariant=invariant,
                group_size=group_size,
                bits=bits,
                mode=mode,
            )
    finish = bias is not None, activation, multiply is not None, residual is not None
    try:
        served = _served(
            x, w, scales, biases, True, group_size, bits, mode, (*finish, ()), invariant
        )
    except TypeError:
        check_activation(activation)
        raise
    check_operands(_result_shape(x, w), bias, multiply, residual)
    given = [each for each in (bias, multiply, residual) if each is not None]
    if isinstance(w, PackedWeight):
        return served.run(x, w.words, w.scales, w.biases_or_global_scale, *given)
    return served.run(x, w, scales, biases, *given)


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

    The weights are one weight: their rows one after the other, as `mx.concatenate`
    joins codes, scales and biases.

    Args:
        x: Activations [..., k].
        w: Codes of all weights, uint32 [n, k * bits / 32], or a packed weight.
        scales: Scales [n, k / group_size]; only a packed weight carries its own.
        biases: Biases of the groups, same shape as `scales`.
        parts: Rows of each weight, 2 to 6 numbers that add up to n.
        bias: Biases [n] of all layers.
        invariant: As for `linear`.
        group_size: Weights that share a scale. Default: the mode's, or the packed
            weight's own.
        bits: Bits of a code. Default: likewise.
        mode: MLX's name of the quantization scheme.
        stream: Stream or device to run on.

    Returns:
        A product [..., rows] for each weight; where our kernels serve, each is a
        contiguous array, where stock MLX does, columns of one.

    Raises:
        TypeError: If `scales` is missing for a weight that is not packed.
        ValueError: If the arguments do not belong together.
    """
    if stream is not None:
        with mx.stream(stream):
            return linears(
                x,
                w,
                scales,
                biases,
                parts=parts,
                bias=bias,
                invariant=invariant,
                group_size=group_size,
                bits=bits,
                mode=mode,
            )
    try:
        finish = bias is not None, None, False, False, tuple(parts)
    except TypeError:
        raise TypeError(
            f"parts={parts!r} must be a sequence of 2 to 6 ints, "
            f"got {type(parts).__name__}"
        ) from None
    _epilogue(*finish)  # refuses parts that cannot be
    if isinstance(w, PackedWeight) and w.batch:
        raise ValueError(f"w is a batch {w.batch} of packed weights, expected one")
    n = sum(parts)
    if getattr(w, "shape", ())[-2:-1] != (n,):
        _refuse_rows(x, w, scales, biases, finish[-1])
    served = _served(
        x, w, scales, biases, True, group_size, bits, mode, finish, invariant
    )
    check_operands((*x.shape[:-1], n), bias, None, None)
    if served.reason is not None:
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
    given = [] if bias is None else [bias]
    if isinstance(w, PackedWeight):
        operands = w.words, w.scales, w.biases_or_global_scale
        return several(served.run(x, *operands, *given))
    return several(served.run(x, w, scales, biases, *given))


def why_not(
    x: mx.array,
    w: mx.array | PackedWeight,
    /,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    stream: Stream = None,
) -> str | None:
    """Says why stock MLX serves a call of `quantized_matmul`; None if our kernels do.

    Takes the arguments of `quantized_matmul` and raises what it raises.
    """
    if stream is not None:
        with mx.stream(stream):
            return why_not(x, w, scales, biases, transpose, group_size, bits, mode)
    return _served(x, w, scales, biases, transpose, group_size, bits, mode).reason


def _refuse_rows(
    x: mx.array,
    w: mx.array | PackedWeight,
    scales: mx.array | None,
    biases: mx.array | None,
    parts: tuple[int, ...],
) -> NoReturn:
    if not isinstance(w, mx.array | PackedWeight):
        _refuse_types(x, w, scales, biases)
    if len(w.shape) < 2:
        raise ValueError(f"w has shape {w.shape}, expected [n, k * bits / 32]")
    raise ValueError(f"parts={parts} do not add up to the weight's {w.shape[-2]} rows")


def stock_serves(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    group_size: int,
    bits: int,
    mode: str,
    *,
    bias: bool,
    invariant: bool,
    parts: tuple[int, ...] = (),
) -> bool:
    """Returns whether MLX's own product serves a layer's calls of this kind for good.

    Args:
        x: Activations [..., k].
        w: Codes in MLX's layout, and so are the scales, biases and their format.
        scales: Scales.
        biases: Biases, if the mode has them.
        group_size: Weights that share a scale.
        bits: Bits of a code.
        mode: The quantization scheme.
        bias: Whether a bias [n] is added.
        invariant: As for `linear`.
        parts: As for `linears`.
    """
    finish = bias, None, False, False, parts
    format = True, group_size, bits, mode
    return is_for_good(_served(x, w, scales, biases, *format, finish, invariant))


def several(results: mx.array) -> tuple[mx.array, ...]:
    """Returns what a call with parts gave as what it is: several arrays."""
    return cast(tuple[mx.array, ...], results)


def _result_shape(x: mx.array, w: mx.array | PackedWeight) -> tuple[int, ...]:
    before, batch = x.shape[:-1], w.shape[:-2]
    if batch:
        before = (*mx.broadcast_shapes(before[:-1], batch), *before[-1:])
    return (*before, w.shape[-2])


Finish = tuple[bool, str | None, bool, bool, tuple[int, ...]]
"""Bias?, activation, multiplier?, residual?, parts: an epilogue, quick to look up."""
UNFINISHED: Finish = (False, None, False, False, ())


@lru_cache
def _epilogue(
    bias: bool,
    activation: str | None,
    multiply: bool,
    residual: bool,
    parts: tuple[int, ...],
) -> Epilogue:
    if not all(map(is_integer, parts)):
        raise TypeError(f"parts={parts} must be ints")
    return Epilogue(
        bias=bias,
        activation=activation or "none",
        multiply=multiply,
        residual=residual,
        parts=parts,
    )


_known = memory()


def _served(
    x: mx.array,
    w: mx.array | PackedWeight,
    scales: mx.array | None,
    biases: mx.array | None,
    transpose: bool,
    group_size: int | None,
    bits: int | None,
    mode: str,
    finish: Finish = UNFINISHED,
    invariant: bool = False,
) -> PreparedCall:
    if not isinstance(x, mx.array):
        _refuse_types(x, w, scales, biases)
    on_cpu = mx.default_device() == CPU
    key: tuple[object, ...]
    if isinstance(w, PackedWeight):
        check_packed(w, scales, biases, group_size, bits, mode)
        key = (w.kind, x.shape, x.dtype, transpose, finish, invariant, on_cpu)
        return _known.get(key) or remembered(
            _known, key, _packed(x, w, transpose, on_cpu, finish, invariant)
        )
    is_odd = biases is not None and not isinstance(biases, mx.array)
    if is_odd or not (isinstance(w, mx.array) and isinstance(scales, mx.array)):
        _refuse_types(x, w, scales, biases)
    call = (
        x.shape,
        x.dtype,
        w.shape,
        w.dtype,
        scales.shape,
        scales.dtype,
        None if biases is None else biases.shape,
        None if biases is None else biases.dtype,
        transpose,
        group_size,
        bits,
        mode,
        on_cpu,
    )
    key = (*call, finish, invariant)
    known = _known.get(key)
    if known is None:
        check_format(group_size, bits, mode)
        served = serve_native(*call, _epilogue(*finish), invariant)
        return remembered(_known, key, served)
    return known


def _packed(
    x: mx.array,
    w: PackedWeight,
    transpose: bool,
    on_cpu: bool,
    finish: Finish,
    invariant: bool,
) -> PreparedCall:
    kind: Any = w.kind
    *format, scale_dtype, global_scale, batch = kind
    return serve_packed(  # type: ignore[call-arg]
        x.shape,
        x.dtype,
        *format,
        scale_dtype,
        transpose,
        on_cpu,
        _epilogue(*finish),
        invariant,
        global_scale,
        batch,
    )


def _refuse_types(*arguments: object) -> NoReturn:
    types = ", ".join(type(each).__name__ for each in arguments)
    raise TypeError(
        f"x, w, scales and biases must be mx.array (w may be a PackedWeight, which "
        f"takes the place of scales and biases; biases may be None), got {types}"
    )


def check_packed(
    w: PackedWeight,
    scales: mx.array | None,
    biases: mx.array | None,
    group_size: int | None,
    bits: int | None,
    mode: str,
) -> None:
    """Raises a ValueError if a call says other things than its packed weight."""
    if scales is not None or biases is not None:
        raise ValueError("a packed weight carries its scales and biases; pass none")
    if group_size is None and bits is None and mode == "affine":
        return  # says nothing
    wished = (
        w.group_size if group_size is None else group_size,
        w.bits if bits is None else bits,
        w.mode if mode == "affine" else mode,
    )
    packed = (w.group_size, w.bits, w.mode)
    if wished != packed:
        raise ValueError(
            f"group_size, bits, mode = {wished} do not fit the packed weight's {packed}"
        )
