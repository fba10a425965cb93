"""MLX's quantized kernels for tensor units, unmodified, on the emulator."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

import metal_emulator
from peers import mlx_geometry
from peers.mlx_gathers import RUNS, Gather, error_of
from peers.mlx_products import FORMATS, Operands, Product, Record
from peers.nax.nax_products import DTYPES, TOLERANCE, every_product

pytestmark = pytest.mark.peer

HeaderOf = Callable[[str], str]
RHS_TILE = (64, 64, 64, 2, 2)
"""BM, BN, BK, WM, WN of `gather_qmm_rhs_nax`, as MLX launches it; BM may be 32."""


@pytest.mark.parametrize("product", every_product(), ids=str)
def test_kernel_computes_the_product(
    product: Product, header_of: HeaderOf, record: Record
) -> None:
    error = mlx_geometry.error_of(product, header_of(f"{product.family}_nax"))
    record(f"{product.mode} {product.kernel}", product.dtype, error)
    assert error <= TOLERANCE[product.dtype]


GATHERS = [
    Gather(
        mode=mode,
        dtype=DTYPES[(row + column) % 3],
        runs=RUNS[runs],
        n=64 if runs == "aligned" else (50 if transposed else 128),
        k=128,
        transposed=transposed,
        tile=((32, 64)[column % 2], *RHS_TILE[1:]),
        suffix="_nax",
    )
    for row, mode in enumerate(FORMATS)
    for column, (runs, transposed) in enumerate(
        (runs, transposed) for runs in RUNS for transposed in (True, False)
    )
]


def name_of(gather: Gather) -> str:
    """Returns the name of a case."""
    letters = "nt" if gather.transposed else "nn"
    return f"{gather.mode}-{letters}-{gather.dtype}-{gather.m}-bm{gather.tile[0]}"


@pytest.mark.parametrize("gather", GATHERS, ids=name_of)
def test_runs_of_rows_meet_their_weights(
    gather: Gather, header_of: HeaderOf, record: Record
) -> None:
    error = error_of(gather, header_of(f"{gather.family}_nax"))
    letters = "nt" if gather.transposed else "nn"
    record(f"{gather.mode} gather_qmm_rhs_nax {letters}", gather.dtype, error)
    assert error <= TOLERANCE[gather.dtype]


TRACED = [
    Product(kernel="qmm_t_nax", mode="affine", dtype=mx.float16, m=20, n=100, k=128),
    Product(kernel="qmm_n_nax", mode="affine", dtype=mx.bfloat16, m=37, n=128, k=64),
    Product(kernel="gather_qmm_t_nax", mode="mxfp8", dtype=mx.float32, m=9, n=64, k=64),
    Product(kernel="qmm_t_nax", mode="nvfp4", dtype=mx.float16, m=17, n=100, k=64),
]


@pytest.mark.parametrize("product", TRACED, ids=str)
def test_traced_it_reports_nothing(product: Product, header_of: HeaderOf) -> None:
    with metal_emulator.emulated(trace=True):
        error = mlx_geometry.error_of(product, header_of(f"{product.family}_nax"))
    assert error <= TOLERANCE[product.dtype]


def test_counted_operations_are_those_of_the_tiles(affine_nax_header: str) -> None:
    product = TRACED[0]

    (counters,) = metal_emulator.trace(
        mlx_geometry.error_of, product, affine_nax_header
    )

    simdgroups, tiles = 4, 2
    each = 2 * product.k // 16  # 16x32x16, for 32x32 outputs
    assert counters.count("tensor") == tiles * simdgroups * each


@pytest.mark.parametrize("layout", ["g16", "scrambled"])
def test_mlx_needs_the_layout_of_an_m5(layout: str, affine_nax_header: str) -> None:
    with metal_emulator.emulated(tensor_layout=layout):
        assert mlx_geometry.error_of(TRACED[0], affine_nax_header) > 0.1


def test_the_order_of_threadgroups_does_not_matter(affine_nax_header: str) -> None:
    product = Product(
        kernel="gather_qmm_t_nax", mode="affine", dtype=mx.float16, m=35, n=70, k=192
    )
    operands = Operands.of(product)
    results = []
    for seed, workers in ((0, 1), (7, 2)):
        with metal_emulator.emulated(seed=seed, workers=workers):
            y = mlx_geometry.compute(product, operands, affine_nax_header)
            results.append(np.array(y))
    np.testing.assert_array_equal(*results)
