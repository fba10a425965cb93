"""Gathered products of sorted rows: a run of rows for each weight."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from peers import mlx_headers
from peers.foreign import Dispatch
from peers.mlx_products import FORMATS, Operands, quantized
from support.oracles import exact

TILE = (16, 32, 32, 1, 2)
"""BM, BN, BK, WM, WN: the tile that MLX takes without tensor units."""
RUNS = {"aligned": (16, 0, 32, 16), "ragged": (5, 17, 0, 1, 0, 33)}
"""Rows of x that belong to each weight."""


@dataclass(frozen=True)
class Gather:
    """x [sum(runs), k], each run of rows by a quantized weight of its own."""

    mode: str
    dtype: mx.Dtype
    runs: Sequence[int]
    n: int
    k: int
    transposed: bool
    tile: tuple[int, int, int, int, int] = TILE  # BM, BN, BK, WM and WN of the kernel
    suffix: str = ""  # End of the kernel's name: "" or "_nax"

    @property
    def m(self) -> int:
        return sum(self.runs)

    @property
    def family(self) -> str:
        return "affine" if self.mode == "affine" else "fp"

    def operands(self) -> Operands:
        mx.random.seed(self.m + self.n)
        x = mx.random.normal((self.m, self.k)).astype(self.dtype)
        mx.random.seed(self.k)
        shape = (self.n, self.k) if self.transposed else (self.k, self.n)
        w = mx.random.normal((len(self.runs), *shape)).astype(self.dtype)
        weight, dense = quantized(w, self.mode, *FORMATS[self.mode])
        each = dense[np.repeat(np.arange(len(self.runs)), self.runs)]
        letters = "mk,mnk->mn" if self.transposed else "mk,mkn->mn"
        return Operands(x, weight, np.einsum(letters, exact(x), each))

    def dispatch(self, operands: Operands) -> Dispatch:
        """MLX's own call: enough tiles of rows for every run to end in the middle."""
        bm, bn, bk, wm, wn = self.tile
        starts = [0, *itertools.accumulate(self.runs)][:-1]
        tiles_m = math.ceil(self.m / bm) + len(self.runs)
        sizes = {"M": self.m, "N": self.n, "K": self.k, "num_groups": len(self.runs)}
        return Dispatch(
            kernel=f"{self.family}_gather_qmm_rhs{self.suffix}",
            template=(self.dtype, *FORMATS[self.mode], *self.tile, self.transposed),
            groups=(math.ceil(self.n / bn), tiles_m, 1),
            threads=(32, wn, wm),
            inputs={
                **{"x": operands.x, **operands.weight, **sizes},
                "offsets": mx.array(starts, mx.int32),
            },
            output="y",
            shape=(self.m, self.n),
            dtype=self.dtype,
            constants={
                "align_M": self.m % bm == 0,
                "align_N": self.n % bn == 0,
                "align_K": self.k % bk == 0,
            },
        )


def compute(gather: Gather, operands: Operands, header: str) -> mx.array:
    """The product by MLX's kernel."""
    folder = mlx_headers.downloaded()
    schedule = mlx_headers.function(folder, "utils.h", "schedule_row_tile")
    return gather.dispatch(operands).run(schedule + header)


def error_of(gather: Gather, header: str) -> float:
    """Of the kernel's result, relative to its largest element."""
    operands = gather.operands()
    return operands.error(compute(gather, operands, header))
