"""Plans on which a planted bug must show: small, ragged and awkward on purpose."""

from dataclasses import dataclass

import mlx.core as mx
import strategies

from mlx_marlin import launch
from mlx_marlin.packing import pack
from mlx_marlin.plan import Partition, Plan, Tile
from mlx_marlin.problem import Problem

GEMV_TAIL = "gemv, packed groups of 32, k tail, slices"
GEMV_NATIVE = "gemv, native groups of 64, nine tiles in four slices"
GEMV_IDLE = "gemv, packed float32, idle threadgroups, whole k"
GEMM_PACKED = "gemm, packed groups of 128, ragged m, slices"
GEMM_TAIL = "gemm, native groups of 32, k tail, two tiles of m"
GEMM_IDLE = "gemm, native float32, idle threadgroups, slices"
GEMM_NATIVE = "gemm, native groups of 128, ragged m, whole k"
ODD_PACKED = "gemm, packed, odd offsets"
ODD_NATIVE = "gemm, native, odd offsets"
ODD_BFLOAT = "gemv, bfloat16, odd offsets"
GEMM_LEFT_OUT = "gemm, eight rows too many"
THIRDS = "gemm, seven groups of 128 for three slices of three simdgroups"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan and where its arrays begin in their buffers.

    Attributes:
        plan: What to run.
        offset: Elements before each array's first in its buffer.
    """

    plan: Plan
    offset: int = 0

    def arrays(self) -> tuple[mx.array, strategies.Native]:
        """Activations, and the weight in MLX's layout."""
        return strategies.arrays(self.plan.problem, seed=7)

    def run(self, x: mx.array, native: strategies.Native) -> mx.array:
        """The product as the shaders compute it, [m, n]."""
        y = launch.product(self.plan)(
            self._shifted(x), *map(self._shifted, self._stored(native))
        )
        mx.eval(y)
        return y

    def _stored(self, native: strategies.Native) -> strategies.Native:
        if self.plan.problem.layout == "mlx":
            return native
        packed = pack(*native, group_size=self.plan.problem.group_size)
        return packed.words, packed.scales, packed.scales

    def _shifted(self, array: mx.array) -> mx.array:
        if not self.offset:
            return array
        padding = mx.zeros(self.offset, array.dtype)
        moved = mx.concatenate([padding, array.flatten()])[self.offset :]
        return moved.reshape(array.shape)


def _plan(
    problem: Problem,
    *,
    fragments_m: int,
    simdgroups_m: int,
    simdgroups_k: int,
    k_parallel: int,
    num_threadgroups: int,
    partition: Partition = "balanced",
    subtract: bool = False,
) -> Plan:
    rows = 8 * fragments_m * simdgroups_m if fragments_m else problem.m
    return Plan(
        problem=problem,
        kernel="gemm_register" if fragments_m else "gemv",
        tile=Tile(m=rows),
        fragments_m=fragments_m,
        simdgroups_m=simdgroups_m,
        simdgroups_k=simdgroups_k,
        k_parallel=k_parallel,
        num_threadgroups=num_threadgroups,
        partition=partition,
        subtract=subtract,
    )


def _problem(
    m: int, n: int, groups: int, group_size: int, dtype: str, layout: str
) -> Problem:
    return Problem(
        m=m,
        n=n,
        k=groups * group_size,
        group_size=group_size,
        dtype=dtype,
        scale_dtype=dtype,
        layout=layout,
    )


# Seven groups of 32: the last k tile is half. Slices of one and of two tiles.
_TAIL_PACKED = _problem(3, 70, 7, 32, "float16", "marlin")
_TAIL_NATIVE = _problem(13, 70, 7, 32, "bfloat16", "mlx")
_WIDE_GROUPS = _problem(27, 70, 5, 128, "float16", "marlin")
_MANY_GROUPS = _problem(2, 70, 9, 64, "bfloat16", "mlx")

CASES: dict[str, Case] = {
    GEMV_TAIL: Case(
        plan=_plan(
            _TAIL_PACKED,
            fragments_m=0,
            simdgroups_m=1,
            simdgroups_k=2,
            k_parallel=3,
            num_threadgroups=2,
        )
    ),
    GEMV_NATIVE: Case(
        plan=_plan(
            _MANY_GROUPS,
            fragments_m=0,
            simdgroups_m=1,
            simdgroups_k=2,
            k_parallel=4,
            num_threadgroups=5,
        )
    ),
    GEMV_IDLE: Case(
        plan=_plan(
            _problem(3, 100, 3, 64, "float32", "marlin"),
            fragments_m=0,
            simdgroups_m=1,
            simdgroups_k=3,
            k_parallel=1,
            num_threadgroups=3,
            partition="ceil",
            subtract=True,
        )
    ),
    GEMM_PACKED: Case(
        plan=_plan(
            _WIDE_GROUPS,
            fragments_m=2,
            simdgroups_m=2,
            simdgroups_k=2,
            k_parallel=3,
            num_threadgroups=2,
        )
    ),
    GEMM_TAIL: Case(
        plan=_plan(
            _TAIL_NATIVE,
            fragments_m=1,
            simdgroups_m=1,
            simdgroups_k=2,
            k_parallel=1,
            num_threadgroups=4,
        )
    ),
    GEMM_IDLE: Case(
        plan=_plan(
            _problem(9, 70, 5, 64, "float32", "mlx"),
            fragments_m=2,
            simdgroups_m=1,
            simdgroups_k=2,
            k_parallel=2,
            num_threadgroups=4,
            partition="ceil",
            subtract=True,
        )
    ),
    GEMM_NATIVE: Case(
        plan=_plan(
            _problem(13, 70, 3, 128, "bfloat16", "mlx"),
            fragments_m=2,
            simdgroups_m=1,
            simdgroups_k=2,
            k_parallel=1,
            num_threadgroups=2,
        )
    ),
    ODD_PACKED: Case(
        plan=_plan(
            _problem(6, 33, 3, 64, "float16", "marlin"),
            fragments_m=1,
            simdgroups_m=1,
            simdgroups_k=1,
            k_parallel=1,
            num_threadgroups=2,
        ),
        offset=3,
    ),
    ODD_NATIVE: Case(
        plan=_plan(
            _problem(6, 33, 3, 64, "float32", "mlx"),
            fragments_m=1,
            simdgroups_m=1,
            simdgroups_k=1,
            k_parallel=1,
            num_threadgroups=2,
        ),
        offset=3,
    ),
    ODD_BFLOAT: Case(
        plan=_plan(
            _problem(2, 33, 3, 64, "bfloat16", "mlx"),
            fragments_m=0,
            simdgroups_m=1,
            simdgroups_k=1,
            k_parallel=1,
            num_threadgroups=2,
        ),
        offset=3,
    ),
    GEMM_LEFT_OUT: Case(
        plan=_plan(
            _problem(24, 32, 4, 64, "float16", "marlin"),
            fragments_m=2,
            simdgroups_m=2,
            simdgroups_k=1,
            k_parallel=1,
            num_threadgroups=1,
        )
    ),
    THIRDS: Case(
        plan=_plan(
            _problem(13, 33, 7, 128, "float32", "mlx"),
            fragments_m=2,
            simdgroups_m=1,
            simdgroups_k=3,
            k_parallel=3,
            num_threadgroups=4,
            subtract=True,
        )
    ),
}
