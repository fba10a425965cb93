"""Plans of experts' products on Apple GPUs.

A threadgroup computes one column of tiles of one expert. It finds the rows that chose
the expert, so that the weight is read once for all of them. Which rows these are is
known on the GPU only: there are threadgroups for every expert, and those of an expert
that no row chose end immediately.

Few rows of a tile are computed as dot products, as in `gemv`: the weight of an expert
that one row chose needs no 8x8 matrices.
"""

from dataclasses import dataclass
from typing import ClassVar

from mlx_marlin.backends.metal.limits import (
    FRAGMENTS_M,
    MAX_SIMDGROUPS,
    THREADGROUP_LIMIT,
)
from mlx_marlin.backends.metal.operands import operand_reason
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.gather_plan import GatherPlan
from mlx_marlin.planning.work.tiles import FRAGMENT, PADDED_COLUMNS, SIMD_WIDTH
from mlx_marlin.weights.formats import TILE_N

MAX_DOT_ROWS = 2
"""Limit of the rows of a tile that are dot products. Two take 8 to 34 more 16-bit
registers than matrices alone, which leaves room for 16 simdgroups on a core; each
further row takes 28 (counted)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetalGatherPlan(GatherPlan):
    """How the Metal kernel computes experts' products."""

    backend: ClassVar[str] = "metal"

    simdgroups_m: int  # Simdgroups side by side along the rows
    # A tile of up to this many rows is computed as dot products, for which all
    # simdgroups share k
    dot_rows: int
    # The form of codes that lanes multiply with matrices. With a gate, `simdgroups_k`
    # counts those of both weights of an expert
    operand: CodeForm

    def check(self) -> None:
        """Checks the fields, one by one and against each other."""
        if self.simdgroups_k % self.gather.weights:
            raise ValueError(
                f"simdgroups_k={self.simdgroups_k} is odd, expected an even number: a "
                f"gate halves them"
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
        if not 0 <= self.dot_rows <= MAX_DOT_ROWS:
            raise ValueError(
                f"dot_rows={self.dot_rows} is not between 0 and {MAX_DOT_ROWS}"
            )
        if self.problem.invariant and (self.dot_rows or self.operand != "exact"):
            raise ValueError(
                "invariant=True needs operand='exact' and dot_rows=0: otherwise the "
                "bits of a row depend on the number of rows"
            )
        reason = operand_reason(self.problem, self.operand, "gemm_register")
        if reason is not None:
            raise ValueError(f"operand={self.operand!r} {reason}")
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
    def has_ragged_tiles(self) -> bool:
        """Whether the kernel is compiled for an n that does not fill the last tile."""
        return self.problem.n % TILE_N != 0

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
        """Bytes of threadgroup memory: the scratch and the list of pairs."""
        scratch = self.simdgroups_k * self.rows * PADDED_COLUMNS * 4
        return scratch + self.rows * 4

    def explain(self) -> str:
        """Returns a line on what will run; every figure is counted, not predicted."""
        gated = f", gated by {self.gather.gate}" if self.gather.gate else ""
        return (
            f"gather {self.rows}x{TILE_N}{gated}, "
            f"{self.simdgroups_m}x{self.simdgroups_k} simdgroups (m x k), "
            f"dot products up to {self.dot_rows} rows, "
            f"{self.problem.m} pairs over {self.experts} experts, "
            f"{self.num_threadgroups} threadgroups"
        )
