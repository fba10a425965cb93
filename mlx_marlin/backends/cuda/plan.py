"""Plans of the CUDA kernels and their validity.

For experts, a block computes a tile of columns of one expert and finds the rows that
chose it. If there are fewer pairs (row, expert) than experts, a block belongs to a pair
instead: the block of the first pair of an expert computes the rows of all its pairs,
and the blocks of the others end immediately.
"""

from dataclasses import dataclass
from typing import ClassVar

from mlx_marlin.backends.cuda import limits
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.planning.gather_plan import GatherPlan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.work.tiles import PADDED_COLUMNS, SIMD_WIDTH
from mlx_marlin.weights.formats import TILE_N


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaPlan(Plan):
    """How a product is computed on an NVIDIA GPU.

    The kernel is "mma" (16x8x16 matrices), "mma_staged" (the same with x in shared
    memory) or "wgmma" (64x16 by 16x64, x in shared memory). A tile is `simdgroups_n`
    packed tiles wide, each with `simdgroups_k` warps. Stages hold only x.
    """

    backend: ClassVar[str] = "cuda"

    @property
    def is_pipelined(self) -> bool:
        """Whether dedicated warps fill stages of x."""
        return self.kernel in limits.PIPELINED

    @property
    def simdgroups(self) -> int:
        """Warps of a block."""
        if not self.is_pipelined:
            return self.simdgroups_n * self.simdgroups_k
        return limits.simdgroups(self.kernel, self.simdgroups_n, self.simdgroups_k)

    @property
    def threadgroup_bytes(self) -> int:
        """Bytes of shared memory.

        The epilogue's float32 scratch, one per packed tile and slice of k, shares its
        memory with the stages. Normalized rows follow the scratch.
        """
        sums = self.simdgroups_k * self.simdgroups_n
        scratch = sums * self.tile.m * PADDED_COLUMNS * 4
        if not self.buffers:
            return scratch + limits.normed_bytes(self.problem)
        return limits.BARRIER_BYTES + max(scratch, self.buffers * self.stage_bytes)

    @property
    def stage_k(self) -> int:
        """K values of a stage."""
        return limits.STAGE_K

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return limits.stage_bytes(self.tile.m)

    def check(self) -> None:
        """Checks the fields and their combination."""
        if self.kernel not in OF_CUDA:
            raise ValueError(f"kernel={self.kernel!r} is not one of {OF_CUDA}")
        if self.is_pipelined:
            _check_pipelined(self)
        else:
            self.check_unstaged()
            _check_mma(self)
        self._check_rows()
        if self.problem.norm is not None:
            self._check_norm()
        self.check_columns(TILE_N * self.simdgroups_n)
        self.check_bytes(limits.SHARED_LIMIT, self.stage_bytes)
        if self.has_wide_tiles:
            raise ValueError(
                f"{self.kernel} has tiles of one width, got strategy='hytis'"
            )
        if self.reduction == "atomic":
            raise ValueError(
                f"{self.kernel} has no atomic sums, got reduction='atomic'"
            )
        self.check_work()
        if self.problem.epilogue.is_paired:
            self._check_paired()
        if self.problem.invariant:
            self._check_invariant()

    def _check_rows(self) -> None:
        rows = limits.FRAGMENT_ROWS * self.fragments_m
        if self.tile.m != rows:
            raise ValueError(
                f"fragments_m={self.fragments_m} makes tiles of {rows} rows, got "
                f"tile.m={self.tile.m}"
            )

    def _check_norm(self) -> None:
        """Checks that the kernel supports RMSNorm and that tiles are not split."""
        if self.kernel != "mma" or self.is_split:
            raise ValueError(
                f"norm={self.problem.norm} needs kernel='mma' and reduction='none', "
                f"got kernel={self.kernel!r}, reduction={self.reduction!r}"
            )

    def _check_paired(self) -> None:
        """Checks that a block has all columns that a result depends on."""
        epilogue = self.problem.epilogue
        option = "gated=True" if epilogue.gated else f"rotation={epilogue.rotation}"
        least = limits.least_tiles(self.problem)
        if self.simdgroups_n % least or self.is_split:
            raise ValueError(
                f"{option} needs a multiple of {least} as simdgroups_n and "
                f"reduction='none', got simdgroups_n={self.simdgroups_n}, "
                f"reduction={self.reduction!r}"
            )

    def _check_invariant(self) -> None:
        whole = self.work.strategy in ("data_parallel", "split_k")
        if self.kernel != "mma" or not whole:
            raise ValueError(
                "invariant=True needs mma, and data_parallel or split_k, got "
                f"kernel={self.kernel!r}, strategy={self.work.strategy!r}"
            )


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
        _check_mma(self)
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


def _check_mma(plan: CudaPlan | CudaGatherPlan) -> None:
    """Checks the fields of a plan of "mma"."""
    reason = limits.why_not(plan.problem)
    if reason is not None:
        raise ValueError(f"kernel='mma': {reason}")
    if plan.fragments_m not in limits.FRAGMENTS_M:
        raise ValueError(
            f"fragments_m={plan.fragments_m} is not one of {limits.FRAGMENTS_M}"
        )
    _check_counts(plan)
    if plan.simdgroups_n * plan.simdgroups_k > limits.MOST_SIMDGROUPS:
        raise ValueError(
            f"simdgroups_n={plan.simdgroups_n} x simdgroups_k={plan.simdgroups_k} is "
            f"more than {limits.MOST_SIMDGROUPS} simdgroups in a threadgroup"
        )


def _check_counts(plan: CudaPlan | CudaGatherPlan) -> None:
    """Raises ValueError if a block cannot have these numbers of tiles and slices."""
    if not 1 <= plan.simdgroups_n <= limits.MOST_SIMDGROUPS_N or plan.simdgroups_k < 1:
        raise ValueError(
            f"simdgroups_n={plan.simdgroups_n} must be 1 to "
            f"{limits.MOST_SIMDGROUPS_N} and simdgroups_k={plan.simdgroups_k} at least "
            f"1"
        )


def _check_pipelined(plan: CudaPlan) -> None:
    """Checks the fields of a plan."""
    reason, traits = (
        limits.why_not_pipelined(plan.problem),
        limits.PIPELINED[plan.kernel],
    )
    if reason is not None:
        raise ValueError(f"kernel={plan.kernel!r}: {reason}")
    fragments_m = plan.fragments_m
    if fragments_m not in traits.fragments_m:
        raise ValueError(
            f"fragments_m={fragments_m} is not one of {traits.fragments_m}"
        )
    if plan.loaders != limits.LOADERS:
        raise ValueError(
            f"{plan.kernel} has loaders={limits.LOADERS}, got loaders={plan.loaders}"
        )
    _check_counts(plan)
    if plan.simdgroups > traits.most_simdgroups:
        raise ValueError(
            f"simdgroups_n={plan.simdgroups_n} x simdgroups_k={plan.simdgroups_k} make "
            f"{plan.simdgroups} simdgroups in a threadgroup, expected at most "
            f"{traits.most_simdgroups}"
        )
    fitting = limits.buffers_of(fragments_m, plan.simdgroups_k)
    if plan.buffers not in fitting:
        raise ValueError(
            f"buffers={plan.buffers} is not one of {fitting} for "
            f"fragments_m={fragments_m} and simdgroups_k={plan.simdgroups_k}: each "
            f"stage is always the same loader's and the same slice's"
        )
