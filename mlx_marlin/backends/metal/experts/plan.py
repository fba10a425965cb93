"""How rows that each chose one weight out of several are multiplied: experts' products.

A threadgroup has one column of tiles of one expert and finds the rows that chose it,
so that the weight is read once for all of them. Which rows those are is known on the
GPU only: the plan has a threadgroup for every expert, and one that nobody chose ends at
once.

Few rows of a tile are dot products, as in `gemv`: an expert that one row chose costs no
8x8 matrices. How many rows chose it is known on the GPU only, too.
"""

from dataclasses import dataclass

from mlx_marlin.backends.metal.limits import (
    FRAGMENTS_M,
    MAX_SIMDGROUPS,
    THREADGROUP_LIMIT,
)
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import FRAGMENT, PADDED_COLUMNS, SIMD_WIDTH
from mlx_marlin.weights.formats import TILE_N

MOST_THREADGROUPS = 2**31 // (SIMD_WIDTH * MAX_SIMDGROUPS)
"""A grid counts threads in 32 bits."""
MOST_DOT_ROWS = 2
"""Most rows of a tile that are dot products. Two take the kernel 8 to 34 more 16-bit
registers than matrices alone, which leaves room for 16 simdgroups on a core, and each
further row takes 28 (counted)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPlan:
    """How the products of rows with the experts that they chose are computed.

    Attributes:
        problem: The product of one expert; its m counts all pairs (row, expert).
        experts: Weights to choose from.
        fragments_m: 8-row fragments of x that one simdgroup holds.
        simdgroups_m: Simdgroups side by side along the rows.
        simdgroups_k: Simdgroups that share a tile's k; for dot products all do.
        dot_rows: Most rows of a tile that are dot products.
        subtract: Subtract the codes' offset in the fragment.
    """

    problem: Problem
    experts: int
    fragments_m: int
    simdgroups_m: int
    simdgroups_k: int
    dot_rows: int
    subtract: bool

    def __post_init__(self) -> None:
        if self.experts < 1 or self.num_threadgroups >= MOST_THREADGROUPS:
            raise ValueError(
                f"experts={self.experts} of {self.problem.n} rows make "
                f"{self.num_threadgroups} threadgroups, expected 1 to "
                f"{MOST_THREADGROUPS - 1}"
            )
        if self.fragments_m not in FRAGMENTS_M:
            raise ValueError(
                f"fragments_m={self.fragments_m} is not one of {FRAGMENTS_M}"
            )
        if not 1 <= self.simdgroups_m * self.simdgroups_k <= MAX_SIMDGROUPS:
            raise ValueError(
                f"simdgroups_m={self.simdgroups_m} x simdgroups_k={self.simdgroups_k} "
                f"is not between 1 and {MAX_SIMDGROUPS} simdgroups"
            )
        if not 0 <= self.dot_rows <= MOST_DOT_ROWS:
            raise ValueError(
                f"dot_rows={self.dot_rows} is not between 0 and {MOST_DOT_ROWS}"
            )
        if self.problem.invariant and (self.dot_rows or not self.subtract):
            raise ValueError(
                "invariant=True needs subtract=True and dot_rows=0, because what fewer "
                "or more rows may do otherwise changes bits"
            )
        if self.threadgroup_bytes > THREADGROUP_LIMIT:
            raise ValueError(
                f"{self.threadgroup_bytes} bytes of threadgroup memory are more than "
                f"{THREADGROUP_LIMIT}"
            )

    @property
    def rows(self) -> int:
        """Rows of a tile: pairs that share one reading of the weight."""
        return FRAGMENT * self.fragments_m * self.simdgroups_m

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return SIMD_WIDTH * self.simdgroups_m * self.simdgroups_k

    @property
    def num_threadgroups(self) -> int:
        """Threadgroups: one for each column of tiles of each expert."""
        return self.experts * -(-self.problem.n // TILE_N)

    @property
    def threadgroup_bytes(self) -> int:
        """Bytes of threadgroup memory: the scratch, and the list of pairs."""
        scratch = self.simdgroups_k * self.rows * PADDED_COLUMNS * 4
        return scratch + self.rows * 4

    def explain(self) -> str:
        """Says in a line what will run; every figure is counted, none predicted."""
        return (
            f"gather {self.rows}x{TILE_N}, {self.simdgroups_m}x{self.simdgroups_k} "
            f"simdgroups (m x k), dot products up to {self.dot_rows} rows, "
            f"{self.problem.m} pairs over {self.experts} experts, "
            f"{self.num_threadgroups} threadgroups"
        )
