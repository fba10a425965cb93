"""Plans of the Metal kernels and their validity.

`gemm_staged` stays until a Mac has decided about it: a tuner compares it, and it is
never a candidate. Metal has no asynchronous copy, so simdgroups load a stage into
registers, decode it and write it to threadgroup memory; a barrier makes it readable.
With b buffers, stage s uses buffer s % b. While stage s is multiplied, stage s + b - 1
is loaded into the buffer of the previous stage. With one buffer, loading and
multiplying alternate, with a barrier between them. For three buffers:

    3 buffers        phase 0   phase 1   phase 2   phase 3
    loaded           0, 1      2         3         4
    into buffer      0, 1      2         0         1
    multiplied                 0         1         2
    out of buffer              0         1         2

`shaders/lib/gemm_staged.metal` uses the same names.
"""

from dataclasses import dataclass
from typing import ClassVar

from mlx_marlin.backends.metal.kernel_limits import (
    FRAGMENTS_M,
    GEMV_ROWS,
    KERNELS,
    MAX_SIMDGROUPS,
    NORM_ROWS,
    TENSOR_FRAGMENTS_M,
    TENSOR_KERNEL,
    TENSOR_REGISTERS,
    TENSOR_ROUND_ROWS,
    THREADGROUP_LIMIT,
    THREE_FRAGMENTS_M,
    operand_reason,
    product_registers,
)
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import FRAGMENT, PADDED_COLUMNS, step_k
from mlx_marlin.weights.formats import TILE_N

BUFFERS = (1, 2, 3)
"""Supported numbers of buffers; four of 64 x 64 x 32 halves would fill the memory."""


def buffer_bytes(m: int, n: int, k: int, element: int) -> int:
    """Returns the bytes of a buffer.

    `element`: bytes of a value.
    """
    return (m + n) * k * element


def barriers(stages: int, buffers: int) -> int:
    """Returns the number of phases of a split, each of which ends with a barrier."""
    return stages * (2 if buffers == 1 else 1) + (buffers > 1)


def columns_of_tile(problem: Problem) -> int:
    """Returns the rows of w in a tile: with a gated epilogue, those of gate and up."""
    return 2 * TILE_N if problem.epilogue.gated else TILE_N


def splits_packed_tile(problem: Problem) -> bool:
    """Returns whether a half of the rows of a packed weight ends inside a tile."""
    return problem.layout == "marlin" and problem.n % (2 * TILE_N) != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetalPlan(Plan):
    """How a product is computed on an Apple GPU.

    The kernel is "gemv" (dot products, few rows), "gemm_register" (8x8 matrices),
    "gemm_staged" (8x8 matrices from threadgroup memory) or "gemm_tensor" (tensor
    operations of 16 rows, one or two a simdgroup). In a wide tile of `hytis`,
    `simdgroups_n` of the simdgroups along k are side by side along n instead; in other
    tiles it is 1. With a gated epilogue it is 2: half of the simdgroups compute a tile
    of gate, the others the same columns of up. A stage of `gemm_staged` holds x and
    decoded w.
    """

    backend: ClassVar[str] = "metal"

    simdgroups_m: int = 1  # Simdgroups side by side along the rows
    operand: CodeForm = "offset"  # The form of codes that lanes multiply

    @property
    def has_tensor_operations(self) -> bool:
        """Whether the first kernel is `gemm_tensor`."""
        return self.kernel == TENSOR_KERNEL

    @property
    def row_limit(self) -> int | None:  # noqa: D102
        is_limited = self.kernel == "gemv" or self.fragments_m == THREE_FRAGMENTS_M
        return self.tile.m if is_limited else None

    @property
    def simdgroup_grid(self) -> tuple[int, int, int]:
        """Simdgroups of a threadgroup along m, n and k."""
        return self.simdgroups_m, self.simdgroups_n, self.simdgroups_k

    @property
    def simdgroups(self) -> int:
        """Simdgroups of a threadgroup."""
        return self.simdgroups_m * self.simdgroups_k + self.loaders

    @property
    def threadgroup_bytes(self) -> int:
        """Bytes of threadgroup memory.

        The epilogue's float32 scratch and the stages share the same memory.
        """
        if self.has_tensor_operations:
            return 4 * self.simdgroups * TENSOR_ROUND_ROWS * self.tile.n
        scratch = self.simdgroups_k * self.tile.m * PADDED_COLUMNS * 4
        return max(scratch, self.buffers * self.stage_bytes)

    @property
    def stage_k(self) -> int:
        """K values of a stage: one step for each simdgroup along k."""
        return step_k(self.problem.group_size) * self.simdgroups_k

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage of a narrow tile; that of a wide tile is not larger."""
        if not self.buffers:
            return 0
        element = self.problem.fragment_bytes
        return buffer_bytes(self.tile.m, self.tile.n, self.stage_k, element)

    @property
    def registers(self) -> int:
        """32-bit registers of a thread of the first kernel (counted).

        `gemm_staged` counts as `gemm_register`.
        """
        if self.has_tensor_operations:
            return TENSOR_REGISTERS[self.fragments_m]
        fields = self.problem, self.fragments_m, self.operand
        return product_registers(*fields, has_ranges=not self.is_whole)

    def check(self) -> None:
        """Checks the fields and their combination."""
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel={self.kernel!r} is not one of {KERNELS}")
        if self.kernel == "gemm_staged":
            self._check_staging()
        else:
            self.check_unstaged()
        if self.has_tensor_operations:
            self._check_tensor()
        if self.kernel == "gemv":
            self._check_gemv()
        else:
            self._check_gemm()
        reason = operand_reason(self.problem, self.operand, self.kernel)
        if reason is not None:
            raise ValueError(f"operand={self.operand!r} {reason}")
        if self.problem.norm is not None:
            self._check_norm()
        if self.problem.epilogue.is_paired:
            self._check_paired()
        self._check_threadgroup()
        self._check_width()
        self.check_work()
        if self.problem.invariant:
            self._check_invariant()

    def _simdgroups(self) -> str:
        return f"{self.simdgroups_m}x{self.simdgroups_k} simdgroups (m x k)"

    def _check_staging(self) -> None:
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
        limit = GEMV_ROWS[self.problem.dtype]
        if self.problem.m > limit:
            raise ValueError(
                f"gemv takes at most {limit} rows of {self.problem.dtype}, "
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

    def _check_tensor(self) -> None:
        reason = tensor_reason(self.problem)
        if reason is not None:
            raise ValueError(f"kernel='gemm_tensor': {reason}")
        if self.has_wide_tiles:
            raise ValueError(
                f"gemm_tensor has tiles of one width, got "
                f"strategy={self.work.strategy!r}"
            )

    def _check_gemm(self) -> None:
        allowed = TENSOR_FRAGMENTS_M if self.has_tensor_operations else FRAGMENTS_M
        if self.kernel == "gemm_register" and self.fragments_m == THREE_FRAGMENTS_M:
            self._check_three()
        elif self.fragments_m not in allowed:
            raise ValueError(
                f"{self.kernel}: fragments_m={self.fragments_m} is not one of {allowed}"
            )
        rows = FRAGMENT * self.fragments_m * self.simdgroups_m
        if self.tile.m != rows:
            raise ValueError(
                f"fragments_m={self.fragments_m} and simdgroups_m={self.simdgroups_m} "
                f"make tiles of {rows} rows, got tile.m={self.tile.m}"
            )

    def _check_three(self) -> None:
        rows = FRAGMENT * THREE_FRAGMENTS_M
        if self.simdgroups_m != 1 or not rows - FRAGMENT < self.problem.m <= rows:
            raise ValueError(
                f"fragments_m={THREE_FRAGMENTS_M} needs simdgroups_m=1 and "
                f"{rows - FRAGMENT + 1} to {rows} rows, got simdgroups_m="
                f"{self.simdgroups_m}, m={self.problem.m}"
            )

    def _check_threadgroup(self) -> None:
        self.check_columns(columns_of_tile(self.problem))
        if self.simdgroups_m < 1 or self.simdgroups_k < 1:
            raise ValueError(
                f"simdgroups_m={self.simdgroups_m} and simdgroups_k="
                f"{self.simdgroups_k} must be at least 1"
            )
        if self.simdgroups > MAX_SIMDGROUPS:
            further = f" and loaders={self.loaders}" if self.loaders else ""
            raise ValueError(
                f"simdgroups_m={self.simdgroups_m} x simdgroups_k={self.simdgroups_k}"
                f"{further} is more than {MAX_SIMDGROUPS} simdgroups in a threadgroup"
            )
        self.check_bytes(THREADGROUP_LIMIT, self.stage_bytes)

    def _check_width(self) -> None:
        wide = self.has_wide_tiles
        if self.problem.epilogue.gated:
            if self.simdgroups_n != 2 or self.simdgroups_k % 2:
                raise ValueError(
                    f"simdgroups_n={self.simdgroups_n} and simdgroups_k="
                    f"{self.simdgroups_k}, expected 2 and an even number: half of the "
                    f"simdgroups multiply by gate"
                )
        elif (
            self.simdgroups_n < 1
            or wide != (self.simdgroups_n > 1)
            or self.simdgroups_k % self.simdgroups_n
        ):
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

    def _check_norm(self) -> None:
        if (
            self.kernel != "gemv"
            or self.problem.m > NORM_ROWS
            or self.work.strategy != "data_parallel"
        ):
            raise ValueError(
                f"norm={self.problem.norm} needs gemv, at most {NORM_ROWS} rows and "
                f"strategy='data_parallel', got kernel={self.kernel!r}, "
                f"m={self.problem.m}, strategy={self.work.strategy!r}"
            )

    def _check_paired(self) -> None:
        epilogue = self.problem.epilogue
        if epilogue.rotation is not None:
            raise ValueError(
                f"rotation={epilogue.rotation} needs a CUDA kernel, which has both "
                f"columns of a pair in a threadgroup, got kernel={self.kernel!r}"
            )
        if (
            self.kernel not in ("gemv", "gemm_register")
            or self.work.strategy != "data_parallel"
        ):
            raise ValueError(
                f"gated=True needs gemv or gemm_register, and "
                f"strategy='data_parallel', got kernel={self.kernel!r}, "
                f"strategy={self.work.strategy!r}"
            )
        if splits_packed_tile(self.problem):
            raise ValueError(
                f"gated=True needs a packed weight whose halves are whole tiles, got "
                f"n={self.problem.n}"
            )

    def _check_invariant(self) -> None:
        supported = (
            self.kernel == "gemm_register"
            and self.operand == "exact"
            and self.reduction != "atomic"
            and self.work.strategy in ("data_parallel", "split_k")
        )
        if not supported:
            raise ValueError(
                "invariant=True needs gemm_register, operand='exact', and "
                "data_parallel or split_k without atomics, got "
                f"kernel={self.kernel!r}, operand={self.operand!r}, "
                f"strategy={self.work.strategy!r}, reduction={self.reduction!r}"
            )


def tensor_reason(problem: Problem) -> str | None:
    """Returns why `gemm_tensor` cannot compute a product, or None."""
    if problem.epilogue.gated:
        return "tensor operations have no gated epilogue"
    if problem.dtype == "float32":
        return "tensor operations round float32 operands, expected float16 or bfloat16"
    if problem.widens:
        return f"no half holds the weights of {problem.mode} in groups of 16"
    return None
