"""Products of rows with weights that they chose, for mixtures of experts."""

from operator import index

import mlx.core as mx

from mlx_marlin.argument_types import (
    check_arrays,
    check_format,
    check_optional_arrays,
)
from mlx_marlin.backends import selection
from mlx_marlin.products.eligibility import refuse_variance
from mlx_marlin.products.experts.dispatch import product_of, serve_gated, serve_packed
from mlx_marlin.products.experts.reference import stock_packed
from mlx_marlin.products.experts.request import Kind, packed_kind
from mlx_marlin.products.matmul import CPU, Stream, check_packed
from mlx_marlin.weights.formats import MODE_DEFAULTS
from mlx_marlin.weights.packed_weight import PackedWeight


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
    """Multiplies rows by the weights that they chose, as `mx.gather_qmm` does.

    Single rows (x of shape [..., 1, k]) times transposed weights [experts, n, ...] run
    on our kernels, which read an expert's weight once for all rows that chose it;
    everything else, and on a Mac what stock MLX serves faster, goes to `mx.gather_qmm`.

    Args:
        x: Activations [..., m, k].
        w: Codes of all weights, uint32 [experts, n, k * bits / 32], or a batch
            [experts, n, k] from `pack` or `quantize`.
        scales: Scales [experts, n, k / group_size]; only packed weights carry their
            own.
        biases: Biases, same shape as `scales`; None where the mode has none.
        lhs_indices: Which matrix of x each product takes. Default: each in turn.
        rhs_indices: Which weight each product takes. Default: each in turn.
        transpose: Whether the product is x @ w.T or x @ w.
        group_size: Weights that share a scale. Default: the mode's, or the packed
            weights' own.
        bits: Bits of a code. Default: likewise.
        mode: MLX's name of the quantization scheme.
        global_scale: Scale of each weight, for nvfp4.
        sorted_indices: Whether `rhs_indices` ascend.
        invariant: Whether a row's bits must not depend on which experts the other rows
            chose, or on how many rows there are.
        stream: Stream or device to run on.

    Returns:
        The products [..., m, n], one for each pair of indices.

    Raises:
        TypeError: If `scales` is missing for weights that are not packed.
        ValueError: If the arguments do not belong together, in MLX's words, or
            `invariant` is asked of a call that only stock MLX can serve.
    """
    if stream is not None:
        with mx.stream(stream):
            return gather_qmm(
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
                invariant=invariant,
            )
    if isinstance(w, PackedWeight):
        check_packed(w, scales, biases, group_size, bits, mode)
        _check_experts(w, global_scale)
        try:
            return gather_packed(
                x,
                w.words,
                w.scales,
                w.n,
                w.k,
                w.group_size,
                w.bits,
                w.mode,
                lhs_indices,
                rhs_indices,
                transpose,
                sorted_indices=sorted_indices,
                invariant=invariant,
            )
        except (AttributeError, TypeError):
            check_arrays(x=x)
            check_optional_arrays(lhs_indices=lhs_indices, rhs_indices=rhs_indices)
            raise

    y, _ = gather_native(
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
        invariant=invariant,
    )
    return y


def gather_native(
    x: mx.array,
    w: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    lhs_indices: mx.array | None,
    rhs_indices: mx.array | None,
    transpose: bool,
    group_size: int | None,
    bits: int | None,
    mode: str,
    global_scale: mx.array | None,
    *,
    sorted_indices: bool,
    invariant: bool,
) -> tuple[mx.array, bool]:
    """Multiplies rows by weights in MLX's layout that they chose.

    The arguments and errors are those of `gather_qmm`.

    Returns:
        The products, and whether stock MLX serves such calls for good.
    """
    if scales is None:
        raise TypeError("scales is None, which only a packed weight may leave out")
    # Checks the arguments and tells the result's shape; evaluated only if returned.
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
    known = MODE_DEFAULTS.get(mode, MODE_DEFAULTS["affine"])
    width = index(bits) if bits else known[1]
    kind = Kind(
        x_shape=x.shape,
        dtype=result.dtype,
        experts=w.shape[0],
        n=w.shape[1],
        k=w.shape[2] * 32 // width,
        scale_dtype=scales.dtype,
        pairs=result.shape[:-2],
        rows_are_named=lhs_indices is not None,
        transpose=transpose,
        group_size=index(group_size) if group_size else known[0],
        bits=width,
        mode=mode,
        layout="mlx",
        is_sorted=sorted_indices,
        invariant=invariant,
        has_global_scale=global_scale is not None,
        on_cpu=mx.default_device() == CPU,
    )
    served = product_of(kind)
    if served is None:
        # On the CPU that may be so only for now.
        return result, not (kind.on_cpu and selection.may_hand_over())
    biases = scales if biases is None else biases
    return served.run(x, lhs_indices, rhs_indices, w, scales, biases), False


def gather_packed(
    x: mx.array,
    words: mx.array,
    scales: mx.array,
    n: int,
    k: int,
    group_size: int,
    bits: int,
    mode: str,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    transpose: bool = True,
    *,
    sorted_indices: bool = False,
    invariant: bool = False,
    bias: mx.array | None = None,
) -> mx.array:
    """Multiplies rows by packed weights that they chose, for callers that hold them.

    Args:
        x: Activations [..., m, k].
        words: Codes [experts, ...], as in `PackedWeight`.
        scales: Scales and biases, likewise.
        n: Rows of a weight.
        k: Columns of a weight.
        group_size: Weights that share a scale.
        bits: Bits of a code.
        mode: The scheme, as in `PackedWeight`.
        lhs_indices: As for `gather_qmm`, and so are those that follow.
        rhs_indices: Likewise.
        transpose: Likewise.
        sorted_indices: Likewise.
        invariant: Likewise.
        bias: Of each weight [experts, n].

    Returns:
        The products [..., m, n], one for each pair of indices, plus their biases.
    """
    experts = words.shape[0]
    if rhs_indices is None:
        rhs_indices = mx.arange(experts, dtype=mx.uint32)
    added = [bias] if bias is not None and _is_fused(bias, x, (experts, n)) else []
    kind, served = serve_packed(
        x.shape,
        x.dtype,
        (experts, n, k),
        scales.dtype,
        group_size,
        bits,
        mode,
        None if lhs_indices is None else (lhs_indices.shape, lhs_indices.dtype),
        (rhs_indices.shape, rhs_indices.dtype),
        transpose,
        sorted_indices,
        invariant,
        mx.default_device() == CPU,
        bool(added),
    )
    if served is None:
        y, added = stock_packed(kind, x, words, scales, lhs_indices, rhs_indices), []
    else:
        y = served.run(x, lhs_indices, rhs_indices, words, scales, scales, *added)
    if bias is None or added:
        return y
    return y + mx.expand_dims(bias[rhs_indices], -2)


def gather_gated(
    x: mx.array,
    weights: tuple[mx.array, mx.array, mx.array, mx.array],
    n: int,
    k: int,
    group_size: int,
    bits: int,
    mode: str,
    indices: mx.array,
    gate: str = "silu",
    biases: tuple[mx.array, ...] = (),
) -> mx.array | None:
    """Multiplies rows by packed experts of gate and of up; one gates the other.

    Args:
        x: Activations [..., k].
        weights: Codes of gate [experts, ...] and its scales and biases, as in
            `PackedWeight`, and those of up.
        n: Rows of a weight.
        k: Columns of a weight.
        group_size: Weights that share a scale.
        bits: Bits of a code.
        mode: The scheme, as in `PackedWeight`.
        indices: The experts of each row [..., choices].
        gate: How, one of `gather_plan.GATES`.
        biases: Of gate and of up [experts, n], if they have some.

    Returns:
        Such as `silu(x @ gate.T) * (x @ up.T)`, [..., choices, 1, n], rounded once;
        None where no kernel of ours does so (`serve_gated`).
    """
    if not all(_is_fused(each, x, (weights[0].shape[0], n)) for each in biases):
        return None
    kind = packed_kind(
        (*x.shape[:-1], 1, 1, k),  # a view would cost the host 2 us (docs/lab)
        x.dtype,
        (weights[0].shape[0], n, k),
        weights[1].dtype,
        group_size,
        bits,
        mode,
        None,
        (indices.shape, indices.dtype),
        True,  # transposed
        False,
        False,
        mx.default_device() == CPU,
        bool(biases),
    )
    served = serve_gated(kind, gate)
    if served is None:
        return None
    return served.run(x, *weights, *biases, indices)


def _is_fused(bias: mx.array, x: mx.array, shape: tuple[int, int]) -> bool:
    """Returns whether a kernel adds a bias of each expert, which has x's dtype."""
    fits = bias.dtype == x.dtype and bias.shape == shape
    return fits and selection.active().gather.fuses_epilogues


def _check_experts(w: PackedWeight, global_scale: mx.array | None) -> None:
    if len(w.batch) != 1:
        raise ValueError(f"w has shape {w.shape}, expected a batch [experts, n, k]")
    if global_scale is not None or w.global_scale is not None:
        raise ValueError("packed experts with a global_scale are not served")
