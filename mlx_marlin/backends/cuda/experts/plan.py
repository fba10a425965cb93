"""How experts' products are computed on a CUDA device: as on Metal, in blocks.

A block has a tile of columns of one expert and finds the rows that chose it. Where
there are fewer pairs (row, expert) than experts, it is one pair's: the first that chose
an expert has the rows of all that did, and the blocks of the others end at once.
"""

from dataclasses import dataclass

from mlx_marlin.backends.cuda import limits
from mlx_marlin.backends.metal.experts.plan import MOST_THREADGROUPS
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import PADDED_COLUMNS, SIMD_WIDTH
from mlx_marlin.weights.formats import TILE_N

GATES = ("silu", "swiglu_oai")
"""`silu(gate) * up`, and gpt-oss's, which clips both before and adds 1 to the second:
`swiglu_oai` of `mlx_lm.models.activations` with alpha=1.702 and limit=7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGatherPlan:
    """How the products of rows with the experts that they chose are computed.

    Attributes:
        problem: The product of one expert; its m counts all pairs (row, expert).
        experts: Weights to choose from.
        fragments_m: 8-row fragments of x that a warp holds.
        simdgroups_n: Packed tiles side by side in a block.
        simdgroups_k: Warps that share a tile's k.
        each: Pairs that have the same row of x, one after the other; 0 if their rows
            are an array.
        gate: How the product of the first of two weights an expert gates that of the
            second, one of `GATES`; None with one weight.
        bias: Whether each product has a bias [experts, n]; of packed weights only.
    """

    problem: Problem
    experts: int
    fragments_m: int
    simdgroups_n: int
    simdgroups_k: int
    each: int
    gate: str | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        limits.check(
            self.problem,
            fragments_m=self.fragments_m,
            simdgroups_n=self.simdgroups_n,
            simdgroups_k=self.simdgroups_k,
            tile_m=self.rows,
            tile_n=TILE_N * self.simdgroups_n,
        )
        if self.experts < 1 or not 0 < self.num_threadgroups < MOST_THREADGROUPS:
            raise ValueError(
                f"experts={self.experts} and {self.problem.m} pairs make "
                f"{self.num_threadgroups} threadgroups, expected 1 to "
                f"{MOST_THREADGROUPS - 1}"
            )
        if self.each < 0 or (self.each and self.problem.m % self.each):
            raise ValueError(
                f"each={self.each} does not divide {self.problem.m} pairs, expected 0 "
                f"or a divisor"
            )

        tiled = self.problem.layout == "marlin" and self.problem.n % TILE_N == 0
        if self.bias and self.problem.layout != "marlin":
            raise ValueError(
                f"bias=True needs packed weights, got layout={self.problem.layout!r}"
            )
        if self.gate not in (None, *GATES):
            raise ValueError(f"gate={self.gate!r} is not None or one of {GATES}")
        if self.gate and (not tiled or self.simdgroups_n % 2):
            raise ValueError(
                f"gate={self.gate!r} needs packed weights of whole tiles and an even "
                f"simdgroups_n, got layout={self.problem.layout!r}, "
                f"n={self.problem.n}, simdgroups_n={self.simdgroups_n}"
            )

    @property
    def rows(self) -> int:
        """Rows of a tile: pairs that share one reading of the weight."""
        return limits.FRAGMENT_ROWS * self.fragments_m

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return SIMD_WIDTH * self.simdgroups_n * self.simdgroups_k

    @property
    def by_pair(self) -> bool:
        """Whether a block is a pair's, and not an expert's."""
        return self.problem.m < self.experts

    @property
    def num_threadgroups(self) -> int:
        """Blocks: one for each tile of columns of each expert, or of each pair."""
        columns = self.problem.n * (2 if self.gate else 1)
        tiles = -(-columns // (TILE_N * self.simdgroups_n))
        return tiles * min(self.problem.m, self.experts)

    @property
    def threadgroup_bytes(self) -> int:
        """Bytes of shared memory: the sums of all warps, and the list of pairs."""
        warps = self.simdgroups_n * self.simdgroups_k
        return self.rows * (warps * PADDED_COLUMNS * 4 + 4)

    def explain(self) -> str:
        """Says in a line what will run; every figure is counted, none predicted."""
        return (
            f"gather {self.rows}x{TILE_N * self.simdgroups_n}, {self.simdgroups_n}x"
            f"{self.simdgroups_k} warps (n x k), {self.problem.m} pairs over "
            f"{self.experts} experts, {self.num_threadgroups} blocks of "
            f"{'pairs' if self.by_pair else 'experts'}"
            + ", bias" * self.bias
            + (f", {self.gate}(gate, up)" if self.gate else "")
        )
