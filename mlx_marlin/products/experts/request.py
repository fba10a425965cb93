"""The request for experts' products: a call's shapes, dtypes and options."""

from dataclasses import dataclass
from math import prod

import mlx.core as mx

from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.problem import MOST_ELEMENTS, Problem, largest_array
from mlx_marlin.products.reference.weight import stock_groups
from mlx_marlin.products.request import CPU, NOTHING, Shape
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import GROUPS, MODE_DEFAULTS
from mlx_marlin.weights.packed_weight import PackedWeight

ArrayType = tuple[Shape, mx.Dtype]
"""Shape and dtype of an array."""
GatherOptions = tuple[bool, bool, bool, bool]
"""Whether the weights are transposed, the experts ascend, the product is invariant, and
a kernel adds biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRequest:
    """A valid call of `gather_qmm`: its shapes, dtypes and options."""

    x_shape: Shape  # Shape of the activations
    dtype: mx.Dtype  # Dtype of the result
    experts: int  # Weights to choose from
    n: int  # Rows of a weight
    k: int  # Columns of a weight
    scale_dtype: mx.Dtype  # Dtype of the scales
    pairs: Shape  # Shape of the indices; each pair of them is a product
    rows_are_named: bool  # Whether there are indices of rows of x
    transpose: bool  # Whether the product is x @ w.T
    group_size: int  # Weights that share a scale
    bits: int  # Bits of a code
    mode: str  # The quantization scheme
    layout: str  # "mlx" or "marlin"
    is_sorted: bool  # Whether the experts ascend
    invariant: bool  # Whether a row's bits must not depend on the others
    has_global_scale: bool  # Whether each weight has a global scale
    on_cpu: bool  # Whether the call runs on the CPU
    # Whether the kernel adds a bias [experts, n], or those of gate and up
    biased: bool = False
    # How the product with one weight gates that with another one, one of
    # `gather_plan.GATES`; None for one weight
    gate: str | None = None

    @property
    def problem(self) -> GatherProblem:
        """The products to plan for."""
        if self.has_global_scale:
            raise ValueError("our kernels for experts take no global scale")
        if not self.transpose or len(self.x_shape) < 2 or self.x_shape[-2] != 1:
            raise ValueError(
                "our kernels for experts take single rows times transposed weights"
            )
        pairs = prod(self.pairs)
        if not pairs or not prod(self.x_shape) or not self.experts * self.n:
            raise ValueError(NOTHING)
        rows = max(pairs, prod(self.x_shape[:-1]))
        columns = self.n * (2 if self.gate else 1)
        if largest_array(rows, columns, self.k, self.bits) >= MOST_ELEMENTS:
            raise ValueError(
                "our kernels count in 32 bits, and an array is too large for that"
            )
        of_one = Problem(
            m=pairs,
            n=self.n,
            k=self.k,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=dtype_name(self.dtype),
            scale_dtype=dtype_name(self.scale_dtype),
            layout=self.layout,
            invariant=self.invariant,
        )
        return GatherProblem(
            problem=of_one,
            experts=self.experts,
            pairs_per_row=self.pairs_per_row,
            is_sorted=self.is_sorted,
            gate=self.gate,
            bias=self.biased,
        )

    @property
    def pairs_per_row(self) -> int:
        """How many consecutive pairs share a row of x; 0 if that varies."""
        rows = self.x_shape[:-2]
        if self.rows_are_named:
            return 0
        if rows == self.pairs:
            return 1
        in_turn = rows and rows == (*self.pairs[:-1], 1)
        return self.pairs[-1] if in_turn else 0

    def explain(self) -> str:
        """Returns a one-line description of the call."""
        pairs = prod(self.pairs)
        parts = [
            f"{pairs} {'pair' if pairs == 1 else 'pairs'} of a row and one of "
            f"{self.experts} experts {self.k}→{self.n}",
            "" if self.transpose else "not transposed",
            f"{self.mode} {self.bits}-bit",
            f"group {self.group_size}",
            f"{dtype_name(self.dtype)} with {dtype_name(self.scale_dtype)} scales",
            f"{self.layout} layout",
            "sorted" if self.is_sorted else "",
            "biases" if self.biased else "",
            "the same bits for any rows" if self.invariant else "",
        ]
        return ", ".join(filter(None, parts))


def packed_request(
    x: ArrayType,
    w: PackedWeight,
    lhs: ArrayType | None,
    rhs: ArrayType,
    options: GatherOptions,
) -> GatherRequest:
    """Checks a call with packed weights, and returns its request."""
    n, k, group_size, bits, mode, scale_dtype, _, (experts,) = w.kind
    transpose, is_sorted, invariant, biased = options
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
    return GatherRequest(
        x_shape=x[0],
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
        on_cpu=mx.default_device() == CPU,
        biased=biased,
    )


def mode_of_mlx(mode: str) -> str:
    """Returns the mode of the weight that `as_mlx` returns."""
    return mode if mode in MODE_DEFAULTS else "affine"
