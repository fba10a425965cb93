"""MLX's steel GEMM, unmodified, on the emulator."""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin import emulator
from peers.foreign import Dispatch

pytestmark = pytest.mark.peer

TOLERANCE = {mx.float32: 3e-6, mx.float16: 1e-3, mx.bfloat16: 4e-3}
"""Of the largest element: one rounding of the result, and float32 sums."""

TILES = {"64x64x16": (64, 64, 16, 2, 2), "32x64x16": (32, 64, 16, 1, 2)}
"""BM, BN, BK, WM, WN: two of those that MLX ships."""


@dataclass(frozen=True)
class Gemm:
    """a [m, k] @ b [k, n], either stored transposed, through one of MLX's tiles."""

    tile: tuple[int, int, int, int, int]
    dtype: mx.Dtype
    m: int
    n: int
    k: int
    transpose_a: bool = False
    transpose_b: bool = False

    def operands(self) -> tuple[mx.array, mx.array]:
        mx.random.seed(self.m + self.n + self.k)
        a = mx.random.normal((self.k, self.m) if self.transpose_a else (self.m, self.k))
        b = mx.random.normal((self.n, self.k) if self.transpose_b else (self.k, self.n))
        return a.astype(self.dtype), b.astype(self.dtype)

    def expected(self, a: mx.array, b: mx.array) -> np.ndarray:
        one, other = (np.array(v.astype(mx.float32)).astype(np.float64) for v in (a, b))
        return (one.T if self.transpose_a else one) @ (
            other.T if self.transpose_b else other
        )

    def dispatch(self, a: mx.array, b: mx.array, c: mx.array | None = None) -> Dispatch:
        """MLX's own call; with `c`, of 2 a @ b + 3 c."""
        bm, bn, bk, wm, wn = self.tile
        tiles_m, tiles_n = math.ceil(self.m / bm), math.ceil(self.n / bn)
        params = struct.pack(
            "<8i3q3i4x",
            *(self.m, self.n, self.k, a.shape[1], b.shape[1], self.n),
            *(tiles_n, tiles_m, a.size, b.size, self.m * self.n),
            *(0, self.k // bk, 1),
        )
        inputs = {"A": a, "B": b, "params": _bytes(params)}
        # Read even where it is not used: the epilogues are made in any case.
        inputs["addmm_params"] = _bytes(struct.pack("<2iq2f", self.n, 1, 0, 2, 3))
        return Dispatch(
            kernel="gemm",
            template=(self.dtype, *self.tile, self.transpose_a, self.transpose_b),
            groups=(tiles_n, tiles_m, 1),
            threads=(32, wn, wm),
            inputs=inputs if c is None else {**inputs, "C": c},
            output="D",
            shape=(self.m, self.n),
            dtype=self.dtype,
            constants={
                "has_batch": False,
                "use_out_source": c is not None,
                "do_axpby": c is not None,
                "align_M": self.m % bm == 0,
                "align_N": self.n % bn == 0,
                "align_K": self.k % bk == 0,
            },
        )


def _bytes(value: bytes) -> mx.array:
    return mx.array(list(value), dtype=mx.uint8)


def error(actual: mx.array, expected: np.ndarray) -> float:
    got = np.array(actual.astype(mx.float32))
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda d: str(d).split(".")[-1])
@pytest.mark.parametrize("shape", [(64, 128, 96), (70, 50, 37)], ids=str)
@pytest.mark.parametrize("transposed", ["nn", "nt", "tn"])
@pytest.mark.parametrize("tile", list(TILES))
def test_steel_gemm_computes_the_product(
    tile: str,
    transposed: str,
    shape: tuple[int, int, int],
    dtype: mx.Dtype,
    gemm_header: str,
    record_property: Callable[[str, object], None],
) -> None:
    a_flag, b_flag = (letter == "t" for letter in transposed)
    gemm = Gemm(TILES[tile], dtype, *shape, a_flag, b_flag)
    a, b = gemm.operands()
    y = gemm.dispatch(a, b).run(gemm_header)
    worst = error(y, gemm.expected(a, b))
    record_property("kernel", f"steel gemm {transposed}")
    record_property("dtype", str(dtype).split(".")[-1])
    record_property("error", worst)
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
    with pytest.raises(emulator.EmulatorError, match="read outside buffer 'C_"):
        scaled(RAGGED, 0, gemm_header)


def test_steel_gemm_makes_no_use_of_them(gemm_header: str) -> None:
    assert scaled(RAGGED, 128 - RAGGED.m, gemm_header) <= TOLERANCE[mx.float32]
