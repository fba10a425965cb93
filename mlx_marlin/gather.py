"""Products of rows with weights that they chose, for mixtures of experts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import mlx.core as mx

from mlx_marlin import device, launch, scheduler
from mlx_marlin.derivatives import differentiable
from mlx_marlin.formats import DTYPE_BYTES, FORMATS, MODE_DEFAULTS
from mlx_marlin.ops import CPU, Stream
from mlx_marlin.packing import dtype_name
from mlx_marlin.problem import MOST_ELEMENTS, Problem, largest_array
from mlx_marlin.serving import not_here

Product = Callable[..., mx.array]
"""From x, codes, scales, biases, rows of x and experts, flat, to a row a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A call, as far as deciding needs to know it."""

    x_shape: tuple[int, ...]
    x_dtype: mx.Dtype
    w_shape: tuple[int, ...]
    scale_dtype: mx.Dtype
    pairs: tuple[int, ...]
    transpose: bool
    group_size: int
    bits: int
    mode: str
    is_sorted: bool
    has_global_scale: bool
    on_cpu: bool


def gather_qmm(
    x: mx.array,
    w: mx.array,
    /,
    scales: mx.array,
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
    stream: Stream = None,
) -> mx.array:
    """Multiplies rows by the weights that they chose, as `mx.gather_qmm` does.

    Single rows (x of shape [..., 1, k]) times transposed weights [experts, n, ...] run
    on our kernels, which read an expert's weight once for all rows that chose it;
    everything else, and on a Mac what stock MLX serves faster, goes to `mx.gather_qmm`.

    Args:
        x: Activations [..., m, k].
        w: Codes of all weights, uint32 [experts, n, k * bits / 32].
        scales: Scales [experts, n, k / group_size].
        biases: Biases, same shape as `scales`; None where the mode has none.
        lhs_indices: Which matrix of x each product takes. Default: each in turn.
        rhs_indices: Which weight each product takes. Default: each in turn.
        transpose: Whether the product is x @ w.T or x @ w.
        group_size: Weights that share a scale. Default: the mode's.
        bits: Bits of a code. Default: the mode's.
        mode: MLX's name of the quantization scheme.
        global_scale: Scale of each weight, for nvfp4.
        sorted_indices: Whether `rhs_indices` ascend.
        stream: Stream or device to run on.

    Returns:
        The products [..., m, n], one for each pair of indices.

    Raises:
        ValueError: If the arguments do not belong together, in MLX's words.
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
            )

    def stock() -> mx.array:
        return mx.gather_qmm(
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

    if rhs_indices is None or scales.shape[:-1] != w.shape[:-1] or w.ndim != 3:
        return stock()
    # Checks the arguments and tells the result's shape; never evaluated.
    result = stock()
    known = MODE_DEFAULTS.get(mode, MODE_DEFAULTS["affine"])
    kind = Kind(
        x_shape=x.shape,
        x_dtype=x.dtype,
        w_shape=w.shape,
        scale_dtype=scales.dtype,
        pairs=result.shape[:-2],
        transpose=transpose,
        group_size=group_size or known[0],
        bits=bits or known[1],
        mode=mode,
        is_sorted=sorted_indices,
        has_global_scale=global_scale is not None,
        on_cpu=mx.default_device() == CPU,
    )
    product = _product(kind) if result.dtype == x.dtype else None
    if product is None or (biases is not None and biases.dtype != scales.dtype):
        return result
    sources, experts = _flat_indices(x, lhs_indices, rhs_indices, kind.pairs)
    rows = x.reshape(-1, x.shape[-1])
    y = product(rows, w, scales, scales if biases is None else biases, sources, experts)
    return y.reshape(result.shape)


def why_not_gather(kind: Kind) -> str | None:
    """Says why stock MLX serves a kind of call; None if our kernels do."""
    known = FORMATS.get((kind.mode, kind.bits))
    if known is None or kind.group_size not in known.group_sizes:
        return f"{kind.mode} {kind.bits}-bit is not one of our formats"
    if kind.x_shape[-1] % known.k_multiple(kind.group_size) or kind.has_global_scale:
        return f"our kernels do not take this form of {kind.mode}"
    if not kind.transpose or len(kind.x_shape) < 2 or kind.x_shape[-2] != 1:
        return "our kernels take single rows times transposed weights"
    if dtype_name(kind.x_dtype) not in DTYPE_BYTES:
        return f"our kernels do not compute in {dtype_name(kind.x_dtype)}"
    if not prod(kind.pairs) or not prod(kind.x_shape) or not prod(kind.w_shape):
        return "there is nothing to add up"
    rows = max(prod(kind.pairs), prod(kind.x_shape[:-1]))
    sizes = rows, kind.w_shape[1], kind.x_shape[-1], kind.bits
    if largest_array(*sizes) >= MOST_ELEMENTS:
        return "our kernels count in 32 bits, and an array is too large for that"
    return not_here(kind.on_cpu)


@lru_cache(4096)
def _product(kind: Kind) -> Product | None:
    """Returns the prepared product of a kind of call; None where stock serves it."""
    if why_not_gather(kind):
        return None
    problem = Problem(
        m=prod(kind.pairs),
        n=kind.w_shape[1],
        k=kind.x_shape[-1],
        group_size=kind.group_size,
        bits=kind.bits,
        mode=kind.mode,
        dtype=dtype_name(kind.x_dtype),
        scale_dtype=dtype_name(kind.scale_dtype),
    )
    experts = kind.w_shape[0]
    free = launch.backend() == "metal" and launch.forced_backend() is None
    here = device.current()
    if free and scheduler.gather_reason(problem, experts, kind.is_sorted, here):
        return None
    plan = scheduler.choose_gather(problem, experts)
    return differentiable(launch.gather_product(plan), _stock(kind))


def _stock(kind: Kind) -> Product:
    biased = kind.mode == "affine"

    def stock(x: mx.array, w: mx.array, *arrays: mx.array) -> mx.array:
        scales, biases, sources, experts = arrays
        y = mx.gather_qmm(
            x[:, None],
            w,
            scales,
            biases if biased else None,
            lhs_indices=sources,
            rhs_indices=experts,
            group_size=kind.group_size,
            bits=kind.bits,
            mode=kind.mode,
        )
        return y.squeeze(-2)

    return stock


def _flat_indices(
    x: mx.array,
    lhs_indices: mx.array | None,
    rhs_indices: mx.array,
    pairs: tuple[int, ...],
) -> tuple[mx.array, mx.array]:
    if lhs_indices is None:
        batch = x.shape[:-2]
        lhs_indices = mx.arange(prod(batch), dtype=mx.uint32).reshape(batch)
    return tuple(  # type: ignore[return-value]
        mx.broadcast_to(each, pairs).astype(mx.uint32).flatten()
        for each in (lhs_indices, rhs_indices)
    )


def forget() -> None:
    """Drops every decision, so that the next call asks for its back end again."""
    _product.cache_clear()
