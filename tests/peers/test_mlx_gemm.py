"""MLX's steel GEMM, unmodified, on the emulator."""

import mlx.core as mx
import numpy as np
import pytest

import metal_emulator
from peers.mlx_gemms import Gemm
from peers.mlx_products import Record, error

pytestmark = pytest.mark.peer

TOLERANCE = {mx.float32: 3e-6, mx.float16: 1e-3, mx.bfloat16: 4e-3}
"""Of the largest element: one rounding of the result, and float32 sums."""

TILES = {"64x64x16": (64, 64, 16, 2, 2), "32x64x16": (32, 64, 16, 1, 2)}
"""BM, BN, BK, WM, WN: two of those that MLX ships."""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(64, 128, 96), (70, 50, 37)], ids=str)
@pytest.mark.parametrize("transposed", ["nn", "nt", "tn"])
@pytest.mark.parametrize("tile", list(TILES))
def test_steel_gemm_computes_the_product(
    tile: str,
    transposed: str,
    shape: tuple[int, int, int],
    dtype: mx.Dtype,
    gemm_header: str,
    record: Record,
) -> None:
    a_flag, b_flag = (letter == "t" for letter in transposed)
    gemm = Gemm(TILES[tile], dtype, *shape, a_flag, b_flag)
    a, b = gemm.operands()
    y = gemm.dispatch(a, b).run(gemm_header)
    worst = error(y, gemm.expected(a, b))
    record(f"steel gemm {transposed}", dtype, worst)
    assert worst <= TOLERANCE[dtype]


RAGGED = Gemm(TILES["64x64x16"], mx.float32, 70, 50, 37, transpose_b=True)


def scaled(gemm: Gemm, rows: int, header: str) -> float:
    """Error of 2 a @ b + 3 c, where c has so many more rows than the result, of NaN."""
    a, b = gemm.operands()
    c = mx.random.normal((gemm.m, gemm.n))
    behind = mx.full((rows, gemm.n), float("nan"))
    y = gemm.dispatch(a, b, mx.concatenate([c, behind])).run(header)
    return error(y, 2 * gemm.expected(a, b) + 3 * np.array(c))


def test_steel_gemm_adds_a_scaled_matrix(gemm_header: str) -> None:
    aligned = Gemm(TILES["64x64x16"], mx.float32, 64, 128, 96, transpose_b=True)
    assert scaled(aligned, 0, gemm_header) <= TOLERANCE[mx.float32]


def test_steel_gemm_reads_rows_of_the_added_matrix_that_do_not_exist(
    gemm_header: str,
) -> None:
    with pytest.raises(metal_emulator.EmulatorError, match="read outside buffer 'C_"):
        scaled(RAGGED, 0, gemm_header)


def test_steel_gemm_makes_no_use_of_them(gemm_header: str) -> None:
    assert scaled(RAGGED, 128 - RAGGED.m, gemm_header) <= TOLERANCE[mx.float32]
