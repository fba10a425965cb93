"""Quantized products with random values, and what they are in float64."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import mlx.core as mx
import numpy as np

from support.oracles import Floats, exact

TOLERANCE = {mx.float32: 3e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
"""Of the largest element: two roundings of each weight's and the result's dtype."""

Record = Callable[[str, mx.Dtype, float], None]
"""Adds the error of a kernel for a dtype to the table: a fixture, `record`."""

FORMATS = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
"""Group size and bits of a mode, unless a product says otherwise."""

LHS, RHS = (2, 0, 1, 1, 0), (1, 1, 0, 2, 0)
"""Which matrices a gathered product takes: of 3 on either side, 5 pairs."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """`batch` products of x [m, k] and a quantized weight by one of MLX's kernels."""

    kernel: str  # The kernel's name without its family (`affine_`, `fp_`)
    mode: str  # Of the quantization
    dtype: mx.Dtype
    m: int
    n: int
    k: int
    group: int = 0  # Group size; 0 for the mode's own
    bits: int = 0  # 0 for the mode's own
    batch: int = 1  # Number of products with a weight each; gathers have their own
    bm: int = 64  # Rows of a tile of the kernels for tensor units
    splits: int = 0  # Parts of k of `qmm_t_splitk`; 0 for MLX's choice

    @property
    def family(self) -> str:
        """What MLX's names begin with."""
        return "affine" if self.mode == "affine" else "fp"

    @property
    def format(self) -> tuple[int, int]:
        """Group size and bits."""
        group, bits = FORMATS[self.mode]
        return self.group or group, self.bits or bits

    @property
    def transposed(self) -> bool:
        """Whether the weight is [n, k], as in `x @ w.T`."""
        return "qvm" not in self.kernel and "qmm_n" not in self.kernel

    @property
    def gathered(self) -> bool:
        """Whether index arrays choose the matrices."""
        return self.kernel.startswith("gather")

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the result that a threadgroup of a qmm computes."""
        return (self.bm, 64) if self.kernel.endswith("_nax") else (32, 32)

    @property
    def matrices(self) -> int:
        """Of x and of w."""
        return 3 if self.gathered else self.batch

    @property
    def results(self) -> int:
        """Matrices of the result."""
        return len(LHS) if self.gathered else self.batch

    def __str__(self) -> str:
        group, bits = self.format
        name = f"{self.mode}_{self.kernel}-{str(self.dtype).split('.')[-1]}"
        tile = f"-bm{self.bm}" if self.kernel.endswith("_nax") else ""
        sizes = f"{self.batch}x{self.m}x{self.n}x{self.k}"
        return f"{name}-g{group}b{bits}-{sizes}{tile}"


@dataclass(frozen=True)
class Operands:
    """x [matrices, m, k], a quantized weight, and the float64 result."""

    x: mx.array
    weight: dict[str, mx.array]
    expected: Floats

    @classmethod
    def of(cls, product: Product) -> "Operands":
        """Values around 1: a misplaced one shows."""
        mx.random.seed(product.m + product.n + product.k)
        group, bits = product.format
        shape = (product.n, product.k) if product.transposed else (product.k, product.n)
        x = mx.random.normal((product.matrices, product.m, product.k))
        w = mx.random.normal((product.matrices, *shape))
        x, w = x.astype(product.dtype), w.astype(product.dtype)
        weight, dense = quantized(w, product.mode, group, bits)
        rows = exact(x)
        if product.gathered:
            rows, dense = rows[list(LHS)], dense[list(RHS)]
        return cls(
            x, weight, rows @ (dense.swapaxes(-1, -2) if product.transposed else dense)
        )

    def error(self, y: mx.array) -> float:
        """Of `y`, relative to the largest element of the result."""
        return error(y.reshape(self.expected.shape), self.expected)


def quantized(
    w: mx.array, mode: str, group: int, bits: int
) -> tuple[dict[str, mx.array], Floats]:
    """Returns the arrays of a quantized weight by name, and what they stand for."""
    form = {"group_size": group, "bits": bits, "mode": mode}
    parts = mx.quantize(w, **form)
    wide = [p.astype(mx.float32) if p.dtype == w.dtype else p for p in parts]
    dense = mx.dequantize(*wide, **form, dtype=mx.float32)
    return dict(zip(("w", "scales", "biases"), parts, strict=False)), exact(dense)


def error(y: mx.array, expected: Floats) -> float:
    """Returns the largest error of `y`, relative to the largest element."""
    return float(np.abs(exact(y) - expected).max() / np.abs(expected).max())


def every_kernel() -> Iterator[Product]:
    """Every kernel, mode and dtype, on aligned shapes and on ragged ones."""
    for mode, dtype in product(FORMATS, (mx.float32, mx.float16, mx.bfloat16)):
        for kernel, shapes in _SHAPES.items():
            for shape in shapes:
                found = _product(kernel, mode, dtype, shape)
                if not over_reads_scales(found):
                    yield found


def _product(
    kernel: str, mode: str, dtype: mx.Dtype, shape: tuple[int, int, int], **more: int
) -> Product:
    m, n, k = shape
    return Product(kernel=kernel, mode=mode, dtype=dtype, m=m, n=n, k=k, **more)


def over_reads_scales(product: Product) -> bool:
    """Whether MLX's kernel leaves its buffers: see test_mlx_findings.py."""
    quad = product.kernel == "qmv_quad" and product.family == "fp"
    return quad and product.n % 64 != 0


# m, n, k: the aligned one first. A ragged n of qvm and qmm_n cannot exist (groups lie
# along n); k is ragged where the groups allow it.
_SHAPES = {
    "qmv_quad": [(2, 64, 64), (3, 37, 128)],
    "qmv_fast": [(2, 64, 512), (3, 37, 512)],
    "qmv": [(2, 64, 256), (3, 37, 192), (1, 5, 320)],
    "qmv_wide": [(2, 64, 512), (5, 37, 192), (7, 37, 320)],
    "qvm": [(2, 128, 256), (3, 64, 100)],
    "qvm_split_k": [(1, 64, 1024)],
    "qmm_t": [(32, 64, 128), (19, 50, 192)],
    "qmm_t_splitk": [(32, 64, 512), (19, 50, 384)],
    "qmm_n": [(32, 64, 128), (19, 128, 84)],
    "gather_qmv_fast": [(2, 64, 512)],
    "gather_qmv": [(2, 64, 256), (1, 37, 192)],
    "gather_qvm": [(2, 128, 256), (1, 64, 100)],
    "gather_qmm_t": [(32, 64, 128), (19, 50, 192)],
    "gather_qmm_n": [(32, 64, 128), (19, 64, 84)],
}


def every_format() -> Iterator[Product]:
    """The widths and group sizes that `every_kernel` leaves out."""
    for bits in (1, 2, 3, 5, 6, 8):
        for kernel, shape in (("qmv_fast", (2, 64, 512)), ("qmm_t", (19, 50, 192))):
            yield _product(kernel, "affine", mx.float16, shape, bits=bits)
    for group in (32, 128):
        for kernel, shape in (("qmv", (2, 37, 384)), ("qmm_t", (19, 50, 384))):
            yield _product(kernel, "affine", mx.bfloat16, shape, group=group)


def batches() -> Iterator[Product]:
    """A weight of its own for each of two products."""
    kernels = ("qmv_fast", "qmv", "qmv_wide", "qvm", "qmm_t", "qmm_n")
    for mode, kernel in product(FORMATS, kernels):
        yield _product(kernel, mode, mx.float16, _SHAPES[kernel][0], batch=2)
