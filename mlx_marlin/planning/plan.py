"""The answer: who computes which piece of a product, as a value of pure integers.

The result is cut into tiles of `tile.m` rows x `tile.n` columns, numbered down the
columns first (column-major), and k into k tiles; `work` says which threadgroup has
which k tiles of which tile. For 3 x 3 tiles in runs of `ceil` on 5 threadgroups:

    tile (row, col)              threadgroup
    (0,0) (0,1) (0,2)              0  1  3
    (1,0) (1,1) (1,2)              0  2  3
    (2,0) (2,1) (2,2)              1  2  4

Of a batch of products, the columns of tiles of each follow those of the one before.
`shaders/` uses the same names for the same things.
"""

from dataclasses import dataclass
from math import prod

from mlx_marlin.backends.cuda import mma, pipelined
from mlx_marlin.backends.metal.limits import (
    FRAGMENT,
    OF_CUDA,
    PADDED_COLUMNS,
    SIMD_WIDTH,
    Kernel,
    Reduction,
    step_k,
)
from mlx_marlin.backends.metal.staging import buffer_bytes
from mlx_marlin.planning import validity
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work import Split, Tile, Work, tile_position


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one product is computed, down to every range of every threadgroup.

    Attributes:
        problem: The product.
        kernel: "gemv" (dot products, few rows), "gemm_register" (8x8 matrices),
            "gemm_staged" (8x8 matrices out of threadgroup memory) or, on CUDA, "mma"
            (16x8x16 matrices), "mma_staged" (likewise, x out of shared memory) or
            "wgmma" (64x16 by 16x64, x out of shared memory).
        tile: Rows, columns and k of a tile.
        fragments_m: 8-row fragments of x that one simdgroup holds; 0 for gemv.
        simdgroups_m: Simdgroups side by side along the rows.
        simdgroups_n: Tiles side by side in a wide tile of `hytis`, else 1: there so
            many of the simdgroups along k stand along n instead. In `mma` every tile
            is so many packed tiles wide, each with all simdgroups along k.
        simdgroups_k: Simdgroups that share a tile's k and meet in threadgroup memory.
        work: Who computes what.
        reduction: How splits of a tile meet: "none" where there are none, "workspace"
            (the same bits every time) or "atomic" (in whatever order they come).
        subtract: Subtract the codes' offset in the fragment: exact, a few more slots.
        buffers: Stages that threadgroup memory holds in `gemm_staged` and, of x alone,
            in `mma_staged` and `wgmma`, else 0.
        loaders: Simdgroups there that only load, in `gemm_staged` also decode, while
            the others only multiply; with 0 all do both.
    """

    problem: Problem
    kernel: Kernel
    tile: Tile
    fragments_m: int
    simdgroups_m: int = 1
    simdgroups_n: int = 1
    simdgroups_k: int = 1
    work: Work
    reduction: Reduction = "none"
    subtract: bool = False
    buffers: int = 0
    loaders: int = 0

    def __post_init__(self) -> None:
        validity.check(self)

    @property
    def on_cuda(self) -> bool:
        """Whether the kernel is one of CUDA's."""
        return self.kernel in OF_CUDA

    @property
    def has_staged_x(self) -> bool:
        """Whether warps of their own fill stages of x, and of nothing else."""
        return self.kernel in pipelined.KERNELS

    @property
    def strategy(self) -> str:
        """How the work is cut."""
        return self.work.strategy

    @property
    def variant(self) -> str:
        """The kernel with the simdgroups of a threadgroup: rows x columns x k."""
        rows = self.fragments_m * FRAGMENT or self.tile.m
        groups = f"{self.simdgroups_m}x{self.simdgroups_n}x{self.simdgroups_k}"
        return f"{self.kernel} {rows} rows, {groups} simdgroups{self._staging()}"

    @property
    def num_threadgroups(self) -> int:
        """Threadgroups of the first dispatch."""
        return self.work.threadgroups

    @property
    def simdgroups(self) -> int:
        """Simdgroups of a threadgroup."""
        if self.kernel == "mma":
            return self.simdgroups_n * self.simdgroups_k
        if self.has_staged_x:
            return pipelined.simdgroups(
                self.kernel, self.simdgroups_n, self.simdgroups_k
            )
        return self.simdgroups_m * self.simdgroups_k + self.loaders

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return SIMD_WIDTH * self.simdgroups

    @property
    def m_tiles(self) -> int:
        """Tiles down the rows."""
        return -(-self.problem.m // self.tile.m)

    @property
    def n_tiles(self) -> int:
        """Tiles across the columns of a product; a wide one counts once."""
        if not self.has_wide_tiles:
            return -(-self.problem.n // self.tile.n)
        rest = self.problem.n - self.wide_columns * self.wide_n
        return self.wide_columns + -(-rest // self.tile.n)

    @property
    def k_tiles(self) -> int:
        """K tiles of a tile."""
        return -(-self.problem.k // self.tile.k)

    @property
    def has_wide_tiles(self) -> bool:
        """Whether tiles of `wide_n` columns come before narrower ones."""
        return self.work.strategy == "hytis"

    @property
    def wide_n(self) -> int:
        """Columns of a wide tile."""
        return self.tile.n * self.simdgroups_n

    @property
    def wide_columns(self) -> int:
        """Columns of wide tiles, which come first."""
        return self.work.whole // self.m_tiles if self.has_wide_tiles else 0

    @property
    def is_whole(self) -> bool:
        """Whether each threadgroup has one whole tile: the kernels then know it."""
        return self.work.strategy in ("data_parallel", "hytis")

    @property
    def is_split(self) -> bool:
        """Whether partial sums of a tile have to meet."""
        return self.reduction != "none"

    @property
    def finishes(self) -> bool:
        """Whether a dispatch follows that makes the result of sums: atomic sums are the
        result where nothing is left to do to them."""
        problem = self.problem
        summed = problem.dtype == "float32" and problem.epilogue == PLAIN
        return self.is_split and not (self.reduction == "atomic" and summed)

    @property
    def dispatches(self) -> int:
        """Kernel launches: one, one that zeroes atomic sums, one that finishes."""
        return 1 + (self.reduction == "atomic") + self.finishes

    @property
    def workspace_shape(self) -> tuple[int, int, int]:
        """Shape of the float32 partial sums: (slots, m, n), all products' rows as m."""
        slots = self.work.slots if self.reduction == "workspace" else 1
        return slots, self.problem.batch * self.problem.m, self.problem.n

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the partial sums; 0 when nothing is split."""
        return prod(self.workspace_shape) * 4 if self.is_split else 0

    @property
    def threadgroup_bytes(self) -> int:
        """Bytes of threadgroup memory: the epilogue's scratch, float32.

        It takes turns with stages, where there are any. On CUDA every packed tile and
        slice of k has its own, and rows that are normalized lie behind.
        """
        sums = self.simdgroups_k * (self.simdgroups_n if self.on_cuda else 1)
        scratch = sums * self.tile.m * PADDED_COLUMNS * 4
        if not self.buffers:
            return scratch + mma.normed_bytes(self.problem)
        barriers = pipelined.BARRIER_BYTES if self.has_staged_x else 0
        return barriers + max(scratch, self.buffers * self.stage_bytes)

    @property
    def stage_k(self) -> int:
        """Values of k of a stage: in `gemm_staged` a step of each slice of k."""
        if self.has_staged_x:
            return pipelined.STAGE_K
        return step_k(self.problem.group_size) * self.simdgroups_k

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage; a wide tile's has as many chunks of w, and less of x."""
        if self.has_staged_x:
            return pipelined.stage_bytes(self.tile.m)
        element = self.problem.fragment_bytes
        return buffer_bytes(self.tile.m, self.tile.n, self.stage_k, element)

    def product_of(self, tile: int) -> int:
        """Returns which product of a batch a tile is part of."""
        return tile // (self.m_tiles * self.n_tiles)

    def corner(self, tile: int) -> tuple[int, int]:
        """Returns the first row and column of a tile's part of its product."""
        row, column = tile_position(tile, self.m_tiles)
        column %= self.n_tiles
        wide = min(column, self.wide_columns)
        return row * self.tile.m, wide * self.wide_n + (column - wide) * self.tile.n

    def columns_of(self, tile: int) -> int:
        """Returns how many columns a tile has, also past the result's last one."""
        _, column = tile_position(tile, self.m_tiles)
        return self.wide_n if column < self.wide_columns else self.tile.n

    def k_range(self, split: Split) -> tuple[int, int]:
        """Returns the values of k [start, stop) of a split."""
        stop = (split.k_idx + split.k_tile_count) * self.tile.k
        return split.k_idx * self.tile.k, min(stop, self.problem.k)

    def explain(self) -> str:
        """Says in a line what will run; every figure is counted, none predicted."""
        work = self.work
        parts = [
            f"{self.kernel} {self.tile}",
            f"{self._simdgroups()}{self._staging()}",
            f"{work.tiles} tiles of {work.k_tiles} k tiles",
            f"{work.strategy} over {work.threadgroups} threadgroups "
            f"({', '.join(self._details())})",
        ]
        if self.reduction == "workspace":
            size = self.workspace_bytes / 1024
            parts.append(f"workspace {size:.0f} KB, {work.slots} slots")
        elif self.reduction == "atomic":
            parts.append("atomic sums: the last bits differ from run to run")
        return ", ".join(parts)

    def _simdgroups(self) -> str:
        if self.on_cuda:
            return f"{self.simdgroups_n}x{self.simdgroups_k} simdgroups (n x k)"
        return f"{self.simdgroups_m}x{self.simdgroups_k} simdgroups (m x k)"

    def _staging(self) -> str:
        counts = {"buffer": self.buffers, "loader": self.loaders}
        said = (f", {n} {noun}" + "s" * (n > 1) for noun, n in counts.items() if n)
        return "".join(said)

    def _details(self) -> list[str]:
        work = self.work
        parts = [f"{work.partition}"] if work.strategy == "stripe" else []
        if work.strategy == "hytis":
            parts.append(f"{work.whole} tiles {self.wide_n} wide")
        if work.strategy == "hybrid":
            parts.append(f"{work.whole} tiles whole")
        if work.strategy in ("stripe", "split_k") and work.slices > 1:
            parts.append(f"{work.slices} slices of k")
        if work.strategy in ("stream_k", "hybrid"):
            parts.append(f"at least {work.minimum} k tiles a split")
            parts.append(f"{work.groups} groups")
        noun = "k tile" if work.longest == 1 else "k tiles"
        return [*parts, f"at most {work.longest} {noun} each", f"{work.idle} idle"]
