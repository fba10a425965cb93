"""What the emulator reports in MLX's kernels for tensor units.

A release of MLX that mends one fails its test here.
"""

from dataclasses import replace

import mlx.core as mx
import pytest

import metal_emulator
from peers import mlx_geometry, mlx_headers
from peers.foreign import reports
from peers.mlx_gathers import Gather, compute
from peers.mlx_products import Product
from peers.nax.nax_products import TOLERANCE

pytestmark = pytest.mark.peer

RAGGED = Product(kernel="qmm_t_nax", mode="affine", dtype=mx.float16, m=33, n=64, k=64)
"""Of the tile's rows the first two simdgroups compute 32, the others one."""

TAIL = Gather(
    mode="mxfp4",
    dtype=mx.float16,
    runs=(5, 17, 11),
    n=50,
    k=96,
    transposed=True,
    tile=(32, 64, 64, 2, 2),
    suffix="_nax",
)
"""Half of the last step of k is behind the row."""


def test_ragged_rows_take_simdgroups_to_different_copies_of_a_barrier(
    affine_nax_header: str,
) -> None:
    with reports("wait at different barriers"):
        mlx_geometry.error_of(RAGGED, affine_nax_header)
    assert mlx_geometry.error_of(RAGGED, affine_nax_header) <= TOLERANCE[mx.float16]


def test_gather_qmm_rhs_reads_weights_behind_the_last_row_and_makes_no_use_of_them(
    fp_nax_header: str,
) -> None:
    operands = TAIL.operands()
    with pytest.raises(metal_emulator.EmulatorError, match="read outside buffer 'w_"):
        compute(TAIL, operands, fp_nax_header)

    behind = {
        name: mx.concatenate([array, array[:1]], axis=0)
        for name, array in operands.weight.items()
    }
    y = compute(TAIL, replace(operands, weight=behind), fp_nax_header)
    assert operands.error(y) <= TOLERANCE[mx.float16]


def tile_product(columns: int) -> mx.array:
    """Returns `tile_matmad_nax` of ones, 32 rows and so many fragments of columns."""
    header = mlx_headers.flattened("steel/gemm/gemm_nax.h")
    source = f"""
    using namespace mlx::steel;
    NAXTile<half, 2, 1> a;
    NAXTile<half, 1, {columns}> b;
    NAXTile<float, 2, {columns}> c;
    for (short i = 0; i < a.kElemsPerTile; ++i) a.elems()[i] = 1;
    for (short i = 0; i < b.kElemsPerTile; ++i) b.elems()[i] = 1;
    c.clear();
    tile_matmad_nax(c, a, metal::false_type{{}}, b, metal::false_type{{}});
    c.store(y, {16 * columns});
    """
    (y,) = metal_emulator.metal_kernel("tile", [], ["y"], source, header)(
        inputs=[],
        output_shapes=[(32, 16 * columns)],
        output_dtypes=[mx.float32],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
    )
    return y


@pytest.mark.parametrize(("columns", "found"), [(2, 16), (3, 0)])
def test_odd_columns_of_fragments_are_not_multiplied_at_all(
    columns: int, found: int
) -> None:
    assert (tile_product(columns) == found).all().item()


def test_one_column_of_fragments_overruns_the_left_operand() -> None:
    message = r"a lane holds 8 elements of the left operand, the kernel uses element 8"
    with pytest.raises(metal_emulator.EmulatorError, match=message):
        tile_product(1)
