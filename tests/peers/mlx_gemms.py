"""Products of two dense matrices by MLX's steel GEMM."""

import math
import struct
from dataclasses import dataclass

import mlx.core as mx

from peers.foreign import Dispatch
from support.oracles import Floats, exact


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

    def expected(self, a: mx.array, b: mx.array) -> Floats:
        one = exact(a.T if self.transpose_a else a)
        return one @ exact(b.T if self.transpose_b else b)

    def dispatch(self, a: mx.array, b: mx.array, c: mx.array | None = None) -> Dispatch:
        """MLX's own call; with `c`, of 2 a @ b + 3 c."""
        bm, bn, bk, wm, wn = self.tile
        tiles = math.ceil(self.m / bm), math.ceil(self.n / bn)
        return Dispatch(
            kernel="gemm",
            template=(self.dtype, *self.tile, self.transpose_a, self.transpose_b),
            groups=(tiles[1], tiles[0], 1),
            threads=(32, wn, wm),
            inputs=self.inputs(a, b, c, tiles, self.k // bk),
            output="D",
            shape=(self.m, self.n),
            dtype=self.dtype,
            constants={"has_batch": False, **self.constants(c, (bm, bn, bk))},
        )

    def inputs(
        self,
        a: mx.array,
        b: mx.array,
        c: mx.array | None,
        tiles: tuple[int, int],
        k_iterations: int,
    ) -> dict[str, mx.array | int]:
        """Arrays and structures; tiles of m and n."""
        params = struct.pack(
            "<8i3q3i4x",
            *(self.m, self.n, self.k, a.shape[1], b.shape[1], self.n),
            *(tiles[1], tiles[0], a.size, b.size, self.m * self.n),
            *(0, k_iterations, 1),
        )
        inputs: dict[str, mx.array | int] = {"A": a, "B": b, "params": _bytes(params)}
        # Read even where it is not used: the epilogues are made in any case.
        inputs["addmm_params"] = _bytes(struct.pack("<2iq2f", self.n, 1, 0, 2, 3))
        return inputs if c is None else {**inputs, "C": c}

    def constants(
        self, c: mx.array | None, block: tuple[int, int, int]
    ) -> dict[str, bool]:
        """Function constants, for a block of m, n and k."""
        return {
            "use_out_source": c is not None,
            "do_axpby": c is not None,
            "align_M": self.m % block[0] == 0,
            "align_N": self.n % block[1] == 0,
            "align_K": self.k % block[2] == 0,
        }


def _bytes(value: bytes) -> mx.array:
    return mx.array(list(value), dtype=mx.uint8)
