"""Decides who serves experts' products, ours or stock MLX, and prepares the run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import mlx.core as mx

from mlx_marlin import backends, gather_launch, scheduler
from mlx_marlin.cuda_device import CudaDevice
from mlx_marlin.derivatives import differentiable
from mlx_marlin.formats import DTYPE_BYTES, FORMATS, MODE_DEFAULTS, TILE_N
from mlx_marlin.packing import PackedWeight, dtype_name
from mlx_marlin.problem import MOST_ELEMENTS, Problem, largest_array
from mlx_marlin.serving import Served, traced_call, when_forgetting
from mlx_marlin.stock_weight import as_mlx, stock_groups
from mlx_marlin.why_stock import not_here, not_on_cuda, refuse_variance, target

Flat = Callable[..., mx.array]
"""From x [rows, k], codes, scales, biases, rows of x and experts, flat, to a row a
pair."""
Shape = tuple[int, ...]
MOST_EACH = 16
"""Choices of a row that a CUDA kernel is compiled for: more are named rows."""


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
        rows_are_named: Whether indices say which row of x a pair has.
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
    rows_are_named: bool
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
def product_of(kind: Kind) -> Served | None:
    """Returns the prepared product of a kind of call; None where stock serves it.

    It takes x, the rows' indices or None, the experts', codes, scales and biases.

    Raises:
        ValueError: If the kind must not vary, and our kernels do not take it.
    """
    reason = why_not_gather(kind)
    if reason:
        refuse_variance(kind.invariant, reason)
        return None
    if backends.backend() == "cuda":
        return _on_cuda(kind)
    problem = _problem(kind)
    free = backends.backend() == "metal" and backends.forced_backend() is None
    if free and scheduler.gather_reason(
        problem, kind.experts, kind.is_sorted, target()
    ):
        return None
    plan = scheduler.choose_gather(problem, kind.experts)
    product = differentiable(gather_launch.gather_product(plan), _stock(kind))

    def run(
        x: mx.array, lhs: mx.array | None, rhs: mx.array, *weight: mx.array
    ) -> mx.array:
        sources, experts = _flat_indices(x, lhs, rhs, kind.pairs)
        rows = x.reshape(-1, kind.k).astype(kind.dtype)
        y = product(rows, *weight, sources, experts)
        return y.reshape(*kind.pairs, 1, kind.n)

    return Served(run)


def why_not_gather(kind: Kind) -> str | None:
    """Says why stock MLX serves a kind of call; None if our kernels do."""
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
    return not_here(kind.on_cpu) or _why_not_on_cuda(kind)


def _why_not_on_cuda(kind: Kind) -> str | None:
    if backends.backend() != "cuda":
        return None
    if kind.invariant:
        return "our CUDA kernels take no experts with invariant=True"
    all_rows = kind.experts * kind.n
    whole = largest_array(1, all_rows, kind.k, kind.bits)
    if kind.layout == "mlx" and whole >= MOST_ELEMENTS:
        return "our CUDA kernels count MLX's words in 32 bits, and there are more"
    return not_on_cuda(_problem(kind), kind.transpose)


def _problem(kind: Kind) -> Problem:
    """Returns the product of one expert with all pairs as its rows."""
    return Problem(
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


def _cuda_product(kind: Kind, each: int, gated: bool = False) -> Flat:
    device = target()
    assert isinstance(device, CudaDevice)
    asked = _problem(kind), kind.experts, each, device
    plan = scheduler.choose_cuda_gather(*asked, gated)
    return gather_launch.cuda_gather_product(plan)


def _on_cuda(kind: Kind) -> Served:
    each = _pairs_of_row(kind)
    stock = _stock_in_turn(kind, each)
    product = differentiable(_cuda_product(kind, each), stock)

    def in_turn(x: mx.array, _: None, rhs: mx.array, *weight: mx.array) -> mx.array:
        experts = mx.broadcast_to(rhs, kind.pairs).astype(mx.uint32)
        return product(x.astype(kind.dtype), *weight, experts)

    def named(
        x: mx.array, lhs: mx.array | None, rhs: mx.array, *weight: mx.array
    ) -> mx.array:
        sources, experts = _flat_indices(x, lhs, rhs, kind.pairs)
        y = product(x.astype(kind.dtype), *weight, experts, sources)
        return y.reshape(*kind.pairs, 1, kind.n)

    return traced_call(in_turn if each else named)


@lru_cache(4096)
def serve_gated(kind: Kind) -> Served | None:
    """Returns the product with packed experts of gate, which gates that of up.

    It takes x, codes and scales of gate, those of up, and the experts of pairs; None
    where no kernel of ours does so, or rows of x are not in turn.
    """
    each = _pairs_of_row(kind)
    packed = kind.layout == "marlin" and kind.n % TILE_N == 0
    if backends.backend() != "cuda" or not packed or not each:
        return None
    if why_not_gather(replace(kind, n=2 * kind.n)):  # of both weights
        return None
    product = differentiable(
        _cuda_product(kind, each, gated=True), _stock_gated(kind, each)
    )

    def run(
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        second: mx.array,
        second_scales: mx.array,
        rhs: mx.array,
    ) -> mx.array:
        experts = mx.broadcast_to(rhs, kind.pairs).astype(mx.uint32)
        x = x.astype(kind.dtype)
        return product(x, w, scales, scales, second, second_scales, experts)

    return traced_call(run)


def _pairs_of_row(kind: Kind) -> int:
    """Returns how many pairs in turn have the same row of x; 0 where that varies."""
    rows = kind.x_shape[:-2]
    if kind.rows_are_named:
        return 0
    if rows == kind.pairs:
        return 1
    in_turn = rows and rows == (*kind.pairs[:-1], 1)
    return kind.pairs[-1] if in_turn and kind.pairs[-1] <= MOST_EACH else 0


@lru_cache(4096)
def packed_kind(
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
) -> Kind:
    """Returns the kind of a call with packed weights.

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
    return Kind(
        x_shape=x_shape,
        dtype=result.dtype,
        experts=experts,
        n=n,
        k=k,
        scale_dtype=scale_dtype,
        pairs=result.shape[:-2],
        rows_are_named=lhs is not None,
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


@lru_cache(4096)
def serve_packed(*call: Any) -> tuple[Kind, Served | None]:
    """Returns the kind of a call that `packed_kind` takes, and its prepared product."""
    kind = packed_kind(*call)
    return kind, product_of(kind)


def mode_of_mlx(mode: str) -> str:
    """Returns the mode of what `as_mlx` makes of a weight."""
    return mode if mode in MODE_DEFAULTS else "affine"


def forget() -> None:
    """Drops every decision, so that the next call asks for its back end again."""
    packed_kind.cache_clear()
    serve_packed.cache_clear()
    serve_gated.cache_clear()
    product_of.cache_clear()


when_forgetting(forget)


def _flat_indices(
    x: mx.array, lhs: mx.array | None, rhs: mx.array, pairs: Shape
) -> tuple[mx.array, mx.array]:
    """Returns the row of x and the expert of each pair."""
    if lhs is None:
        batch = x.shape[:-2]
        lhs = mx.arange(prod(batch), dtype=mx.uint32).reshape(batch)
    return tuple(  # type: ignore[return-value]
        mx.broadcast_to(each, pairs).astype(mx.uint32).flatten() for each in (lhs, rhs)
    )


def _stock(kind: Kind) -> Flat:
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


def _stock_in_turn(kind: Kind, each: int) -> Flat:
    """Likewise, of x and experts of any shape, and of rows as a plan has them."""
    flat = _stock(kind)

    def stock(
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array,
        experts: mx.array,
        *sources: mx.array,
    ) -> mx.array:
        rows = sources[0] if sources else mx.arange(experts.size) // each
        pairs = rows.astype(mx.uint32), experts.flatten()
        y = flat(x.reshape(-1, kind.k), w, scales, biases, *pairs)
        return y.reshape(*experts.shape, 1, kind.n)

    return stock


def _stock_gated(kind: Kind, each: int) -> Flat:
    """Likewise, of gate and up."""
    stock = _stock_in_turn(kind, each)

    def gated(
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array,
        second: mx.array,
        second_scales: mx.array,
        experts: mx.array,
    ) -> mx.array:
        gate = stock(x, w, scales, biases, experts)
        up = stock(x, second, second_scales, second_scales, experts)
        return gate * mx.sigmoid(gate) * up

    return gated


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
