"""A kind of call, and how its arrays become those that a product takes."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import cast

import mlx.core as mx

from mlx_marlin.backends.launch import Product
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.weights.formats import TILE_N

Shape = tuple[int, ...]
Run = Callable[..., mx.array]
"""From x, codes, scales, biases and an epilogue's arrays, as the caller has them. Where
the epilogue has parts, the result is a tuple of arrays, and callers know it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A correct call, as far as deciding needs to know it.

    Attributes:
        x_shape: Shape of the activations.
        x_dtype: Their dtype.
        shape: Shape of the result; of heads that are rotated, before they are heads.
        dtype: Its dtype.
        n: Rows of the weight.
        k: Columns of the weight, or of x.
        w_batch: Dimensions of the weight before its last two.
        scale_dtype: Dtype that scales and biases are brought to.
        scales_alike: Whether they have it already.
        mode: The quantization scheme.
        bits: Bits of a code.
        group_size: Weights that share a scale.
        transpose: Whether the product is x @ w.T.
        layout: "mlx" or "marlin".
        on_cpu: Whether the call is to run on the CPU.
        epilogue: What follows the product.
        invariant: Whether a row's bits must not depend on the others.
        global_scale: Whether the place of biases has the weight's global scale.
        norm: As in `Problem`; the norm's weight follows the epilogue's arrays.
    """

    x_shape: Shape
    x_dtype: mx.Dtype
    shape: Shape
    dtype: mx.Dtype
    n: int
    k: int
    w_batch: Shape
    scale_dtype: mx.Dtype
    scales_alike: bool
    mode: str
    bits: int
    group_size: int
    transpose: bool
    layout: str
    on_cpu: bool
    epilogue: Epilogue
    invariant: bool
    global_scale: bool = False
    norm: float | None = None

    @property
    def is_shared(self) -> bool:
        """Whether all weights multiply the same rows: below each other they are one."""
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


def as_called(product: Product, kind: Kind) -> Run:
    """Lets a product take arrays as the caller has them.

    Args:
        product: From x [..., k] and a weight's arrays in one dtype to y [..., n], or,
            of several weights, from x [batch, m, k] to y [batch, m, n].
        kind: What the caller has.
    """
    # MLX has no gradient of a quantized product with a vector.
    if kind.w_batch or len(kind.x_shape) == 1:
        product = _of_matrices(product, kind)
    if kind.x_dtype != kind.dtype or not kind.scales_alike or kind.epilogue != PLAIN:
        product = _converting(product, kind)
    if kind.layout == "marlin" or kind.mode == "affine":
        return product

    def run(
        x: mx.array, w: mx.array, scales: mx.array, _: None, *given: mx.array
    ) -> mx.array:
        return product(x, w, scales, scales, *given)  # no biases: not read

    return run


Reshape = Callable[[mx.array], mx.array]


def _of_matrices(product: Product, kind: Kind) -> Product:
    """Makes matrices of a batch: weights [batch, n, ...] and rows [batch, m, ...].

    Also of one vector.
    """
    fold, unfold = _folding(kind)
    batch = kind.sizes[0]
    rows = (-1,) if batch == 1 else (batch, -1)
    first = len(kind.w_batch) + 1  # of the dimensions after rows, or tiles of them
    bias = int(kind.epilogue.bias)

    def run(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *given: mx.array
    ) -> mx.array:
        w, scales, biases = (
            each.reshape(*rows, *each.shape[first:]) for each in (w, scales, biases)
        )
        finish = *given[:bias], *map(fold, given[bias:])
        y = product(fold(x), w, scales, biases, *finish)
        if kind.epilogue.parts:
            return cast(mx.array, tuple(map(unfold, y)))
        return unfold(y)

    return run


def _folding(kind: Kind) -> tuple[Reshape, Reshape]:
    """Returns what makes matrices of an array [..., k], and a result of matrices.

    A dimension in which there is one weight for all is rows: they share its reading,
    and no weight is copied. In the others x is broadcast, if not in all of them.
    """
    batch, m, _ = kind.sizes
    whole = kind.shape[:-1] if len(kind.x_shape) > 1 else (*kind.shape[:-1], 1)
    of_x = (1,) * (len(whole) - 1 - len(kind.w_batch))
    is_row = [size == 1 for size in (*of_x, *kind.w_batch, 1)]
    # Weights first, as the kernels have them; or last, as they stand below each other.
    order = sorted(range(len(whole)), key=lambda axis: is_row[axis] ^ kind.is_shared)
    back = (*sorted(range(len(whole)), key=order.__getitem__), -1)
    ordered = [whole[axis] for axis in order]

    def fold(x: mx.array) -> mx.array:
        if kind.is_shared:
            return x.reshape(m, x.shape[-1])
        x = mx.broadcast_to(x, (*whole, x.shape[-1]))
        return x.transpose(*order, -1).reshape(batch, m, x.shape[-1])

    def unfold(y: mx.array) -> mx.array:
        # Of a batch's product, or of a part.
        columns = y.size // prod(whole)
        return (
            y.reshape(*ordered, columns)
            .transpose(*back)
            .reshape(*kind.shape[:-1], columns)
        )

    return fold, unfold


def _converting(product: Product, kind: Kind) -> Product:
    epilogue = kind.epilogue
    first = epilogue.bias + epilogue.operands
    end = first + (2 if epilogue.rotation is not None else 0)  # places and periods

    def run(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *given: mx.array
    ) -> mx.array:
        if not kind.scales_alike:
            scales = scales.astype(kind.scale_dtype)
            biases = biases.astype(kind.scale_dtype)
        finish = (
            each if first <= i < end else each.astype(kind.dtype)
            for i, each in enumerate(given)
        )
        return product(x.astype(kind.dtype), w, scales, biases, *finish)

    return run
