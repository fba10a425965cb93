"""MLX's dense GEMM kernels for tensor units, unmodified, on the emulator."""

import math

import mlx.core as mx
import numpy as np
import pytest

import metal_emulator
from peers.foreign import Dispatch, reports
from peers.mlx_gemms import Gemm
from peers.mlx_products import Record, error
from peers.nax.nax_products import DTYPES, TOLERANCE

pytestmark = pytest.mark.peer

TILE = (64, 64, 256, 2, 2)
"""BM, BN, BK, WM, WN: the smallest that MLX ships."""
SHAPES = {"aligned": (64, 128, 256), "ragged": (70, 50, 293)}


@pytest.mark.parametrize(
    ("transposed", "shape", "dtype"),
    [
        (transposed, shape, DTYPES[(row + column) % 3])
        for row, transposed in enumerate(("nn", "nt", "tn", "tt"))
        for column, shape in enumerate(SHAPES)
    ],
)
def test_fused_gemm_computes_the_product(
    transposed: str, shape: str, dtype: mx.Dtype, gemm_nax_header: str, record: Record
) -> None:
    a_flag, b_flag = (letter == "t" for letter in transposed)
    gemm = Gemm(TILE, dtype, *SHAPES[shape], a_flag, b_flag)
    a, b = gemm.operands()
    worst = error(gemm.dispatch(a, b).run(gemm_nax_header), gemm.expected(a, b))
    record(f"gemm nax {transposed}", dtype, worst)
    assert worst <= TOLERANCE[dtype]


def test_fused_gemm_adds_a_scaled_matrix(gemm_nax_header: str) -> None:
    gemm = Gemm(TILE, mx.float16, *SHAPES["ragged"], transpose_b=True)
    a, b = gemm.operands()
    c = mx.random.normal((gemm.m, gemm.n)).astype(mx.float16)
    y = gemm.dispatch(a, b, c).run(gemm_nax_header)
    expected = 2 * gemm.expected(a, b) + 3 * np.array(c)
    assert error(y, expected) <= TOLERANCE[mx.float16]


def thin(gemm: Gemm, splits: int, c: mx.array | None = None) -> Dispatch:
    """MLX's call of the kernel for few columns, whose simdgroups share k."""
    a, b = gemm.operands()
    rows = 1 if splits == 4 else 2
    tiles = math.ceil(gemm.m / (32 * rows)), math.ceil(gemm.n / 32)
    steps = math.ceil(gemm.k / (64 * splits))
    return Dispatch(
        kernel="gemm_thin_nax",
        template=(gemm.dtype, 2, 2, rows, 1, splits, gemm.transpose_b),
        groups=(math.prod(tiles), 1, 1),
        threads=(32 * rows * splits, 1, 1),
        inputs=gemm.inputs(a, b, c, tiles, steps),
        output="D",
        shape=(gemm.m, gemm.n),
        dtype=gemm.dtype,
        constants=gemm.constants(c, (32 * rows, 32, 64)),
    )


THIN = {
    "aligned": (64, 32, 256),
    "edges move inside": (70, 50, 200),
    "smaller than a block": (20, 9, 77),
}
THIN_CASES = [
    (name, splits, "nt"[row % 2], (mx.float16, mx.bfloat16)[(row + column) % 2])
    for row, name in enumerate(THIN)
    for column, splits in enumerate((4, 2))
]
THIN_CASES += [("edges move inside", 4, "t", mx.bfloat16)]


@pytest.mark.parametrize(("name", "splits", "letter", "dtype"), THIN_CASES)
def test_thin_gemm_computes_the_product(
    name: str,
    splits: int,
    letter: str,
    dtype: mx.Dtype,
    thin_header: str,
    record: Record,
) -> None:
    gemm = Gemm(TILE, dtype, *THIN[name], transpose_b=letter == "t")
    worst = error(thin(gemm, splits).run(thin_header), gemm.expected(*gemm.operands()))
    record(f"gemm thin n{letter}", dtype, worst)
    assert worst <= TOLERANCE[dtype]


def test_thin_gemm_adds_a_scaled_matrix(thin_header: str) -> None:
    gemm = Gemm(TILE, mx.float16, 70, 50, 200, transpose_b=True)
    c = mx.random.normal((gemm.m, gemm.n)).astype(mx.float16)
    y = thin(gemm, 4, c).run(thin_header)
    expected = 2 * gemm.expected(*gemm.operands()) + 3 * np.array(c)
    assert error(y, expected) <= TOLERANCE[mx.float16]


@pytest.mark.parametrize("name", ["aligned", "smaller than a block"])
def test_traced_thin_gemm_reports_nothing(name: str, thin_header: str) -> None:
    gemm = Gemm(TILE, mx.float16, *THIN[name], transpose_b=True)
    with metal_emulator.emulated(trace=True):
        y = thin(gemm, 4).run(thin_header)
    assert error(y, gemm.expected(*gemm.operands())) <= TOLERANCE[mx.float16]


def test_thin_gemm_writes_an_overlap_twice(thin_header: str) -> None:
    gemm = Gemm(TILE, mx.float16, 70, 32, 64, transpose_b=True)
    with reports("race between threadgroups"):
        thin(gemm, 4).run(thin_header)


def test_traced_fused_gemm_reports_nothing(gemm_nax_header: str) -> None:
    gemm = Gemm(TILE, mx.float16, 64, 64, 128, transpose_a=True)
    a, b = gemm.operands()
    with metal_emulator.emulated(trace=True):
        y = gemm.dispatch(a, b).run(gemm_nax_header)
    assert error(y, gemm.expected(a, b)) <= TOLERANCE[mx.float16]
