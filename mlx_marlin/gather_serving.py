"""Decides who serves experts' products, ours or stock MLX, and prepares the run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import mlx.core as mx

from mlx_marlin import backends, launch, scheduler
from mlx_marlin.derivatives import differentiable
from mlx_marlin.formats import DTYPE_BYTES, FORMATS, MODE_DEFAULTS
from mlx_marlin.packing import PackedWeight, dtype_name
from mlx_marlin.problem import MOST_ELEMENTS, Problem, largest_array
from mlx_marlin.stock_weight import as_mlx, stock_groups
from mlx_marlin.why_stock import not_here, refuse_variance, target

Product = Callable[..., mx.array]
"""From x, codes, scales, biases, rows of x and experts, flat, to a row a pair."""
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A call, as far as deciding needs to know it.

    Attributes:
        x_shape: Shape of the activations.
        dtype: Dtype of the result.
        experts: Weights to choose from.
        n: Rows of a weight.
        k: Columns of a weight.
        scale_dtype: Dtype of the scales.
        pairs: Shape of the indices that choose.
        transpose: Whether the product is x @ w.T.
        group_size: Weights that share a scale.
        bits: Bits of a code.
        mode: The quantization scheme.
        layout: "mlx" or "marlin".
        is_sorted: Whether the experts ascend.
        invariant: Whether a row's bits must not depend on the others.
        has_global_scale: Whether each weight has a scale beside its groups'.
        on_cpu: Whether the call is to run on the CPU.
    """

    x_shape: Shape
    dtype: mx.Dtype
    experts: int
    n: int
    k: int
    scale_dtype: mx.Dtype
    pairs: Shape
    transpose: bool
    group_size: int
    bits: int
    mode: str
    layout: str
    is_sorted: bool
    invariant: bool
    has_global_scale: bool
    on_cpu: bool


@lru_cache(4096)
def product_of(kind: Kind) -> Product | None:
    """Returns the prepared product of a kind of call; None where stock serves it.

    Raises:
        ValueError: If the kind must not vary, and our kernels do not take it.
    """
    reason = why_not_gather(kind)
    if reason:
        refuse_variance(kind.invariant, reason)
        return None
    problem = Problem(
        m=prod(kind.pairs),
        n=kind.n,
        k=kind.k,
        group_size=kind.group_size,
        bits=kind.bits,
        mode=kind.mode,
        dtype=dtype_name(kind.dtype),
        scale_dtype=dtype_name(kind.scale_dtype),
        layout=kind.layout,
        invariant=kind.invariant,
    )
    free = backends.backend() == "metal" and backends.forced_backend() is None
    if free and scheduler.gather_reason(
        problem, kind.experts, kind.is_sorted, target()
    ):
        return None
    plan = scheduler.choose_gather(problem, kind.experts)
    return differentiable(launch.gather_product(plan), _stock(kind))


def why_not_gather(kind: Kind) -> str | None:
    """Says why stock MLX serves a kind of call; None if our kernels do."""
    if backends.backend() == "cuda":
        return "our CUDA kernels do not choose among experts"
    known = FORMATS.get((kind.mode, kind.bits))
    if known is None:
        return f"{kind.mode} {kind.bits}-bit is not one of our formats"
    wrong = known.why_not(kind.group_size, kind.k, kind.layout)
    if wrong is not None or kind.has_global_scale:
        return wrong or "our kernels take no global scale here"
    if not kind.transpose or len(kind.x_shape) < 2 or kind.x_shape[-2] != 1:
        return "our kernels take single rows times transposed weights"
    if dtype_name(kind.dtype) not in DTYPE_BYTES:
        return f"our kernels do not compute in {dtype_name(kind.dtype)}"
    if not prod(kind.pairs) or not prod(kind.x_shape) or not kind.experts * kind.n:
        return "there is nothing to add up"
    rows = max(prod(kind.pairs), prod(kind.x_shape[:-1]))
    if largest_array(rows, kind.n, kind.k, kind.bits) >= MOST_ELEMENTS:
        return "our kernels count in 32 bits, and an array is too large for that"
    return not_here(kind.on_cpu)


@lru_cache(4096)
def serve_packed(
    x_shape: Shape,
    x_dtype: mx.Dtype,
    w_shape: tuple[int, int, int],
    scale_dtype: mx.Dtype,
    group_size: int,
    bits: int,
    mode: str,
    lhs: tuple[Shape, mx.Dtype] | None,
    rhs: tuple[Shape, mx.Dtype],
    transpose: bool,
    is_sorted: bool,
    invariant: bool,
    on_cpu: bool,
) -> tuple[Kind, Product | None]:
    """Returns the kind of a call with packed weights, and its prepared product.

    Args:
        x_shape: Shape of the activations.
        x_dtype: Their dtype.
        w_shape: Experts, n and k.
        scale_dtype: Dtype of the scales.
        group_size: Weights that share a scale.
        bits: Bits of a code.
        mode: The quantization scheme.
        lhs: Shape and dtype of the rows' indices; None where each takes its own.
        rhs: Likewise of the experts'.
        transpose: Whether the product is x @ w.T.
        is_sorted: Whether the experts ascend.
        invariant: Whether a row's bits must not depend on the others.
        on_cpu: Whether the call is to run on the CPU.

    Raises:
        ValueError: If the arguments do not belong together, in MLX's words.
    """
    experts, n, k = w_shape
    size = stock_groups(mode, bits, group_size)
    if size is None:
        raise ValueError(
            f"group_size={group_size} of {mode} {bits}-bit experts, expected groups of "
            f"32 or more"
        )
    scales = mx.zeros((experts, n, k // size), scale_dtype)
    known = mode_of_mlx(mode)
    # Never evaluated: MLX checks the arguments and tells the result's shape and dtype.
    result = mx.gather_qmm(
        mx.zeros(x_shape, x_dtype),
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
    kind = Kind(
        x_shape=x_shape,
        dtype=result.dtype,
        experts=experts,
        n=n,
        k=k,
        scale_dtype=scale_dtype,
        pairs=result.shape[:-2],
        transpose=transpose,
        group_size=group_size,
        bits=bits,
        mode=mode,
        layout="marlin",
        is_sorted=is_sorted,
        invariant=invariant,
        has_global_scale=False,
        on_cpu=on_cpu,
    )
    return kind, product_of(kind)


def mode_of_mlx(mode: str) -> str:
    """Returns the mode of what `as_mlx` makes of a weight."""
    return mode if mode in MODE_DEFAULTS else "affine"


def forget() -> None:
    """Drops every decision, so that the next call asks for its back end again."""
    serve_packed.cache_clear()
    product_of.cache_clear()


def _stock(kind: Kind) -> Product:
    def stock(x: mx.array, w: mx.array, *arrays: mx.array) -> mx.array:
        scales, biases, sources, experts = arrays
        words, factors, *rest = weight_of_mlx(kind, w, scales, biases)
        y = mx.gather_qmm(
            x[:, None],
            words,
            factors,
            rest[0] if rest else None,
            lhs_indices=sources,
            rhs_indices=experts,
            group_size=stock_groups(kind.mode, kind.bits, kind.group_size),
            bits=kind.bits,
            mode=mode_of_mlx(kind.mode),
        )
        return y.squeeze(-2)

    return stock


def weight_of_mlx(
    kind: Kind, w: mx.array, scales: mx.array, biases: mx.array
) -> tuple[mx.array, ...]:
    """Returns codes, scales and biases that mean the same to stock MLX."""
    if kind.layout == "mlx":
        return (w, scales, biases) if kind.mode == "affine" else (w, scales)
    packed = PackedWeight(
        words=w,
        scales=scales,
        n=kind.n,
        k=kind.k,
        group_size=kind.group_size,
        bits=kind.bits,
        mode=kind.mode,
    )
    return as_mlx(packed)
