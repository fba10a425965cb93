"""Products by MLX's kernels for tensor units, and which of them are tested."""

from collections.abc import Iterator
from functools import partial
from itertools import chain, product

import mlx.core as mx

from peers.mlx_products import Product

TOLERANCE = {mx.float32: 2e-3, mx.float16: 1e-3, mx.bfloat16: 8e-3}
"""Of the largest element. MLX asks for relaxed precision: float loses bits."""

DTYPES = tuple(TOLERANCE)
BITS = (1, 2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
ROWS = (1, 15, 16, 17, 31, 33, 63, 65)
FP_MODES = ("mxfp4", "mxfp8", "nvfp4")


_rows_by = partial(Product, kernel="qmm_t_nax", mode="affine", k=128)


def _transposed() -> Iterator[Product]:
    """Every dtype with every width; groups, tiles and ragged n in turn."""
    for row, dtype in enumerate(DTYPES):
        for column, bits in enumerate(BITS):
            turn = row + column
            n, bm = (64, 100)[turn % 2], (32, 64)[(row + column // 2) % 2]
            form = {"bits": bits, "group": GROUPS[turn % 3]}
            yield _rows_by(dtype=dtype, m=33, n=n, bm=bm, **form)


def _rows() -> Iterator[Product]:
    """Every number of rows at the edges of fragments and tiles."""
    for bm, m in product((32, 64), ROWS):
        yield _rows_by(dtype=mx.float16, m=m, n=100, bm=bm)


def _others() -> Iterator[Product]:
    """The other kernels of affine weights."""
    columns = {"qmm_n_nax": 128, "gather_qmm_t_nax": 100, "gather_qmm_n_nax": 128}
    for dtype, bits, group in zip(DTYPES, (4, 8, 3), GROUPS, strict=True):
        form = {"dtype": dtype, "bits": bits, "group": group}
        for kernel, n in columns.items():
            yield _rows_by(kernel=kernel, m=37, n=n, **form)
    for kernel in ("qmm_t_nax", "qmm_n_nax"):
        yield _rows_by(kernel=kernel, dtype=mx.bfloat16, m=19, n=64, k=64, batch=2)


def _floating() -> Iterator[Product]:
    """mxfp4, mxfp8 and nvfp4: weights become bfloat whatever x is."""
    for row, dtype in enumerate(DTYPES):
        for column, mode in enumerate(FP_MODES):
            m, n, bm = ((17, 100, 32), (65, 64, 64))[(row + column) % 2]
            yield _rows_by(mode=mode, dtype=dtype, m=m, n=n, k=192, bm=bm)
    half = partial(_rows_by, dtype=mx.float16, m=33, k=64)
    for mode in FP_MODES:
        yield half(kernel="gather_qmm_t_nax", mode=mode, n=100)
    yield half(mode="mxfp4", n=64, batch=2)


def every_product() -> list[Product]:
    """Returns the products, without duplicates."""
    parts = (_transposed(), _rows(), _others(), _floating())
    return list(dict.fromkeys(chain(*parts)))
