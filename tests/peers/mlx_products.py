"""Quantized products with random values, and what they are in float64."""

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

TOLERANCE = {mx.float32: 3e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
"""Of the largest element: two roundings of each weight's and the result's dtype."""

FORMATS = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
"""Group size and bits of a mode, unless a product says otherwise."""

LHS, RHS = (2, 0, 1, 1, 0), (1, 1, 0, 2, 0)
"""Which matrices a gathered product takes: of 3 on either side, 5 pairs."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """`batch` products of x [m, k] and a quantized weight by one of MLX's kernels.

    Attributes:
        kernel: The kernel's name without its family (`affine_`, `fp_`).
        mode: Of the quantization.
        group: Group size; 0 for the mode's own.
        bits: 0 for the mode's own.
        batch: Number of products with a weight each; gathers have their own.
        bm: Rows of a tile of the kernels for tensor units.
        splits: Parts of k of `qmm_t_splitk`; 0 for MLX's choice.
    """

    kernel: str
    mode: str
    dtype: mx.Dtype
    m: int
    n: int
    k: int
    group: int = 0
    bits: int = 0
    batch: int = 1
    bm: int = 64
    splits: int = 0

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
    expected: npt.NDArray[np.float64]

    @classmethod
    def of(cls, product: Product) -> "Operands":
        """Values around 1: a misplaced one shows."""
        mx.random.seed(product.m + product.n + product.k)
        group, bits = product.format
        shape = (product.n, product.k) if product.transposed else (product.k, product.n)
        x = mx.random.normal((product.matrices, product.m, product.k))
        w = mx.random.normal((product.matrices, *shape))
        x, w = x.astype(product.dtype), w.astype(product.dtype)
        parts = mx.quantize(w, group_size=group, bits=bits, mode=product.mode)
        names = ("w", "scales", "biases")[: len(parts)]
        exact = [p.astype(mx.float32) if p.dtype == w.dtype else p for p in parts]
        dense = mx.dequantize(
            *exact, group_size=group, bits=bits, mode=product.mode, dtype=mx.float32
        )
        expected = _product(product, _float64(x), _float64(dense))
        return cls(x, dict(zip(names, parts, strict=True)), expected)

    def error(self, y: mx.array) -> float:
        """Of `y`, relative to the largest element of the result."""
        got = _float64(y).reshape(self.expected.shape)
        error = np.abs(got - self.expected).max() / np.abs(self.expected).max()
        return float(error)


def _float64(array: mx.array) -> npt.NDArray[np.float64]:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _product(
    product: Product, x: npt.NDArray[np.float64], w: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    if product.gathered:
        x, w = x[list(LHS)], w[list(RHS)]
    return x @ (w.swapaxes(-1, -2) if product.transposed else w)


def every_kernel() -> Iterator[Product]:
    """Every kernel, mode and dtype, on aligned shapes and on ragged ones."""
    for mode in FORMATS:
        for dtype in (mx.float32, mx.float16, mx.bfloat16):
            for kernel, shapes in _SHAPES.items():
                for m, n, k in shapes:
                    product = Product(
                        kernel=kernel, mode=mode, dtype=dtype, m=m, n=n, k=k
                    )
                    if not over_reads_scales(product):
                        yield product


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
        for kernel, m, n, k in (("qmv_fast", 2, 64, 512), ("qmm_t", 19, 50, 192)):
            yield Product(
                kernel=kernel, mode="affine", dtype=mx.float16, m=m, n=n, k=k, bits=bits
            )
    for group in (32, 128):
        for kernel, m, n, k in (("qmv", 2, 37, 384), ("qmm_t", 19, 50, 384)):
            yield Product(
                kernel=kernel,
                mode="affine",
                dtype=mx.bfloat16,
                m=m,
                n=n,
                k=k,
                group=group,
            )


def batches() -> Iterator[Product]:
    """A weight of its own for each of two products."""
    for mode in FORMATS:
        for kernel in ("qmv_fast", "qmv", "qmv_wide", "qvm", "qmm_t", "qmm_n"):
            m, n, k = _SHAPES[kernel][0]
            yield Product(
                kernel=kernel, mode=mode, dtype=mx.float16, m=m, n=n, k=k, batch=2
            )
