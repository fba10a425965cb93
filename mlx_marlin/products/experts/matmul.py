"""The public product `gather_qmm`, for mixtures of experts."""

from operator import index

import mlx.core as mx

from mlx_marlin.argument_types import (
    check_arrays,
    check_format,
    check_optional_arrays,
)
from mlx_marlin.products.dispatch import calls, is_permanent, remember
from mlx_marlin.products.eligibility import refuse_variance
from mlx_marlin.products.experts.dispatch import prepare
from mlx_marlin.products.experts.packed import gather_packed
from mlx_marlin.products.experts.request import GatherRequest
from mlx_marlin.products.matmul import Stream, check_packed, on_stream
from mlx_marlin.products.reference.weight import NativeWeight
from mlx_marlin.products.request import CPU
from mlx_marlin.weights.formats import MODE_DEFAULTS
from mlx_marlin.weights.packed_weight import PackedWeight


@on_stream
def gather_qmm(
    x: mx.array,
    w: mx.array | PackedWeight,
    /,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    global_scale: mx.array | None = None,
    *,
    sorted_indices: bool = False,
    invariant: bool = False,
    stream: Stream = None,
) -> mx.array:
    """Multiplies rows by weights that indices select, as `mx.gather_qmm` does.

    Our kernels serve single rows (x of shape [..., 1, k]) times transposed weights
    [experts, n, ...]. They read an expert's weight once for all rows that select it.
    `mx.gather_qmm` serves the other calls, and on a GPU those that it computes faster.

    Args:
        x: Activations [..., m, k].
        w: Codes of all weights, uint32 [experts, n, k * bits / 32], or a batch
            [experts, n, k] from `pack` or `quantize`.
        scales: Scales [experts, n, k / group_size]. Packed weights carry their own.
        biases: Biases, same shape as `scales`; None where the mode has none.
        lhs_indices: Matrix of x of each product. Default: all in order.
        rhs_indices: Weight of each product. Default: all in order.
        transpose: Whether the product is x @ w.T or x @ w.
        group_size: Weights that share a scale. Default: the mode's, or the packed
            weights' own.
        bits: Bits of a code. Default: as for `group_size`.
        mode: MLX's name of the quantization scheme.
        global_scale: Scale of each weight, for nvfp4.
        sorted_indices: Whether `rhs_indices` ascend.
        invariant: Whether a row's bits must not depend on the other rows, neither on
            their number nor on their experts.
        stream: Stream or device to run on.

    Returns:
        The products [..., m, n], one for each pair of indices.

    Raises:
        TypeError: If `scales` is missing for weights that are not packed.
        ValueError: If the arguments do not belong together, in MLX's words, or only
            stock MLX can serve a call with `invariant=True`.
    """
    if isinstance(w, PackedWeight):
        check_packed(w, scales, biases, group_size, bits, mode)
        _check_experts(w, global_scale)
        try:
            return gather_packed(
                x,
                w,
                lhs_indices,
                rhs_indices,
                transpose=transpose,
                sorted_indices=sorted_indices,
                invariant=invariant,
            )
        except (AttributeError, TypeError):
            check_arrays(x=x)
            check_optional_arrays(lhs_indices=lhs_indices, rhs_indices=rhs_indices)
            raise
    if scales is None:
        raise TypeError("scales is None, which only a packed weight may leave out")
    y, _ = gather_native(
        x,
        (w, scales, biases, (group_size, bits, mode)),
        lhs_indices,
        rhs_indices,
        transpose=transpose,
        global_scale=global_scale,
        sorted_indices=sorted_indices,
        invariant=invariant,
    )
    return y


def gather_native(
    x: mx.array,
    weight: NativeWeight,
    lhs_indices: mx.array | None,
    rhs_indices: mx.array | None,
    *,
    transpose: bool = True,
    global_scale: mx.array | None = None,
    sorted_indices: bool = False,
    invariant: bool = False,
) -> tuple[mx.array, bool]:
    """Multiplies rows by weights in MLX's layout that indices select.

    `x`: activations [..., m, k].
    """
    w, scales, biases, (group_size, bits, mode) = weight
    # MLX checks the arguments and infers the result's shape. The result is evaluated
    # only if it is returned.
    try:
        result = mx.gather_qmm(
            x,
            w,
            scales,
            biases,
            lhs_indices,
            rhs_indices,
            transpose,
            group_size,
            bits,
            mode,
            global_scale,
            sorted_indices=sorted_indices,
        )
    except TypeError:
        check_arrays(x=x, w=w, scales=scales)
        check_optional_arrays(
            biases=biases,
            lhs_indices=lhs_indices,
            rhs_indices=rhs_indices,
            global_scale=global_scale,
        )
        check_format(group_size, bits, mode)
        raise
    alike = biases is None or biases.dtype == scales.dtype
    whole = w.ndim == 3 and scales.shape[:-1] == w.shape[:-1]
    if rhs_indices is None or not alike or not whole:
        refuse_variance(invariant, "our kernels take [experts, n, k], and indices")
        return result, False
    default = MODE_DEFAULTS.get(mode, MODE_DEFAULTS["affine"])
    width = index(bits) if bits else default[1]
    request = GatherRequest(
        x_shape=x.shape,
        dtype=result.dtype,
        experts=w.shape[0],
        n=w.shape[1],
        k=w.shape[2] * 32 // width,
        scale_dtype=scales.dtype,
        pairs=result.shape[:-2],
        rows_are_named=lhs_indices is not None,
        transpose=transpose,
        group_size=index(group_size) if group_size else default[0],
        bits=width,
        mode=mode,
        layout="mlx",
        is_sorted=sorted_indices,
        invariant=invariant,
        has_global_scale=global_scale is not None,
        on_cpu=mx.default_device() == CPU,
    )
    key = x.shape, x.dtype, None, request, request.on_cpu
    prepared = calls.get(key) or remember(key, prepare(request))
    if prepared.reason is not None:
        return result, is_permanent(prepared)
    biases = scales if biases is None else biases
    return prepared.run(x, lhs_indices, rhs_indices, w, scales, biases), False


def _check_experts(w: PackedWeight, global_scale: mx.array | None) -> None:
    if len(w.batch) != 1:
        raise ValueError(f"w has shape {w.shape}, expected a batch [experts, n, k]")
    if global_scale is not None or w.global_scale is not None:
        raise ValueError("packed experts with a global_scale are not supported")
