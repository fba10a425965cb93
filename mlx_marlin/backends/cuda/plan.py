"""Plans of the CUDA kernels and their validity."""

from dataclasses import dataclass
from typing import ClassVar

from mlx_marlin.backends.cuda import limits, pipelined
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.work.tiles import PADDED_COLUMNS
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
        return self.kernel in pipelined.KERNELS

    @property
    def simdgroups(self) -> int:
        """Warps of a block."""
        if not self.is_pipelined:
            return self.simdgroups_n * self.simdgroups_k
        return pipelined.simdgroups(self.kernel, self.simdgroups_n, self.simdgroups_k)

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
        return pipelined.BARRIER_BYTES + max(scratch, self.buffers * self.stage_bytes)

    @property
    def stage_k(self) -> int:
        """K values of a stage."""
        return pipelined.STAGE_K

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return pipelined.stage_bytes(self.tile.m)

    def check(self) -> None:
        """Checks the fields and their combination."""
        if self.kernel not in OF_CUDA:
            raise ValueError(f"kernel={self.kernel!r} is not one of {OF_CUDA}")
        if self.is_pipelined:
            pipelined.check(self)
        else:
            self._check_mma()
        self._check_rows()
        if self.problem.norm is not None:
            self._check_norm()
        self.check_columns(TILE_N * self.simdgroups_n)
        self.check_bytes(limits.SHARED_LIMIT, self.stage_bytes)
        if self.has_wide_tiles:
            raise ValueError(
                f"{self.kernel} has tiles of one width, got strategy='hytis'"
            )
        self.check_tiles()
        if self.reduction == "atomic":
            raise ValueError(
                f"{self.kernel} has no atomic sums, got reduction='atomic'"
            )
        self.check_reduction()
        if self.problem.epilogue.is_paired:
            self._check_paired()
        if self.problem.invariant:
            self._check_invariant()

    def _check_mma(self) -> None:
        if (self.buffers, self.loaders) != (0, 0):
            raise ValueError(
                f"{self.kernel} has buffers=0 and loaders=0, got "
                f"buffers={self.buffers}, loaders={self.loaders}"
            )
        limits.check(self)

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
