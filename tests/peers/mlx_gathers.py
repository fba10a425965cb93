"""Gathered products of sorted rows: a run of rows for each weight."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from peers import mlx_headers
from peers.foreign import Dispatch
from peers.mlx_products import FORMATS

TILE = (16, 32, 32, 1, 2)
"""BM, BN, BK, WM, WN: the tile that MLX takes without tensor units."""
RUNS = {"aligned": (16, 0, 32, 16), "ragged": (5, 17, 0, 1, 0, 33)}
"""Rows of x that belong to each weight."""


@dataclass(frozen=True)
class Gather:
    """x [sum(runs), k], each run of rows by a quantized weight of its own.

    Attributes:
        tile: BM, BN, BK, WM and WN of the kernel.
        suffix: End of the kernel's name: "" or "_nax".
    """

    mode: str
    dtype: mx.Dtype
    runs: Sequence[int]
    n: int
    k: int
    transposed: bool
    tile: tuple[int, int, int, int, int] = TILE
    suffix: str = ""

    @property
    def m(self) -> int:
        return sum(self.runs)

    @property
    def family(self) -> str:
        return "affine" if self.mode == "affine" else "fp"

    def x(self) -> mx.array:
        mx.random.seed(self.m + self.n)
        return mx.random.normal((self.m, self.k)).astype(self.dtype)

    def weight(self) -> dict[str, mx.array]:
        mx.random.seed(self.k)
        shape = (self.n, self.k) if self.transposed else (self.k, self.n)
        w = mx.random.normal((len(self.runs), *shape)).astype(self.dtype)
        group, bits = FORMATS[self.mode]
        parts = mx.quantize(w, group_size=group, bits=bits, mode=self.mode)
        return dict(zip(("w", "scales", "biases"), parts, strict=False))

    def expected(self, x: mx.array, weight: dict[str, mx.array]) -> np.ndarray:
        group, bits = FORMATS[self.mode]
        parts = [
            p.astype(mx.float32) if p.dtype == x.dtype else p for p in weight.values()
        ]
        dense = mx.dequantize(
            *parts, group_size=group, bits=bits, mode=self.mode, dtype=mx.float32
        )
        rows = np.array(x.astype(mx.float32)).astype(np.float64)
        owner = np.repeat(np.arange(len(self.runs)), self.runs)
        each = np.array(dense).astype(np.float64)[owner]
        return np.einsum("mk,mnk->mn" if self.transposed else "mk,mkn->mn", rows, each)

    def error(self, y: mx.array, x: mx.array, weight: dict[str, mx.array]) -> float:
        expected = self.expected(x, weight)
        got = np.array(y.astype(mx.float32))
        return float(np.abs(got - expected).max() / np.abs(expected).max())

    def dispatch(self, x: mx.array, weight: dict[str, mx.array]) -> Dispatch:
        """MLX's own call: enough tiles of rows for every run to end in the middle."""
        bm, bn, bk, wm, wn = self.tile
        starts = [0, *itertools.accumulate(self.runs)][:-1]
        tiles_m = math.ceil(self.m / bm) + len(self.runs)
        sizes = {"M": self.m, "N": self.n, "K": self.k, "num_groups": len(self.runs)}
        return Dispatch(
            kernel=f"{self.family}_gather_qmm_rhs{self.suffix}",
            template=(
                self.dtype,
                *FORMATS[self.mode],
                *self.tile,
                self.transposed,
            ),
            groups=(math.ceil(self.n / bn), tiles_m, 1),
            threads=(32, wn, wm),
            inputs={"x": x, **weight, "offsets": mx.array(starts, mx.int32), **sizes},
            output="y",
            shape=(self.m, self.n),
            dtype=self.dtype,
            constants={
                "align_M": self.m % bm == 0,
                "align_N": self.n % bn == 0,
                "align_K": self.k % bk == 0,
            },
        )


def compute(
    gather: Gather, x: mx.array, weight: dict[str, mx.array], header: str
) -> mx.array:
    """The product by MLX's kernel."""
    headers = mlx_headers.downloaded()
    schedule = mlx_headers.function(headers, "utils.h", "schedule_row_tile")
    return gather.dispatch(x, weight).run(schedule + header)


def error_of(gather: Gather, header: str) -> float:
    """Of the kernel's result, relative to its largest element."""
    x, weight = gather.x(), gather.weight()
    return gather.error(compute(gather, x, weight, header), x, weight)
