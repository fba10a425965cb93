"""The answer: who computes which piece of a product, as a value of pure integers.

The result is cut into tiles of `tile.m` rows x `tile.n` columns, numbered down the
columns first (column-major), and k into `k_parallel` slices. A *unit* is one slice of
one tile; a threadgroup owns one contiguous run of units. For 3 x 3 tiles, no split of
k and 5 threadgroups with the `ceil` partition:

    tile (row, col)              threadgroup
    (0,0) (0,1) (0,2)              0  1  3
    (1,0) (1,1) (1,2)              0  2  3
    (2,0) (2,1) (2,2)              1  2  4

`shaders/` uses the same names for the same things.
"""

from dataclasses import dataclass
from math import lcm, prod
from typing import Literal

from mlx_marlin.formats import TILE_K, TILE_N
from mlx_marlin.problem import MOST_ELEMENTS, Problem
from mlx_marlin.work import Tile, Unit, run_balanced, run_ceil, tile_position

Kernel = Literal["gemv", "gemm_register"]
Strategy = Literal["data_parallel", "stripe"]
Partition = Literal["balanced", "ceil"]

KERNELS: tuple[Kernel, ...] = ("gemv", "gemm_register")
STRATEGIES: tuple[Strategy, ...] = ("data_parallel", "stripe")
PARTITIONS: tuple[Partition, ...] = ("balanced", "ceil")

FRAGMENT = 8
"""Rows and columns of a simdgroup matrix."""
SIMD_WIDTH = 32
"""Threads of a simdgroup."""
FRAGMENTS_M = (1, 2)
"""Row fragments of x a simdgroup may hold: with three, group sums spill registers."""
MAX_SIMDGROUPS = 8
"""256 threads, a size that leaves every kernel its registers."""
MOST_UNEVEN = 65535
"""Most threadgroups, or slices of k, that share work unevenly: the shaders cut in 32
bits, and the product of two remainders has to fit."""
THREADGROUP_LIMIT = 32768
"""Bytes of threadgroup memory that one threadgroup may have."""
PADDED_COLUMNS = TILE_N + 4
"""Columns of a float32 row of the epilogue's scratch: the 4 spread rows over banks."""
GEMV_ROWS = {"float16": 5, "bfloat16": 3, "float32": 3}
"""Most rows of `gemv`, by dtype: beyond, 4-byte values of x take too many registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one product is computed, down to every range of every threadgroup.

    Attributes:
        problem: The product.
        kernel: "gemv" (dot products, few rows) or "gemm_register" (8x8 matrices).
        tile: Rows, columns and k steps of a tile.
        fragments_m: 8-row fragments of x that one simdgroup holds; 0 for gemv.
        simdgroups_m: Simdgroups side by side along the rows.
        simdgroups_k: Simdgroups that share a unit's k and meet in threadgroup memory.
        strategy: "data_parallel" (one whole tile each) or "stripe" (runs of units).
        partition: How units become runs: "balanced", or "ceil" as in Marlin.
        k_parallel: Slices of k; more than one needs a workspace and a reduce.
        num_threadgroups: Threadgroups of the first dispatch.
        subtract: Subtract the codes' offset in the fragment: exact, a few more slots.
    """

    problem: Problem
    kernel: Kernel
    tile: Tile
    fragments_m: int
    simdgroups_m: int = 1
    simdgroups_k: int = 1
    strategy: Strategy = "stripe"
    partition: Partition = "balanced"
    k_parallel: int = 1
    num_threadgroups: int
    subtract: bool = False

    def __post_init__(self) -> None:
        self._check_names()
        if self.kernel == "gemv":
            self._check_gemv()
        else:
            self._check_gemm()
        self._check_threadgroup()
        self._check_split()

    def _check_names(self) -> None:
        for field, value, known in (
            ("kernel", self.kernel, KERNELS),
            ("strategy", self.strategy, STRATEGIES),
            ("partition", self.partition, PARTITIONS),
        ):
            if value not in known:
                raise ValueError(f"{field}={value!r} is not one of {known}")

    def _check_gemv(self) -> None:
        most = GEMV_ROWS[self.problem.dtype]
        if self.problem.m > most:
            raise ValueError(
                f"gemv takes at most {most} rows of {self.problem.dtype}, "
                f"got m={self.problem.m}"
            )
        if (self.fragments_m, self.simdgroups_m) != (0, 1):
            raise ValueError(
                "gemv has fragments_m=0 and simdgroups_m=1, got "
                f"fragments_m={self.fragments_m}, simdgroups_m={self.simdgroups_m}"
            )
        if self.tile.m != self.problem.m:
            raise ValueError(
                f"a gemv tile has all m={self.problem.m} rows, got tile.m={self.tile.m}"
            )

    def _check_gemm(self) -> None:
        if self.fragments_m not in FRAGMENTS_M:
            raise ValueError(
                f"fragments_m={self.fragments_m} is not one of {FRAGMENTS_M}"
            )
        rows = FRAGMENT * self.fragments_m * self.simdgroups_m
        if self.tile.m != rows:
            raise ValueError(
                f"fragments_m={self.fragments_m} and simdgroups_m={self.simdgroups_m} "
                f"make tiles of {rows} rows, got tile.m={self.tile.m}"
            )

    def _check_threadgroup(self) -> None:
        if (self.tile.n, self.tile.k) != (TILE_N, TILE_K):
            raise ValueError(
                f"tile.n and tile.k are {TILE_N} and {TILE_K}, "
                f"got {self.tile.n} and {self.tile.k}"
            )
        if self.simdgroups_m < 1 or self.simdgroups_k < 1:
            raise ValueError(
                f"simdgroups_m={self.simdgroups_m} and simdgroups_k="
                f"{self.simdgroups_k} must be at least 1"
            )
        if self.simdgroups_m * self.simdgroups_k > MAX_SIMDGROUPS:
            raise ValueError(
                f"simdgroups_m={self.simdgroups_m} x simdgroups_k={self.simdgroups_k} "
                f"is more than {MAX_SIMDGROUPS} simdgroups in a threadgroup"
            )
        if self.threadgroup_bytes > THREADGROUP_LIMIT:
            raise ValueError(
                f"{self.threadgroup_bytes} bytes of threadgroup memory are more than "
                f"{THREADGROUP_LIMIT}"
            )

    def _check_split(self) -> None:
        if not 1 <= self.k_parallel <= self.cuts:
            raise ValueError(
                f"k_parallel={self.k_parallel} is not between 1 and {self.cuts}, the "
                f"pieces of {self.cut} in k={self.problem.k}"
            )
        if prod(self.workspace_shape) >= MOST_ELEMENTS:
            raise ValueError(
                f"k_parallel={self.k_parallel} makes a workspace of "
                f"{self.workspace_shape}, expected fewer than {MOST_ELEMENTS} elements"
            )
        for field, parts, whole in (
            ("num_threadgroups", self.num_threadgroups, self.units),
            ("k_parallel", self.k_parallel, self.cuts),
        ):
            if parts > MOST_UNEVEN and whole % parts:
                raise ValueError(
                    f"{field}={parts} does not divide {whole}, expected that or at "
                    f"most {MOST_UNEVEN}"
                )
        if self.num_threadgroups < 1:
            raise ValueError(
                f"num_threadgroups={self.num_threadgroups} must be at least 1"
            )
        whole = self.k_parallel == 1 and self.num_threadgroups == self.units
        if self.strategy == "data_parallel" and not whole:
            raise ValueError(
                f"data_parallel gives each of {self.m_tiles * self.n_tiles} tiles one "
                f"threadgroup and does not split k, got num_threadgroups="
                f"{self.num_threadgroups}, k_parallel={self.k_parallel}"
            )

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return SIMD_WIDTH * self.simdgroups_m * self.simdgroups_k

    @property
    def m_tiles(self) -> int:
        """Tiles down the rows."""
        return -(-self.problem.m // self.tile.m)

    @property
    def n_tiles(self) -> int:
        """Tiles across the columns."""
        return -(-self.problem.n // self.tile.n)

    @property
    def k_tiles(self) -> int:
        """Trips along the whole k."""
        return -(-self.problem.k // self.tile.k)

    @property
    def cut(self) -> int:
        """Weights along k between two places where k may be cut."""
        return lcm(self.tile.k, self.problem.group_size)

    @property
    def cuts(self) -> int:
        """Pieces of `cut` weights in k, the last one possibly short."""
        return -(-self.problem.k // self.cut)

    @property
    def units(self) -> int:
        """Pieces of work: slices of k of all tiles."""
        return self.m_tiles * self.n_tiles * self.k_parallel

    @property
    def is_split(self) -> bool:
        """Whether partial sums go through the workspace."""
        return self.k_parallel > 1

    @property
    def dispatches(self) -> int:
        """Kernel launches: 2 when a reduce follows, else 1."""
        return 2 if self.is_split else 1

    @property
    def workspace_shape(self) -> tuple[int, int, int]:
        """Shape of the float32 partial sums: (k_parallel, m, n)."""
        return self.k_parallel, self.problem.m, self.problem.n

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the partial sums; 0 when nothing is split."""
        slices, m, n = self.workspace_shape
        return slices * m * n * 4 if self.is_split else 0

    @property
    def threadgroup_bytes(self) -> int:
        """Bytes of threadgroup memory: the epilogue's scratch, float32."""
        return self.simdgroups_k * self.tile.m * PADDED_COLUMNS * 4

    @property
    def units_per_threadgroup(self) -> tuple[int, int]:
        """Fewest and most units of a threadgroup that has any."""
        if self.partition == "ceil":
            most = -(-self.units // self.num_threadgroups)
            return (self.units - 1) % most + 1, most
        fewest, rest = divmod(self.units, self.num_threadgroups)
        return max(fewest, 1), fewest + (rest > 0)

    @property
    def idle(self) -> int:
        """Threadgroups without a unit."""
        if self.partition == "ceil":
            _, most = self.units_per_threadgroup
            return self.num_threadgroups - -(-self.units // most)
        return max(self.num_threadgroups - self.units, 0)

    def range(self, threadgroup: int) -> tuple[int, int]:
        """Returns the units [begin, end) that a threadgroup owns."""
        run = run_balanced if self.partition == "balanced" else run_ceil
        return run(self.units, self.num_threadgroups, threadgroup)

    def owner(self, unit: int) -> int:
        """Returns the threadgroup that owns a unit: the inverse of `range`."""
        if self.partition == "ceil":
            return unit // -(-self.units // self.num_threadgroups)
        return ((unit + 1) * self.num_threadgroups - 1) // self.units

    def unit(self, index: int) -> Unit:
        """Returns the place of a unit: its tile and its slice of k."""
        tile, split = divmod(index, self.k_parallel)
        tile_row, tile_col = tile_position(tile, self.m_tiles)
        first, stop = run_balanced(self.cuts, self.k_parallel, split)
        return Unit(
            tile_row=tile_row,
            tile_col=tile_col,
            split=split,
            k_start=first * self.cut,
            k_stop=min(stop * self.cut, self.problem.k),
        )

    def explain(self) -> str:
        """Says in a line what will run; every figure is counted, none predicted."""
        fewest, most = self.units_per_threadgroup
        each = f"{most}" if fewest == most else f"{fewest}-{most}"
        noun = "unit" if most == 1 else "units"
        parts = [
            f"{self.kernel} {self.tile}",
            f"{self.simdgroups_m}x{self.simdgroups_k} simdgroups (m x k)",
            f"{self.m_tiles * self.n_tiles} tiles",
            f"{self.k_parallel} slices of k" if self.is_split else "k whole",
            f"{self.strategy} over {self.num_threadgroups} threadgroups "
            f"({self.partition}, {each} {noun} each, {self.idle} idle)",
        ]
        if self.is_split:
            parts.append(f"workspace {self.workspace_bytes / 1024:.0f} KB")
        return ", ".join(parts)
