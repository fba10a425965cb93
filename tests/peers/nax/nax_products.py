"""Products by MLX's kernels for tensor units, and which of them are tested."""

from collections.abc import Iterator

import mlx.core as mx

from peers.mlx_products import Product

TOLERANCE = {mx.float32: 2e-3, mx.float16: 1e-3, mx.bfloat16: 8e-3}
"""Of the largest element. MLX asks for relaxed precision: float loses bits."""

DTYPES = tuple(TOLERANCE)
BITS = (1, 2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
ROWS = (1, 15, 16, 17, 31, 33, 63, 65)
FP_MODES = ("mxfp4", "mxfp8", "nvfp4")


def _transposed() -> Iterator[Product]:
    """Every dtype with every width; groups, tiles and ragged n in turn."""
    for row, dtype in enumerate(DTYPES):
        for column, bits in enumerate(BITS):
            turn = row + column
            yield Product(
                kernel="qmm_t_nax",
                mode="affine",
                dtype=dtype,
                m=33,
                n=(64, 100)[turn % 2],
                k=128,
                bits=bits,
                group=GROUPS[turn % 3],
                bm=(32, 64)[(row + column // 2) % 2],
            )


def _rows() -> Iterator[Product]:
    """Every number of rows at the edges of fragments and tiles."""
    for bm in (32, 64):
        for m in ROWS:
            yield Product(
                kernel="qmm_t_nax",
                mode="affine",
                dtype=mx.float16,
                m=m,
                n=100,
                k=128,
                bm=bm,
            )


def _others() -> Iterator[Product]:
    """The other kernels of affine weights."""
    for dtype, bits, group in zip(DTYPES, (4, 8, 3), GROUPS, strict=True):
        for kernel, n in (
            ("qmm_n_nax", 128),
            ("gather_qmm_t_nax", 100),
            ("gather_qmm_n_nax", 128),
        ):
            yield Product(
                kernel=kernel,
                mode="affine",
                dtype=dtype,
                m=37,
                n=n,
                k=128,
                bits=bits,
                group=group,
            )
    for kernel in ("qmm_t_nax", "qmm_n_nax"):
        yield Product(
            kernel=kernel, mode="affine", dtype=mx.bfloat16, m=19, n=64, k=64, batch=2
        )


def _floating() -> Iterator[Product]:
    """mxfp4, mxfp8 and nvfp4: weights become bfloat whatever x is."""
    for row, dtype in enumerate(DTYPES):
        for column, mode in enumerate(FP_MODES):
            turn = row + column
            yield Product(
                kernel="qmm_t_nax",
                mode=mode,
                dtype=dtype,
                m=(17, 65)[turn % 2],
                n=(100, 64)[turn % 2],
                k=192,
                bm=(32, 64)[turn % 2],
            )
    for mode in FP_MODES:
        yield Product(
            kernel="gather_qmm_t_nax", mode=mode, dtype=mx.float16, m=33, n=100, k=64
        )
    yield Product(
        kernel="qmm_t_nax", mode="mxfp4", dtype=mx.float16, m=33, n=64, k=64, batch=2
    )


def every_product() -> list[Product]:
    """Returns the products, without duplicates."""
    parts = (_transposed(), _rows(), _others(), _floating())
    return list(dict.fromkeys(product for part in parts for product in part))
