"""The values that describe a product: a weight, and a call's shapes and options."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from operator import index

import mlx.core as mx

from mlx_marlin.argument_types import is_integer
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.gather_plan import AnyProblem, GatherProblem
from mlx_marlin.planning.problem import MOST_ELEMENTS, Problem, largest_array
from mlx_marlin.products.reference.weight import (
    NativeWeight,
    native_product,
)
from mlx_marlin.weights.dtypes import dtype_name, result_dtype
from mlx_marlin.weights.formats import MODE_DEFAULTS, TILE_N
from mlx_marlin.weights.packed_weight import PackedWeight

CPU = mx.Device(mx.cpu)
Shape = tuple[int, ...]
Run = Callable[..., mx.array]
"""From x, codes, scales, biases and an epilogue's arrays, as the caller has them. With
an epilogue that has parts, the result is a tuple of arrays."""
EpilogueKey = tuple[bool, str | None, bool, bool, Shape]
"""An epilogue: has a bias, activation, has a multiplier, has a residual, parts.

Unlike an `Epilogue`, it is hashed without a call of Python code."""
NO_EPILOGUE: EpilogueKey = (False, None, False, False, ())
NOTHING = "there is nothing to add up"
"""Why no kernel runs if x or the result is empty."""


@lru_cache
def epilogue_of(key: EpilogueKey) -> Epilogue:
    """Returns the epilogue of a key."""
    bias, activation, multiply, residual, parts = key
    if not all(map(is_integer, parts)):
        raise TypeError(f"parts={parts} must be ints")
    return Epilogue(
        bias=bias,
        activation=activation or "none",
        multiply=multiply,
        residual=residual,
        parts=parts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """What a request for experts' products says about the experts."""

    experts: int  # Weights to choose from
    pairs: Shape  # Shape of the indices; each pair of them is a product
    rows_are_named: bool  # Whether there are indices of rows of x
    is_sorted: bool = False  # Whether the experts ascend
    # Whether the kernel adds a bias [experts, n], or those of gate and up
    biased: bool = False
    # How the product with one weight gates that with another one, one of
    # `gather_plan.GATES`; None for one weight
    gate: str | None = None

    def pairs_per_row(self, x_shape: Shape) -> int:
        """Returns how many consecutive pairs share a row of x; 0 if that varies."""
        rows = x_shape[:-2]
        if self.rows_are_named:
            return 0
        if rows == self.pairs:
            return 1
        in_turn = rows and rows == (*self.pairs[:-1], 1)
        return self.pairs[-1] if in_turn else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A valid call of a product: its shapes, dtypes and options."""

    x_shape: Shape  # Shape of the activations
    x_dtype: mx.Dtype  # Their dtype
    # Shape of the result; of heads that are rotated, before the split into heads
    shape: Shape
    dtype: mx.Dtype  # Its dtype
    n: int  # Rows of a weight
    k: int  # Columns of a weight, or of x
    w_batch: Shape = ()  # Dimensions of the weight before its last two
    scale_dtype: mx.Dtype  # Dtype to which scales and biases are converted
    scales_alike: bool = True  # Whether scales and biases have that dtype already
    mode: str  # The quantization scheme
    bits: int  # Bits of a code
    group_size: int  # Weights that share a scale
    transpose: bool  # Whether the product is x @ w.T
    layout: str  # "mlx" or "marlin"
    # Whether the call runs on the CPU
    on_cpu: bool = field(default_factory=lambda: mx.default_device() == CPU)
    epilogue: Epilogue = PLAIN  # What follows the product
    invariant: bool  # Whether a row's bits must not depend on the other rows
    # Whether a weight has a global scale, which kernels take in place of biases
    global_scale: bool = False
    # As in `Problem`; the norm's weight follows the epilogue's arrays
    norm: float | None = None
    # The experts whose weights indices choose; None if all weights multiply
    experts: Gather | None = None

    @property
    def is_shared(self) -> bool:
        """Whether all weights multiply the same rows, so that they are one weight."""
        # An epilogue's arrays have other shapes, and another n may be split otherwise.
        alone = self.epilogue != PLAIN or self.invariant or not self.transpose
        padded = self.layout == "marlin" and self.n % TILE_N != 0
        if (alone or padded) and prod(self.w_batch) > 1:
            return False
        sizes = zip(self.x_shape[-3::-1], self.w_batch[::-1], strict=False)
        return all(1 in pair for pair in sizes)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The call as products of matrices: batch, m and n."""
        weights = prod(self.w_batch)
        m = prod(self.shape[:-1]) // weights
        if self.is_shared:
            return 1, m, weights * self.n
        return weights, m, self.n

    @property
    def problem(self) -> AnyProblem:
        """What to plan for."""
        if self.experts is not None:
            return self._of_experts(self.experts)
        if not self.transpose and self.layout == "mlx":
            raise ValueError("our kernels multiply by the transposed weight only")
        of_rows = self.norm is not None or self.epilogue.rotation is not None
        if of_rows and len(self.x_shape) == 1:
            raise ValueError("our kernels normalize and rotate rows of a matrix")
        return self._problem(*self.sizes)

    def _problem(self, batch: int, m: int, n: int) -> Problem:
        return Problem(
            m=m,
            n=n,
            k=self.k,
            batch=batch,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=dtype_name(self.dtype),
            scale_dtype=dtype_name(self.scale_dtype),
            layout=self.layout,
            epilogue=self.epilogue,
            invariant=self.invariant,
            global_scale=self.global_scale,
            norm=self.norm,
        )

    def _of_experts(self, experts: Gather) -> GatherProblem:
        if self.global_scale:
            raise ValueError("our kernels for experts take no global scale")
        if not self.transpose or len(self.x_shape) < 2 or self.x_shape[-2] != 1:
            raise ValueError(
                "our kernels for experts take single rows times transposed weights"
            )
        pairs = prod(experts.pairs)
        if not pairs or not prod(self.x_shape) or not experts.experts * self.n:
            raise ValueError(NOTHING)
        rows = max(pairs, prod(self.x_shape[:-1]))
        columns = self.n * (2 if experts.gate else 1)
        if largest_array(rows, columns, self.k, self.bits) >= MOST_ELEMENTS:
            raise ValueError(
                "our kernels count in 32 bits, and an array is too large for that"
            )
        return GatherProblem(
            problem=self._problem(1, pairs, self.n),
            experts=experts.experts,
            pairs_per_row=experts.pairs_per_row(self.x_shape),
            is_sorted=experts.is_sorted,
            gate=experts.gate,
            bias=experts.biased,
        )

    def packed(
        self,
        words: mx.array,
        scales: mx.array,
        n: int | None = None,
        global_scale: mx.array | None = None,
    ) -> PackedWeight:
        """Returns a packed weight of these arrays, with n rows."""
        return PackedWeight(
            words=words,
            scales=scales,
            n=n or self.n,
            k=self.k,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            global_scale=global_scale,
        )

    def explain(self) -> str:
        """Returns a one-line description of the call, which need not be a problem."""
        experts = self.experts
        parts = [
            *self._explain_sizes(),
            "" if self.transpose else "not transposed",
            f"{self.mode} {self.bits}-bit",
            f"group {self.group_size}",
            f"{dtype_name(self.dtype)} with {dtype_name(self.scale_dtype)} scales",
            f"{self.layout} layout",
            "" if self.norm is None else "normalized rows",
            self.epilogue.explain(),
            "sorted" if experts and experts.is_sorted else "",
            "biases" if experts and experts.biased else "",
            "the same bits for any rows" if self.invariant else "",
        ]
        return ", ".join(filter(None, parts))

    def _explain_sizes(self) -> tuple[str, ...]:
        if self.experts is not None:
            pairs = prod(self.experts.pairs)
            return (
                f"{pairs} {'pair' if pairs == 1 else 'pairs'} of a row and one of "
                f"{self.experts.experts} experts {self.k}→{self.n}",
            )
        batch, m, n = self.sizes if prod(self.w_batch) else (0, 0, self.n)
        rows = f"{m} {'row' if m == 1 else 'rows'} of {self.k}→{n}"
        return rows, f"each of {batch} weights" if batch != 1 else ""


def native_request(
    x: mx.array,
    weight: NativeWeight,
    transpose: bool,
    epilogue: Epilogue,
    invariant: bool,
    norm: float | None = None,
) -> Request:
    """Checks a call whose weight is in MLX's layout, and returns its request.

    `x`: activations [..., k].
    """
    w, scales, biases, (group_size, bits, mode) = weight
    if not x.shape:
        raise ValueError("x has no dimensions, expected [..., k]")
    _check_rows(x.shape, w.shape[:-2])
    # Integers of other libraries are equal to Python's as keys of a cache.
    bits = None if bits is None else index(bits)
    group_size = None if group_size is None else index(group_size)
    if bits == 0:  # MLX divides by it
        raise ValueError("bits=0, expected the bits of a code or None")
    blanks = (_blank(w), _blank(scales), None if biases is None else _blank(biases))
    # Never evaluated: MLX checks the arguments and infers the result's shape and dtype.
    result = native_product(_blank(x), (*blanks, (group_size, bits, mode)), transpose)
    # MLX does not check this and reads past the end of the scales.
    if scales.shape[:-1] != w.shape[:-1]:
        raise ValueError(
            f"scales has shape {scales.shape}, expected a row for each row of w, "
            f"which has shape {w.shape}"
        )
    expected = MODE_DEFAULTS[mode]
    given = expected[0] if group_size is None else group_size, bits or expected[1]
    # MLX ignores these arguments for formats of small floats, which have one size.
    if mode != "affine" and given != expected:
        raise ValueError(
            f"mode={mode!r} has group_size={expected[0]} and bits={expected[1]}, "
            f"got group_size={given[0]} and bits={given[1]}"
        )
    biases_dtype = scales.dtype if biases is None else biases.dtype
    return Request(
        x_shape=x.shape,
        x_dtype=x.dtype,
        shape=(*result.shape[:-1], result.shape[-1] // (2 if epilogue.gated else 1)),
        dtype=result.dtype,
        n=w.shape[-2],
        k=x.shape[-1],
        w_batch=w.shape[:-2],
        scale_dtype=mx.result_type(scales.dtype, biases_dtype),
        scales_alike=biases_dtype == scales.dtype,
        mode=mode,
        bits=given[1],
        group_size=given[0],
        transpose=transpose,
        layout="mlx",
        epilogue=epilogue,
        invariant=invariant,
        norm=norm,
    )


def packed_request(
    x: mx.array,
    w: PackedWeight,
    epilogue: Epilogue,
    *,
    transpose: bool = True,
    invariant: bool = False,
    norm: float | None = None,
) -> Request:
    """Checks a call whose weight is packed, and returns its request.

    `x`: activations [..., k], or [..., n] if not transposed.
    """
    n, k, group_size, bits, mode, scale_dtype, global_scale, batch = w.kind
    inner, outer = (k, n) if transpose else (n, k)
    if not x.shape or x.shape[-1] != inner:
        raise ValueError(
            f"x has shape {x.shape}, expected [..., {inner}] for the packed weight "
            f"{(*batch, n, k)} with transpose={transpose}"
        )
    if batch and global_scale:
        raise ValueError(
            f"w is a batch {batch} of packed weights with a global_scale, expected one "
            f"weight or none with a global_scale"
        )
    _check_rows(x.shape, batch)
    before = broadcast(x.shape[:-2], batch)
    return Request(
        x_shape=x.shape,
        x_dtype=x.dtype,
        shape=(*before, *x.shape[-2:-1], outer // (2 if epilogue.gated else 1)),
        dtype=result_dtype(x.dtype, scale_dtype),
        n=n,
        k=k,
        w_batch=batch,
        scale_dtype=scale_dtype,
        mode=mode,
        bits=bits,
        group_size=group_size,
        transpose=transpose,
        layout="marlin",
        epilogue=epilogue,
        invariant=invariant,
        global_scale=global_scale,
        norm=norm,
    )


def _check_rows(x: Shape, w_batch: Shape) -> None:
    """Refuses a row that is no matrix for a batch, of which MLX reads one weight."""
    if w_batch and len(x) == 1:
        raise ValueError(
            f"x has shape {x}, expected [..., m, {x[0]}] for a batch {w_batch} of "
            f"weights"
        )


def broadcast(x_batch: Shape, w_batch: Shape) -> Shape:
    """Returns the dimensions of a result before its last two."""
    try:
        return tuple(mx.broadcast_shapes(x_batch, w_batch))
    except ValueError:
        raise ValueError(
            f"x has {x_batch} before its rows and w {w_batch} before its own, which "
            f"cannot be broadcast"
        ) from None


def _blank(array: mx.array) -> mx.array:
    return mx.zeros(array.shape, array.dtype)
