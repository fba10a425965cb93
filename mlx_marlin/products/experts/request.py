"""What experts' products are asked for: a call, as far as deciding needs to know it."""

from dataclasses import dataclass
from math import prod

import mlx.core as mx

from mlx_marlin import state
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products.stock_weight import stock_groups
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import GROUPS, MODE_DEFAULTS

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
        biased: Whether a bias [experts, n] is added, or of gate and up one each.
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
    biased: bool = False


@state.cache(maxsize=4096)
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
    biased: bool = False,
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
        biased: As in `Kind`.

    Raises:
        ValueError: If the arguments do not belong together, in MLX's words.
    """
    experts, n, k = w_shape
    # What stock MLX cannot have is asked for in groups of another size: neither the
    # result nor what is wrong with x and the indices depends on it.
    size = stock_groups(mode, bits, group_size) or GROUPS[0]
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
        biased=biased,
    )


def mode_of_mlx(mode: str) -> str:
    """Returns the mode of what `as_mlx` makes of a weight."""
    return mode if mode in MODE_DEFAULTS else "affine"


def problem_of_one(kind: Kind) -> Problem:
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


def pairs_of_row(kind: Kind) -> int:
    """Returns how many pairs in turn have the same row of x; 0 where that varies."""
    rows = kind.x_shape[:-2]
    if kind.rows_are_named:
        return 0
    if rows == kind.pairs:
        return 1
    in_turn = rows and rows == (*kind.pairs[:-1], 1)
    return kind.pairs[-1] if in_turn and kind.pairs[-1] <= MOST_EACH else 0
