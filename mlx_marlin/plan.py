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
from typing import Literal

from mlx_marlin import mma, staged_x
from mlx_marlin.formats import TILE_K, TILE_N
from mlx_marlin.problem import MOST_ELEMENTS, PLAIN, Problem
from mlx_marlin.staging import BUFFERS, buffer_bytes
from mlx_marlin.work import Split, Tile, Work, tile_position

Kernel = Literal["gemv", "gemm_register", "gemm_staged", "mma", "mma_staged", "wgmma"]
Reduction = Literal["none", "workspace", "atomic"]

OF_CUDA: tuple[Kernel, ...] = ("mma", "mma_staged", "wgmma")
KERNELS: tuple[Kernel, ...] = ("gemv", "gemm_register", "gemm_staged", *OF_CUDA)
"""Those that run on CUDA devices; the others are Metal's."""
REDUCTIONS: tuple[Reduction, ...] = ("none", "workspace", "atomic")

FRAGMENT = 8
"""Rows and columns of a simdgroup matrix."""
SIMD_WIDTH = 32
"""Threads of a simdgroup."""
FRAGMENTS_M = (1, 2)
"""Row fragments of x a simdgroup may hold: with three, group sums spill registers."""
MAX_SIMDGROUPS = 8
"""256 threads, a size that leaves every kernel its registers."""
THREADGROUP_LIMIT = 32768
"""Bytes of threadgroup memory that one threadgroup may have."""
PADDED_COLUMNS = TILE_N + 4
"""Columns of a float32 row of the epilogue's scratch: the 4 spread rows over banks."""
GEMV_ROWS = {"float16": 5, "bfloat16": 3, "float32": 3}
"""Most rows of `gemv`, by dtype: beyond, 4-byte values of x take too many registers."""


def k_tile(group_size: int) -> int:
    """Returns the weights of a k tile, between which k may be cut.

    Every trip applies its own group's scales, so a cut may fall inside a group: longer
    groups than 128, and whole rows, are cut as finely as short ones.
    """
    return 128 if group_size == 128 else TILE_K


def step_k(group_size: int) -> int:
    """Returns the k of a step: a fragment of a step must not sit in two groups."""
    return 32 if group_size == 32 else TILE_K


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
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel={self.kernel!r} is not one of {KERNELS}")
        self._check_staging()
        if self.kernel == "gemv":
            self._check_gemv()
        elif self.kernel == "mma":
            self._check_mma()
        elif self.has_staged_x:
            self._check_staged_x()
        else:
            self._check_gemm()
        self._check_threadgroup()
        self._check_work()
        self._check_reduction()
        self._check_invariant()

    def _check_staging(self) -> None:
        if self.has_staged_x:
            return
        if self.kernel != "gemm_staged":
            if (self.buffers, self.loaders) != (0, 0):
                raise ValueError(
                    f"{self.kernel} has buffers=0 and loaders=0, got "
                    f"buffers={self.buffers}, loaders={self.loaders}"
                )
            return
        if self.problem.batch > 1:
            raise ValueError(
                f"gemm_staged takes one weight, got batch={self.problem.batch}"
            )
        if self.buffers not in BUFFERS:
            raise ValueError(f"buffers={self.buffers} is not one of {BUFFERS}")
        if self.loaders < 0:
            raise ValueError(f"loaders={self.loaders} must be at least 0")
        if self.loaders and self.buffers == 1:
            raise ValueError(
                f"loaders={self.loaders} would wait with buffers=1 whenever the others "
                f"multiply, expected 2 or 3 buffers"
            )

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

    def _check_mma(self) -> None:
        mma.check(
            self.problem,
            fragments_m=self.fragments_m,
            simdgroups_m=self.simdgroups_m,
            simdgroups_n=self.simdgroups_n,
            simdgroups_k=self.simdgroups_k,
            tile_m=self.tile.m,
            tile_n=self.tile.n,
            subtract=self.subtract,
        )

    def _check_staged_x(self) -> None:
        staged_x.check(
            self.problem,
            kernel=self.kernel,
            fragments_m=self.fragments_m,
            simdgroups_m=self.simdgroups_m,
            simdgroups_n=self.simdgroups_n,
            simdgroups_k=self.simdgroups_k,
            buffers=self.buffers,
            loaders=self.loaders,
            tile_m=self.tile.m,
            tile_n=self.tile.n,
            subtract=self.subtract,
        )

    def _check_threadgroup(self) -> None:
        on_cuda = self.on_cuda
        columns = TILE_N * self.simdgroups_n if on_cuda else TILE_N
        sides = columns, k_tile(self.problem.group_size)
        if (self.tile.n, self.tile.k) != sides:
            raise ValueError(
                f"tile.n and tile.k are {sides[0]} and {sides[1]} for groups of "
                f"{self.problem.group_size}, got {self.tile.n} and {self.tile.k}"
            )
        if self.simdgroups_m < 1 or self.simdgroups_k < 1:
            raise ValueError(
                f"simdgroups_m={self.simdgroups_m} and simdgroups_k="
                f"{self.simdgroups_k} must be at least 1"
            )
        if self.simdgroups > MAX_SIMDGROUPS and not on_cuda:
            further = f" and loaders={self.loaders}" if self.loaders else ""
            raise ValueError(
                f"simdgroups_m={self.simdgroups_m} x simdgroups_k={self.simdgroups_k}"
                f"{further} is more than {MAX_SIMDGROUPS} simdgroups in a threadgroup"
            )
        limit = mma.SHARED_LIMIT if on_cuda else THREADGROUP_LIMIT
        if self.threadgroup_bytes > limit:
            each = f"buffers={self.buffers} of {self.stage_bytes} bytes make "
            raise ValueError(
                f"{each if self.buffers else ''}{self.threadgroup_bytes} bytes of "
                f"threadgroup memory, more than {limit}"
            )

    def _check_work(self) -> None:
        wide = self.has_wide_tiles
        if self.on_cuda:
            if wide:
                raise ValueError(
                    f"{self.kernel} has tiles of one width, got strategy='hytis'"
                )
        elif wide != (self.simdgroups_n > 1) or self.simdgroups_k % self.simdgroups_n:
            raise ValueError(
                f"simdgroups_n={self.simdgroups_n} must be 1, or for hytis a divisor "
                f"of simdgroups_k={self.simdgroups_k} above 1"
            )
        if wide and self.work.whole % self.m_tiles:
            raise ValueError(
                f"whole={self.work.whole} wide tiles do not make whole columns of "
                f"{self.m_tiles} tiles"
            )
        if wide and self.wide_columns * self.wide_n >= self.problem.n:
            raise ValueError(
                f"whole={self.work.whole} wide tiles leave no column of "
                f"n={self.problem.n} for narrow ones"
            )
        if wide and self.problem.batch > 1:
            raise ValueError(
                f"hytis takes one weight, got batch={self.problem.batch}: wide tiles "
                f"would end in another product's"
            )
        expected = self.problem.batch * self.m_tiles * self.n_tiles, self.k_tiles
        if (self.work.tiles, self.work.k_tiles) != expected:
            raise ValueError(
                f"the product has {expected[0]} tiles of {expected[1]} k tiles, got "
                f"work with {self.work.tiles} of {self.work.k_tiles}"
            )

    def _check_reduction(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction={self.reduction!r} is not one of {REDUCTIONS}")
        if self.on_cuda and self.reduction == "atomic":
            raise ValueError(
                f"{self.kernel} has no atomic sums, got reduction='atomic'"
            )
        if (self.reduction == "none") == self.work.is_split:
            raise ValueError(
                f"reduction={self.reduction!r} does not fit work whose tiles "
                f"{'are' if self.work.is_split else 'are not'} split"
            )
        if prod(self.workspace_shape) >= MOST_ELEMENTS:
            raise ValueError(
                f"k_parallel={self.work.slices} makes a workspace of "
                f"{self.workspace_shape}, expected fewer than {MOST_ELEMENTS} elements"
            )

    def _check_invariant(self) -> None:
        if not self.problem.invariant:
            return
        exact = self.kernel == "gemm_register" and self.subtract
        kept = (
            (exact or self.kernel == "mma")
            and self.reduction != "atomic"
            and self.work.strategy in ("data_parallel", "split_k")
        )
        if not kept:
            raise ValueError(
                "invariant=True needs gemm_register, subtract=True, and data_parallel "
                "or split_k without atomics (or mma, likewise, without subtract), got "
                f"kernel={self.kernel!r}, "
                f"subtract={self.subtract}, strategy={self.work.strategy!r}, "
                f"reduction={self.reduction!r}"
            )

    @property
    def on_cuda(self) -> bool:
        """Whether the kernel is one of CUDA's."""
        return self.kernel in OF_CUDA

    @property
    def has_staged_x(self) -> bool:
        """Whether warps of their own fill stages of x, and of nothing else."""
        return self.kernel in staged_x.KERNELS

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
            return staged_x.simdgroups(
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

        It takes turns with stages, where there are any. On CUDA every
        packed tile and slice of k has its own.
        """
        sums = self.simdgroups_k * (self.simdgroups_n if self.on_cuda else 1)
        scratch = sums * self.tile.m * PADDED_COLUMNS * 4
        if not self.buffers:
            return scratch
        barriers = staged_x.BARRIER_BYTES if self.has_staged_x else 0
        return barriers + max(scratch, self.buffers * self.stage_bytes)

    @property
    def stage_k(self) -> int:
        """Values of k of a stage: in `gemm_staged` a step of each slice of k."""
        if self.has_staged_x:
            return staged_x.STAGE_K
        return step_k(self.problem.group_size) * self.simdgroups_k

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage; a wide tile's has as many chunks of w, and less of x."""
        if self.has_staged_x:
            return staged_x.stage_bytes(self.tile.m)
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
