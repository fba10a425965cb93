"""A plan: the tiles, threadgroups and launches that compute a product, all integers.

The result is cut into tiles of `tile.m` rows x `tile.n` columns, in column-major order,
and k into k tiles. `work` assigns the k tiles of all tiles to threadgroups. For 3 x 3
tiles and 5 threadgroups with `partition="ceil"`:

    tile (row, col)              threadgroup
    (0,0) (0,1) (0,2)              0  1  3
    (1,0) (1,1) (1,2)              0  2  3
    (2,0) (2,1) (2,2)              1  2  4

In a batch, the columns of tiles of the products follow one another. `shaders/` uses the
same names. Every back end has its own subclass, which describes its threadgroups.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.problem import MOST_ELEMENTS, Problem
from mlx_marlin.planning.work.tiles import (
    FRAGMENT,
    REDUCTIONS,
    SIMD_WIDTH,
    Kernel,
    Reduction,
    Tile,
    k_tile,
    tile_position,
)
from mlx_marlin.planning.work.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ABC):
    """How one product is computed: kernel, tile, threadgroups and reduction.

    Attributes:
        problem: The product.
        kernel: Name of the first kernel.
        tile: Rows, columns and k of a tile.
        fragments_m: 8-row fragments of x that a simdgroup holds; 0 for dot products.
        simdgroups_n: Packed tiles side by side in a tile, each with its own simdgroups.
        simdgroups_k: Simdgroups that share a tile's k; they add their sums in
            threadgroup memory.
        work: The division of the k tiles among threadgroups.
        reduction: How the splits of a tile are added: "none" if tiles are not split,
            "workspace" (deterministic) or "atomic" (in order of arrival).
        buffers: Pipeline stages in threadgroup memory; 0 without staging.
        loaders: Simdgroups that only fill stages while the others multiply.
        backend: Name of the back end that has its kernels.
    """

    backend: ClassVar[str]
    problem: Problem
    kernel: Kernel
    tile: Tile
    fragments_m: int
    simdgroups_n: int = 1
    simdgroups_k: int = 1
    work: Work
    reduction: Reduction = "none"
    buffers: int = 0
    loaders: int = 0

    def __post_init__(self) -> None:
        self.check()

    @abstractmethod
    def check(self) -> None:
        """Checks the fields and their combination.

        Raises:
            ValueError: If no kernel supports them.
        """

    @property
    def has_tensor_operations(self) -> bool:
        """Whether the first kernel uses tensor units that other kernels do not."""
        return False

    @property
    @abstractmethod
    def simdgroups(self) -> int:
        """Simdgroups of a threadgroup."""

    @property
    @abstractmethod
    def threadgroup_bytes(self) -> int:
        """Bytes of threadgroup memory that a threadgroup needs."""

    @property
    @abstractmethod
    def stage_k(self) -> int:
        """K values of a pipeline stage, if the kernel has stages."""

    @property
    def strategy(self) -> str:
        """The strategy by which the work is divided."""
        return self.work.strategy

    @property
    def variant(self) -> str:
        """The kernel and the simdgroups of a threadgroup along m, n and k, as text."""
        rows = self.fragments_m * FRAGMENT or self.tile.m
        groups = "x".join(map(str, self.simdgroup_grid))
        return f"{self.kernel} {rows} rows, {groups} simdgroups{self._staging()}"

    @property
    def simdgroup_grid(self) -> tuple[int, int, int]:
        """Simdgroups of a threadgroup along m, n and k."""
        return 1, self.simdgroups_n, self.simdgroups_k

    @property
    def num_threadgroups(self) -> int:
        """Threadgroups of the first dispatch."""
        return self.work.threadgroups

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return SIMD_WIDTH * self.simdgroups

    @property
    def m_tiles(self) -> int:
        """Tiles along the rows of a product."""
        return -(-self.problem.m // self.tile.m)

    @property
    def n_tiles(self) -> int:
        """Tiles along the columns of a product; a wide tile counts once."""
        if not self.has_wide_tiles:
            return -(-self.problem.n // self.tile.n)
        rest = self.problem.n - self.wide_columns * self.wide_n
        return self.wide_columns + -(-rest // self.tile.n)

    @property
    def k_tiles(self) -> int:
        """Number of k tiles of a tile."""
        return -(-self.problem.k // self.tile.k)

    @property
    def has_wide_tiles(self) -> bool:
        """Whether tiles of `wide_n` columns precede narrow ones."""
        return self.work.strategy == "hytis"

    @property
    def wide_n(self) -> int:
        """Columns of a wide tile."""
        return self.tile.n * self.simdgroups_n

    @property
    def wide_columns(self) -> int:
        """Number of columns of wide tiles, which come first."""
        return self.work.whole // self.m_tiles if self.has_wide_tiles else 0

    @property
    def is_whole(self) -> bool:
        """Whether every threadgroup has one whole tile, a template argument."""
        return self.work.strategy in ("data_parallel", "hytis")

    @property
    def row_limit(self) -> int | None:
        """Most rows of products with the plan's kernel instance, or None."""
        return None

    @property
    def is_split(self) -> bool:
        """Whether tiles have partial sums that are reduced."""
        return self.reduction != "none"

    @property
    def needs_second_pass(self) -> bool:
        """Whether a second dispatch computes the result from the sums.

        Atomic float32 sums without an epilogue are already the result.
        """
        problem = self.problem
        summed = problem.dtype == "float32" and problem.epilogue == PLAIN
        return self.is_split and not (self.reduction == "atomic" and summed)

    @property
    def dispatches(self) -> int:
        """Kernel launches: the product, zeroing of atomic sums, and the second pass."""
        return 1 + (self.reduction == "atomic") + self.needs_second_pass

    @property
    def workspace_shape(self) -> tuple[int, int, int]:
        """Shape of the float32 partial sums: (slots, batch * m, n)."""
        slots = self.work.slots if self.reduction == "workspace" else 1
        return slots, self.problem.batch * self.problem.m, self.problem.n

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the partial sums; 0 if no tile is split."""
        return prod(self.workspace_shape) * 4 if self.is_split else 0

    @property
    def workspace_traffic(self) -> int:
        """Bytes of partial sums that are written and read back."""
        if not self.is_split:
            return 0
        problem, work = self.problem, self.work
        passes = work.pieces / work.tiles + (self.reduction == "atomic")
        return round(2 * passes * problem.batch * problem.m * problem.n * 4)

    def columns_of(self, tile: int) -> int:
        """Returns the columns of a tile, including padding past column n."""
        _, column = tile_position(tile, self.m_tiles)
        return self.wide_n if column < self.wide_columns else self.tile.n

    def explain(self) -> str:
        """Returns a one-line description of the plan, without predicted figures."""
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
        return f"{self.simdgroups_n}x{self.simdgroups_k} simdgroups (n x k)"

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

    def check_columns(self, columns: int) -> None:
        """Checks the n and k of the tile against `columns` and the group size."""
        expected = columns, k_tile(self.problem.group_size)
        if (self.tile.n, self.tile.k) != expected:
            raise ValueError(
                f"tile.n and tile.k are {expected[0]} and {expected[1]} for groups of "
                f"{self.problem.group_size}, got {self.tile.n} and {self.tile.k}"
            )

    def check_bytes(self, limit: int, stage_bytes: int) -> None:
        """Checks that the threadgroup memory does not exceed `limit` bytes."""
        if self.threadgroup_bytes > limit:
            stages = f"buffers={self.buffers} of {stage_bytes} bytes make "
            raise ValueError(
                f"{stages if self.buffers else ''}{self.threadgroup_bytes} bytes of "
                f"threadgroup memory, more than {limit}"
            )

    def check_unstaged(self) -> None:
        """Checks that a kernel without stages has none."""
        if (self.buffers, self.loaders) != (0, 0):
            raise ValueError(
                f"{self.kernel} has buffers=0 and loaders=0, got "
                f"buffers={self.buffers}, loaders={self.loaders}"
            )

    def check_work(self) -> None:
        """Checks that the work has the tiles of the product, and a fitting reduction.

        The workspace of split work has a limit.
        """
        tiles = self.problem.batch * self.m_tiles * self.n_tiles
        if (self.work.tiles, self.work.k_tiles) != (tiles, self.k_tiles):
            raise ValueError(
                f"the product has {tiles} tiles of {self.k_tiles} k tiles, got "
                f"work with {self.work.tiles} of {self.work.k_tiles}"
            )
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction={self.reduction!r} is not one of {REDUCTIONS}")
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
