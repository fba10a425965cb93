"""The public product `quantized_matmul`, and the look-up of prepared calls.

The shapes, dtypes and options of a call decide who serves it. The decision is made once
and kept (`dispatch`); a warm call is a look-up and a kernel call.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

import mlx.core as mx

from mlx_marlin.argument_types import check_format
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.products.dispatch import (
    PreparedCall,
    calls,
    is_permanent,
    prepare,
    remember,
)
from mlx_marlin.products.reference.weight import NativeWeight
from mlx_marlin.products.request import (
    CPU,
    NO_EPILOGUE,
    EpilogueKey,
    Request,
    epilogue_of,
    native_request,
    packed_request,
)
from mlx_marlin.weights.packed_weight import PackedWeight

Stream = mx.Stream | mx.Device | None
Options = tuple[
    bool, int | None, int | None, str, EpilogueKey | Epilogue, bool, float | None
]
"""transpose, group_size, bits and mode as `quantized_matmul` takes them, the epilogue,
whether the product is invariant, and the epsilon of an RMSNorm before it."""
DEFAULT_FORMAT = (None, None, "affine")
"""group_size, bits and mode of a call that leaves them to a packed weight."""


F = TypeVar("F", bound=Callable[..., Any])


def on_stream(function: F) -> F:
    """Makes a product run on the stream or device that its argument `stream` names."""

    @wraps(function)
    def call(*arguments: Any, stream: Stream = None, **options: Any) -> Any:
        if stream is None:
            return function(*arguments, **options)
        with mx.stream(stream):
            return function(*arguments, **options)

    return cast(F, call)


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

    Our kernels serve weights of all of MLX's schemes with `transpose=True`.
    `mx.quantized_matmul` serves the other calls, and on a GPU those that it computes
    faster. `why_not` returns the reason.

    Args:
        x: Activations [..., k]; [..., m, k] for several weights.
        w: Codes, uint32 [..., n, k * bits / 32] as `mx.quantize` makes them, or a
            weight from `pack` or `quantize`. The dimensions before n are broadcast with
            those before the rows of x.
        scales: Scales [..., n, k / group_size]. A packed weight carries its own.
        biases: Biases, same shape as `scales`.
        transpose: Whether the product is x @ w.T (w is [n, k]) or x @ w.
        group_size: Weights that share a scale. Default: the mode's, or the packed
            weight's own.
        bits: Bits of a code. Default: as for `group_size`.
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
    options = transpose, group_size, bits, mode, NO_EPILOGUE, False, None
    prepared = prepared_call(x, w, scales, biases, options)
    if isinstance(w, PackedWeight):
        return prepared.run(x, w.words, w.scales, w.biases_or_global_scale)
    return prepared.run(x, w, scales, biases)


@on_stream
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
    """Returns why stock MLX serves a call of `quantized_matmul`, or None.

    It takes the arguments of `quantized_matmul` and raises the same errors.
    """
    options = transpose, group_size, bits, mode, NO_EPILOGUE, False, None
    return prepared_call(x, w, scales, biases, options).reason


def prepared_call(
    x: mx.array,
    w: mx.array | PackedWeight,
    scales: mx.array | None,
    biases: mx.array | None,
    options: Options,
) -> PreparedCall:
    """Returns the prepared call for arguments of a public function.

    `x`: activations [..., k].
    """
    if not isinstance(x, mx.array):
        refuse_types(x, w, scales, biases)
    kind: object
    if isinstance(w, PackedWeight):
        if scales is not None or biases is not None or options[1:4] != DEFAULT_FORMAT:
            check_packed(w, scales, biases, *options[1:4])
        kind = w.kind
    else:
        if not (isinstance(w, mx.array) and isinstance(scales, mx.array)):
            refuse_types(x, w, scales, biases)
        if biases is None:
            kind = w.shape, w.dtype, scales.shape, scales.dtype
        elif isinstance(biases, mx.array):
            kind = (
                w.shape,
                w.dtype,
                scales.shape,
                scales.dtype,
                biases.shape,
                biases.dtype,
            )
        else:
            refuse_types(x, w, scales, biases)
    key = x.shape, x.dtype, kind, options, mx.default_device() == CPU
    try:  # takes less time than `calls.get`
        return calls[key]
    except KeyError:
        pass
    return remember(key, prepare(_request(x, w, scales, biases, options)))


def stock_serves(
    x: mx.array,
    weight: NativeWeight,
    *,
    bias: bool,
    invariant: bool,
    parts: tuple[int, ...] = (),
) -> bool:
    """Returns whether MLX's own product always serves such calls of a layer.

    `x`: activations [..., k].
    `bias`: whether a bias [n] is added.
    """
    w, scales, biases, (group_size, bits, mode) = weight
    epilogue = bias, None, False, False, parts
    options = True, group_size, bits, mode, epilogue, invariant, None
    return is_permanent(prepared_call(x, w, scales, biases, options))


def check_packed(
    w: PackedWeight,
    scales: mx.array | None,
    biases: mx.array | None,
    group_size: int | None,
    bits: int | None,
    mode: str,
) -> None:
    """Raises a ValueError if arguments contradict the packed weight."""
    if scales is not None or biases is not None:
        raise ValueError("a packed weight carries its scales and biases; pass none")
    given = (
        w.group_size if group_size is None else group_size,
        w.bits if bits is None else bits,
        w.mode if mode == "affine" else mode,
    )
    packed = (w.group_size, w.bits, w.mode)
    if given != packed:
        raise ValueError(
            f"group_size, bits, mode = {given} do not fit the packed weight's {packed}"
        )


def refuse_types(*arguments: object) -> NoReturn:
    """Raises the TypeError for x, w, scales and biases."""
    types = ", ".join(type(argument).__name__ for argument in arguments)
    raise TypeError(
        f"x, w, scales and biases must be mx.array (w may be a PackedWeight, which "
        f"takes the place of scales and biases; biases may be None), got {types}"
    )


def _request(
    x: mx.array,
    w: mx.array | PackedWeight,
    scales: mx.array | None,
    biases: mx.array | None,
    options: Options,
) -> Request:
    transpose, group_size, bits, mode, epilogue, invariant, norm = options
    if not isinstance(epilogue, Epilogue):
        epilogue = epilogue_of(epilogue)
    if isinstance(w, PackedWeight):
        return packed_request(
            x, w, epilogue, transpose=transpose, invariant=invariant, norm=norm
        )
    assert scales is not None
    check_format(group_size, bits, mode)
    weight = w, scales, biases, (group_size, bits, mode)
    return native_request(x, weight, transpose, epilogue, invariant, norm)
