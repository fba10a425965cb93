"""Plans of experts' products on CUDA devices.

A block computes a tile of columns of one expert and finds the rows that chose it. If
there are fewer pairs (row, expert) than experts, a block belongs to a pair instead: the
block of the first pair of an expert computes the rows of all its pairs, and the blocks
of the others end immediately.
"""

from dataclasses import dataclass
from typing import ClassVar

from mlx_marlin.backends.cuda import limits
from mlx_marlin.planning.gather_plan import GatherPlan
from mlx_marlin.planning.work.tiles import PADDED_COLUMNS, SIMD_WIDTH
from mlx_marlin.weights.formats import TILE_N

MAX_PAIRS_PER_ROW = 16
"""Limit of the pairs of a row that a kernel is compiled for; it reads the rows from an
array if there are more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGatherPlan(GatherPlan):
    """How the CUDA kernel computes experts' products."""

    backend: ClassVar[str] = "cuda"

    simdgroups_n: int  # Packed tiles side by side in a block

    def check(self) -> None:
        """Checks the fields, one by one and against each other."""
        limits.check(self)
        layout, n = self.problem.layout, self.problem.n
        if self.gather.bias and layout != "marlin":
            raise ValueError(f"bias=True needs packed weights, got layout={layout!r}")
        tiled = layout == "marlin" and n % TILE_N == 0
        if self.gather.gate and (not tiled or self.simdgroups_n % 2):
            raise ValueError(
                f"gate={self.gather.gate!r} needs packed weights of whole tiles and an "
                f"even simdgroups_n, got layout={layout!r}, n={n}, "
                f"simdgroups_n={self.simdgroups_n}"
            )

    @property
    def pairs_per_row(self) -> int:
        """Consecutive pairs for which the kernel reads the same row of x; 0 if it reads
        the rows of pairs from an array."""
        pairs = self.gather.pairs_per_row
        return pairs if pairs <= MAX_PAIRS_PER_ROW else 0

    @property
    def rows(self) -> int:
        """Rows of a tile: pairs that share one reading of the weight."""
        return limits.FRAGMENT_ROWS * self.fragments_m

    @property
    def columns(self) -> int:
        """Columns of a tile, of gate and up together."""
        return TILE_N * self.simdgroups_n

    @property
    def has_ragged_tiles(self) -> bool:
        """Whether the kernel takes an n that is no multiple of a packed tile."""
        return self.gather.gate is None

    @property
    def by_pair(self) -> bool:
        """Whether a block computes the tile of a pair, not of an expert."""
        return self.problem.m < self.experts

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return SIMD_WIDTH * self.simdgroups_n * self.simdgroups_k

    @property
    def num_threadgroups(self) -> int:
        """Blocks: one for each tile of columns of each expert, or of each pair."""
        columns = self.problem.n * (2 if self.gather.gate else 1)
        return -(-columns // self.columns) * min(self.problem.m, self.experts)

    @property
    def threadgroup_bytes(self) -> int:
        """Bytes of shared memory: the sums of all warps and the list of pairs."""
        warps = self.simdgroups_n * self.simdgroups_k
        return self.rows * (warps * PADDED_COLUMNS * 4 + 4)

    def explain(self) -> str:
        """Returns a line on what will run; every figure is counted, not predicted."""
        gate = self.gather.gate
        return (
            f"gather {self.rows}x{self.columns}, {self.simdgroups_n}x"
            f"{self.simdgroups_k} warps (n x k), {self.problem.m} pairs over "
            f"{self.experts} experts, {self.num_threadgroups} blocks of "
            f"{'pairs' if self.by_pair else 'experts'}"
            + ", bias" * self.gather.bias
            + (f", {gate}(gate, up)" if gate else "")
        )
