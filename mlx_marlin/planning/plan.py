"""The answer: who computes which piece of a product, as a value of pure integers.

The result is cut into tiles of `tile.m` rows x `tile.n` columns, numbered down the
columns first (column-major), and k into k tiles; `work` says which threadgroup has
which k tiles of which tile. For 3 x 3 tiles in runs of `ceil` on 5 threadgroups:

    tile (row, col)              threadgroup
    (0,0) (0,1) (0,2)              0  1  3
    (1,0) (1,1) (1,2)              0  2  3
    (2,0) (2,1) (2,2)              1  2  4

Of a batch of products, the columns of tiles of each follow those of the one before.
`shaders/` uses the same names for the same things. Every back end has its own type of
plan, which knows what its threadgroups look like.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod

from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.problem import MOST_ELEMENTS, Problem
from mlx_marlin.planning.work import Split, Tile, Work, tile_position
from mlx_marlin.planning.work.tiles import (
    FRAGMENT,
    REDUCTIONS,
    SIMD_WIDTH,
    Kernel,
    Reduction,
    k_tile,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ABC):
    """How one product is computed, down to every range of every threadgroup.

    Attributes:
        problem: The product.
        kernel: Name of the first kernel.
        tile: Rows, columns and k of a tile.
        fragments_m: 8-row fragments of x that one simdgroup holds; 0 for dot products.
        simdgroups_n: Packed tiles side by side in a tile, each with simdgroups of its
            own.
        simdgroups_k: Simdgroups that share a tile's k and meet in threadgroup memory.
        work: Who computes what.
        reduction: How splits of a tile meet: "none" where there are none, "workspace"
            (the same bits every time) or "atomic" (in whatever order they come).
        buffers: Stages that threadgroup memory holds; 0 without stages.
        loaders: Simdgroups that only fill stages, while the others multiply.
    """

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
        """Checks the fields, one by one and against each other.

        Raises:
            ValueError: If no kernel can have them.
        """

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
        """Values of k of a stage, where there are stages."""

    @property
    def strategy(self) -> str:
        """How the work is cut."""
        return self.work.strategy

    @property
    def variant(self) -> str:
        """The kernel with the simdgroups of a threadgroup: rows x columns x k."""
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
    def needs_second_pass(self) -> bool:
        """Whether a dispatch follows that makes the result of sums: atomic sums are the
        result where nothing is left to do to them."""
        problem = self.problem
        summed = problem.dtype == "float32" and problem.epilogue == PLAIN
        return self.is_split and not (self.reduction == "atomic" and summed)

    @property
    def dispatches(self) -> int:
        """Kernel launches: one, one that zeroes atomic sums, one that finishes."""
        return 1 + (self.reduction == "atomic") + self.needs_second_pass

    @property
    def workspace_shape(self) -> tuple[int, int, int]:
        """Shape of the float32 partial sums: (slots, m, n), all products' rows as m."""
        slots = self.work.slots if self.reduction == "workspace" else 1
        return slots, self.problem.batch * self.problem.m, self.problem.n

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the partial sums; 0 when nothing is split."""
        return prod(self.workspace_shape) * 4 if self.is_split else 0

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
        """Checks the tile's columns, and its k, against the group size."""
        sides = columns, k_tile(self.problem.group_size)
        if (self.tile.n, self.tile.k) != sides:
            raise ValueError(
                f"tile.n and tile.k are {sides[0]} and {sides[1]} for groups of "
                f"{self.problem.group_size}, got {self.tile.n} and {self.tile.k}"
            )

    def check_bytes(self, limit: int, stage_bytes: int) -> None:
        """Checks the threadgroup memory against what there is of it."""
        if self.threadgroup_bytes > limit:
            each = f"buffers={self.buffers} of {stage_bytes} bytes make "
            raise ValueError(
                f"{each if self.buffers else ''}{self.threadgroup_bytes} bytes of "
                f"threadgroup memory, more than {limit}"
            )

    def check_tiles(self) -> None:
        """Checks that the work has the product's tiles."""
        tiles = self.problem.batch * self.m_tiles * self.n_tiles
        if (self.work.tiles, self.work.k_tiles) != (tiles, self.k_tiles):
            raise ValueError(
                f"the product has {tiles} tiles of {self.k_tiles} k tiles, got "
                f"work with {self.work.tiles} of {self.work.k_tiles}"
            )

    def check_reduction(self) -> None:
        """Checks that splits meet, and that their sums can be counted."""
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
