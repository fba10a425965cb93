"""Products for mixtures of experts: the public `gather_qmm`, and those of layers."""

from operator import index

import mlx.core as mx

from mlx_marlin.argument_types import (
    check_arrays,
    check_format,
    check_optional_arrays,
)
from mlx_marlin.products.dispatch import (
    PreparedCall,
    calls,
    is_permanent,
    prepare,
    refuse_variance,
    remember,
)
from mlx_marlin.products.matmul import Stream, check_packed, on_stream
from mlx_marlin.products.reference.weight import (
    NativeWeight,
    mode_of_mlx,
    stock_groups,
)
from mlx_marlin.products.request import (
    CPU,
    Gather,
    Request,
    Shape,
)
from mlx_marlin.weights.formats import GROUPS, MODE_DEFAULTS
from mlx_marlin.weights.packed_weight import PackedWeight

ArrayType = tuple[Shape, mx.Dtype]
"""Shape and dtype of an array."""
GatherOptions = tuple[
    ArrayType | None, ArrayType, tuple[bool, bool, bool, bool], str | None
]
"""Indices of rows and of experts; whether the weights are transposed, the experts
ascend, the product is invariant and a kernel adds biases; how one weight gates another.
"""


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
    # MLX accepts some formats of small floats with the arrays of others.
    kind = w.shape, w.dtype, scales.shape, scales.dtype, weight[3], result.shape
    options = (
        transpose,
        sorted_indices,
        invariant,
        lhs_indices is not None,
        global_scale is not None,
    )
    key = x.shape, x.dtype, kind, options, mx.default_device() == CPU
    prepared = calls.get(key)
    if prepared is None:
        prepared = remember(key, prepare(_request(x, weight, result, options)))
    if prepared.reason is not None:
        return result, is_permanent(prepared)
    biases = scales if biases is None else biases
    return prepared.run(x, lhs_indices, rhs_indices, w, scales, biases), False


def gather_packed(
    x: mx.array,
    w: PackedWeight,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    *,
    transpose: bool = True,
    sorted_indices: bool = False,
    invariant: bool = False,
    bias: mx.array | None = None,
) -> mx.array:
    """Multiplies rows by packed weights that indices select.

    `x`: activations [..., m, k].
    `bias`: of each weight [experts, n].
    """
    if rhs_indices is None:
        rhs_indices = mx.arange(w.words.shape[0], dtype=mx.uint32)
    added = [bias] if bias is not None and _is_fused(bias, x, w) else []
    lhs = None if lhs_indices is None else (lhs_indices.shape, lhs_indices.dtype)
    rhs = rhs_indices.shape, rhs_indices.dtype
    options = transpose, sorted_indices, invariant, bool(added)
    prepared = _prepared((x.shape, x.dtype), w, (lhs, rhs, options, None))
    weight = w.words, w.scales, w.scales
    y = prepared.run(x, lhs_indices, rhs_indices, *weight, *added)
    if bias is None or added:
        return y
    return y + mx.expand_dims(bias[rhs_indices], -2)


def gather_gated(
    x: mx.array,
    gate: PackedWeight,
    up: PackedWeight,
    indices: mx.array,
    gating: str = "silu",
    biases: tuple[mx.array, ...] = (),
) -> mx.array | None:
    """Multiplies rows by packed experts of gate and of up, and gates.

    `x`: activations [..., k].
    `indices`: the experts of each row [..., choices].
    `biases`: of gate and of up [experts, n], or none.
    """
    if gate.kind != up.kind:
        raise ValueError(f"up is {up.kind}, expected as gate: {gate.kind}")
    if not all(_is_fused(bias, x, gate) for bias in biases):
        return None
    # The shape with one row per expert. A view would cost the host 2 us (docs/lab).
    rows = (*x.shape[:-1], 1, 1, *x.shape[-1:]), x.dtype
    rhs = indices.shape, indices.dtype
    options = True, False, False, bool(biases)
    prepared = _prepared(rows, gate, (None, rhs, options, gating))
    if prepared.reason is not None:
        return None
    weights = gate.words, gate.scales, gate.scales, up.words, up.scales
    return prepared.run(x, None, indices, *weights, *biases)


def _prepared(x: ArrayType, w: PackedWeight, options: GatherOptions) -> PreparedCall:
    key = *x, w.kind, options, mx.default_device() == CPU
    known = calls.get(key)
    if known is not None:
        return known
    return remember(key, prepare(_packed_request(x, w, options)))


def _is_fused(bias: mx.array, x: mx.array, w: PackedWeight) -> bool:
    """Returns whether a kernel adds a bias of each expert, which has x's dtype."""
    return bias.dtype == x.dtype and bias.shape == (*w.batch, w.n)


def _request(
    x: mx.array,
    weight: NativeWeight,
    result: mx.array,
    options: tuple[bool, bool, bool, bool, bool],
) -> Request:
    w, scales, _, (group_size, bits, mode) = weight
    transpose, is_sorted, invariant, rows_are_named, has_global_scale = options
    default = MODE_DEFAULTS.get(mode, MODE_DEFAULTS["affine"])
    width = index(bits) if bits else default[1]
    return Request(
        x_shape=x.shape,
        x_dtype=x.dtype,
        shape=result.shape,
        dtype=result.dtype,
        n=w.shape[1],
        k=w.shape[2] * 32 // width,
        scale_dtype=scales.dtype,
        transpose=transpose,
        group_size=index(group_size) if group_size else default[0],
        bits=width,
        mode=mode,
        layout="mlx",
        invariant=invariant,
        global_scale=has_global_scale,
        experts=Gather(
            experts=w.shape[0],
            pairs=result.shape[:-2],
            rows_are_named=rows_are_named,
            is_sorted=is_sorted,
        ),
    )


def _packed_request(x: ArrayType, w: PackedWeight, options: GatherOptions) -> Request:
    """Checks a call with packed experts, and returns its request."""
    n, k, group_size, bits, mode, scale_dtype, _, (experts,) = w.kind
    lhs, rhs, (transpose, is_sorted, invariant, biased), gate = options
    # MLX does not support every group size that our kernels do. The result and the
    # errors for x and the indices do not depend on it.
    size = stock_groups(mode, bits, group_size) or GROUPS[0]
    known = mode_of_mlx(mode)
    # Of super-blocks, the result has the dtype of x.
    given = x[1] if scale_dtype == mx.uint16 else scale_dtype
    scales = mx.zeros((experts, n, k // size), given)
    # Never evaluated: MLX checks the arguments and infers the result's shape and dtype.
    result = mx.gather_qmm(
        mx.zeros(*x),
        mx.zeros((experts, n, k * bits // 32), mx.uint32),
        scales,
        scales if known == "affine" else None,
        None if lhs is None else mx.zeros(*lhs),
        mx.zeros(*rhs),
        transpose,
        size,
        bits,
        known,
    )
    return Request(
        x_shape=x[0],
        x_dtype=x[1],
        shape=result.shape,
        dtype=result.dtype,
        n=n,
        k=k,
        scale_dtype=scale_dtype,
        transpose=transpose,
        group_size=group_size,
        bits=bits,
        mode=mode,
        layout="marlin",
        invariant=invariant,
        experts=Gather(
            experts=experts,
            pairs=result.shape[:-2],
            rows_are_named=lhs is not None,
            is_sorted=is_sorted,
            biased=biased,
            gate=gate,
        ),
    )


def _check_experts(w: PackedWeight, global_scale: mx.array | None) -> None:
    if len(w.batch) != 1:
        raise ValueError(f"w has shape {w.shape}, expected a batch [experts, n, k]")
    if global_scale is not None or w.global_scale is not None:
        raise ValueError("packed experts with a global_scale are not supported")
