"""Plans on which a planted bug must show: small, ragged and awkward on purpose."""

from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_marlin.backends import launch
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning.dense_plan import DensePlan
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work import Partition, Tile, Work, data_parallel
from mlx_marlin.planning.work.tiles import Reduction, k_tile
from mlx_marlin.weights.formats import format_of
from mutants.function_cases import FUNCTION_CASES, FunctionCase
from mutants.gather_cases import GATHER_CASES, GatherCase
from mutants.repack_cases import REPACK_CASES, RepackCase
from support import drawn_arrays, epilogues, format_cases
from support.format_cases import Weight

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
STREAM = "gemv, streams in two groups, at least three k tiles each"
STREAM_GEMM = "gemm, streams of one or two k tiles"
HYBRID = "gemm, three tiles whole, the rest as streams"
HYTIS = "gemm, four simdgroups of which two stand side by side"
FUSED = "gemm, with everything that an epilogue can do"
FUSED_SPLIT = "gemv, slices, everything in the reduce"
FUSED_GELU = "gemv, gelu in float32"
FUSED_APPROX = "gemv, approximate gelu in float32"
PARTS = "gemm, three results that share columns of tiles"
PARTS_SPLIT = "gemv, two results, put together by the reduce"
ATOMIC = "gemv, atomic sums of slices"
WHOLE_GEMM = "gemm, a whole tile each, 8 columns in the last one"
THREE_PACKED = "gemm, packed codes of 3 bits, groups of 64"
THREE_NATIVE = "gemm, native codes of 3 bits, groups of 32"
FIVE_NATIVE = "gemm, native codes of 5 bits, groups of 64"
SIX_NATIVE = "gemv, native codes of 6 bits, odd offsets"
ONE_PACKED = "gemm, packed codes of 1 bit, groups of 32"
EIGHT_NATIVE = "gemv, native codes of 8 bits, groups of 128"
SYMMETRIC = "gemm, packed symmetric codes of 6 bits"
ZERO_POINTS = "gemv, packed codes of 4 bits with zero points"
MXFP4 = "gemm, native mxfp4"
MXFP8 = "gemm, packed mxfp8, odd offsets"
NVFP4 = "gemm, packed nvfp4"
NVFP4_NATIVE = "gemv, native nvfp4"
SIXTEENS = "gemm, packed codes of 3 bits, groups of 16"
WHOLE_ROWS = "gemm, packed codes of 8 bits, one group a row"
LONG_GROUPS = "gemv, packed symmetric codes of 4 bits, groups of 256"
GLOBAL = "gemm, packed nvfp4 with a global scale, slices"
GLOBAL_GEMV = "gemv, packed nvfp4 with a global scale, slices"
GLOBAL_DENSE = "the weight as plain numbers, packed nvfp4 with a global scale"
STAGED_ONE = "staged, one buffer, two simdgroups along k, slices"
STAGED_TWO = "staged, two buffers, ragged m and n, streams of one or two k tiles"
STAGED_THREE = "staged, three buffers, two loaders, packed groups of 32, streams"
STAGED_WIDE = "staged, two buffers and a loader, two simdgroups side by side"
STAGED_NVFP4 = "staged, one buffer, native nvfp4"
STAGED_GLOBAL = "staged, two buffers, packed nvfp4 with a global scale"
STAGED_LEFT_OUT = "staged, three buffers, eight rows too many"
STAGED_SCRATCH = "staged, one buffer that is smaller than the scratch"
BATCH_GEMV = "gemv, three products of nine tiles in slices"
BATCH_GEMM = "gemm, packed, three products as streams"
BATCH_FUSED = "gemv, three products with everything that an epilogue can do"
DENSE = "the weight as plain numbers, native codes of 3 bits, by rows"
DENSE_BACK = "the weight as plain numbers, packed nvfp4, by columns"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan and where its arrays begin in their buffers.

    Attributes:
        plan: What to run.
        offset: Elements before each array's first in its buffer.
    """

    plan: Plan | DensePlan
    offset: int = 0

    @property
    def planned(self) -> Plan:
        """The plan of a case that runs one of the kernels for products."""
        assert isinstance(self.plan, Plan)
        return self.plan

    def arrays(self) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Activations, and the weight in MLX's layout."""
        problem = self.plan.problem
        if (problem.mode, problem.bits) == ("affine", 4):
            return drawn_arrays.arrays(problem, seed=7)
        back = isinstance(self.plan, DensePlan) and not self.plan.transposed
        inner = problem.n if back else problem.k
        x = format_cases.activations(problem.m, inner, dtype=problem.dtype, seed=7)
        return x, drawn_arrays.weight_of(problem, seed=9).native

    def weight(self, native: tuple[mx.array, ...]) -> Weight:
        """The arrays of a weight with the case's format."""
        problem = self.plan.problem
        scale = drawn_arrays.weight_of(problem, seed=9).global_scale
        return Weight(problem.mode, problem.bits, problem.group_size, native, scale)

    def finish(self) -> drawn_arrays.Native:
        """Bias, multiplier and residual."""
        return drawn_arrays.finish_arrays(self.plan.problem, seed=8)

    def run(self, x: mx.array, native: tuple[mx.array, ...]) -> mx.array:
        """The product as the shaders compute it, [m, n], or a batch of them."""
        problem = self.plan.problem
        finish = () if problem.epilogue == PLAIN else self.finish()
        if problem.batch > 1:
            stored = drawn_arrays.stored(problem, native)
        else:
            stored = format_cases.arguments(self.weight(native), problem.layout)
        arrays = (x, *stored, *finish)
        shifted = (drawn_arrays.shifted(each, self.offset) for each in arrays)
        y = epilogues.whole(self._product()(*shifted))
        mx.eval(y)
        return y

    def _product(self) -> launch.Product:
        if isinstance(self.plan, DensePlan):
            return launch.dense_product(self.plan)
        return launch.product(self.plan)


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
    reduction: Reduction = "workspace",
) -> Plan:
    """Runs of slices."""
    plan = _whole(
        problem,
        fragments_m=fragments_m,
        simdgroups_m=simdgroups_m,
        simdgroups_k=simdgroups_k,
        subtract=subtract,
    )
    work = Work(
        strategy="stripe",
        tiles=plan.work.tiles,
        k_tiles=plan.k_tiles,
        threadgroups=num_threadgroups,
        slices=k_parallel,
        partition=partition,
    )
    return replace(plan, work=work, reduction=reduction if work.is_split else "none")


def _whole(
    problem: Problem,
    *,
    fragments_m: int = 0,
    simdgroups_m: int = 1,
    simdgroups_k: int = 2,
    subtract: bool = True,
) -> Plan:
    """Tiles one each."""
    rows = 8 * fragments_m * simdgroups_m if fragments_m else problem.m
    tile = Tile(m=rows, k=k_tile(problem.group_size))
    tiles = problem.batch * -(-problem.m // tile.m) * -(-problem.n // tile.n)
    return MetalPlan(
        problem=problem,
        kernel="gemm_register" if fragments_m else "gemv",
        tile=tile,
        fragments_m=fragments_m,
        simdgroups_m=simdgroups_m,
        simdgroups_k=simdgroups_k,
        work=data_parallel(tiles, -(-problem.k // tile.k)),
        subtract=subtract,
    )


def _slices(plan: Plan) -> Plan:
    """Every tile in two."""
    work = replace(
        plan.work,
        strategy="split_k",
        threadgroups=2 * plan.work.tiles,
        whole=0,
        slices=2,
    )
    return replace(plan, work=work, reduction="workspace")


def _staged(plan: Plan, buffers: int, loaders: int = 0) -> Plan:
    return replace(plan, kernel="gemm_staged", buffers=buffers, loaders=loaders)


def _streams(
    plan: Plan, threadgroups: int, *, whole: int = 0, minimum: int = 1, groups: int = 1
) -> Plan:
    work = Work(
        strategy="hybrid" if whole else "stream_k",
        tiles=plan.work.tiles,
        k_tiles=plan.k_tiles,
        threadgroups=threadgroups,
        whole=whole,
        slices=plan.k_tiles,
        minimum=minimum,
        groups=groups,
    )
    return replace(plan, work=work, reduction="workspace")


def _wide(plan: Plan, columns: int, *, simdgroups_n: int) -> Plan:
    """So many columns of wide tiles, then narrow ones."""
    whole = columns * plan.m_tiles
    tiles = whole + plan.m_tiles * (plan.n_tiles - columns * simdgroups_n)
    work = data_parallel(tiles, plan.k_tiles)
    work = replace(work, strategy="hytis", whole=whole)
    return replace(plan, work=work, simdgroups_n=simdgroups_n)


def _problem(
    m: int,
    n: int,
    groups: int,
    group_size: int,
    dtype: str,
    layout: str,
    epilogue: Epilogue = PLAIN,
    *,
    mode: str = "affine",
    bits: int = 4,
    global_scale: bool = False,
    batch: int = 1,
) -> Problem:
    floating = format_of(mode, bits).codes == "floating"
    return Problem(
        m=m,
        n=n,
        k=groups * group_size,
        batch=batch,
        group_size=group_size,
        bits=bits,
        mode=mode,
        dtype=dtype,
        scale_dtype="uint8" if floating else dtype,
        layout=layout,
        epilogue=epilogue,
        global_scale=global_scale,
    )


# Seven groups of 32: the last k tile is half. Slices of one and of two tiles.
_TAIL_PACKED = _problem(3, 70, 7, 32, "float16", "marlin")
_TAIL_NATIVE = _problem(13, 70, 7, 32, "bfloat16", "mlx")
_WIDE_GROUPS = _problem(27, 70, 5, 128, "float16", "marlin")
_MANY_GROUPS = _problem(2, 70, 9, 64, "bfloat16", "mlx")
_ALL = Epilogue(bias=True, activation="silu", multiply=True, residual=True)

CASES: dict[str, Case | RepackCase | GatherCase | FunctionCase] = {
    **FUNCTION_CASES,
    **GATHER_CASES,
    **REPACK_CASES,
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
            k_parallel=4,
            num_threadgroups=5,
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
            num_threadgroups=6,
            subtract=True,
        )
    ),
    # 6 tiles of 9 k tiles; a group would be cut at 5, 10, 16, 21: 10 and 16 snap.
    STREAM: Case(
        plan=_streams(
            _whole(_problem(3, 190, 9, 64, "float32", "mlx")), 10, minimum=3, groups=2
        )
    ),
    STREAM_GEMM: Case(
        plan=_streams(
            _whole(
                _problem(13, 70, 5, 64, "float32", "mlx"), fragments_m=1, simdgroups_k=1
            ),
            19,
        )
    ),
    HYBRID: Case(
        plan=_streams(
            _whole(_problem(13, 190, 5, 64, "float32", "marlin"), fragments_m=2),
            8,
            whole=3,
        )
    ),
    HYTIS: Case(
        plan=_wide(
            _whole(
                _problem(13, 190, 7, 64, "float32", "mlx"),
                fragments_m=1,
                simdgroups_k=4,
            ),
            2,
            simdgroups_n=2,
        )
    ),
    FUSED: Case(
        plan=_whole(_problem(13, 70, 3, 64, "float32", "mlx", _ALL), fragments_m=2)
    ),
    FUSED_SPLIT: Case(
        plan=_plan(
            _problem(3, 70, 5, 64, "float32", "mlx", _ALL),
            fragments_m=0,
            simdgroups_m=1,
            simdgroups_k=1,
            k_parallel=3,
            num_threadgroups=4,
            subtract=True,
        )
    ),
    FUSED_GELU: Case(
        plan=_whole(
            _problem(3, 70, 3, 64, "float32", "mlx", Epilogue(activation="gelu"))
        )
    ),
    FUSED_APPROX: Case(
        plan=_whole(
            _problem(
                3,
                70,
                3,
                64,
                "float32",
                "mlx",
                Epilogue(activation="gelu_approx", multiply=True),
            )
        )
    ),
    PARTS: Case(
        plan=_whole(
            _problem(
                11, 70, 3, 64, "float16", "mlx", Epilogue(bias=True, parts=(33, 5, 32))
            ),
            fragments_m=2,
        )
    ),
    PARTS_SPLIT: Case(
        plan=_plan(
            _problem(3, 70, 5, 64, "float32", "mlx", Epilogue(parts=(7, 63))),
            fragments_m=0,
            simdgroups_m=1,
            simdgroups_k=1,
            k_parallel=3,
            num_threadgroups=4,
            subtract=True,
        )
    ),
    ATOMIC: Case(
        plan=_plan(
            _problem(3, 70, 5, 64, "float32", "mlx"),
            fragments_m=0,
            simdgroups_m=1,
            simdgroups_k=2,
            k_parallel=3,
            num_threadgroups=11,
            subtract=True,
            reduction="atomic",
        )
    ),
    # 40 columns: the last tile has one row fragment of w, and three too many.
    WHOLE_GEMM: Case(
        plan=_whole(_problem(13, 40, 3, 64, "float16", "marlin"), fragments_m=2)
    ),
    THREE_PACKED: Case(
        plan=_whole(_problem(13, 70, 3, 64, "float32", "marlin", bits=3), fragments_m=2)
    ),
    THREE_NATIVE: Case(
        plan=_whole(_problem(9, 45, 7, 32, "float32", "mlx", bits=3), fragments_m=1)
    ),
    FIVE_NATIVE: Case(
        plan=_whole(
            _problem(13, 70, 3, 64, "float16", "mlx", bits=5),
            fragments_m=1,
            subtract=False,
        )
    ),
    SIX_NATIVE: Case(
        plan=_whole(_problem(2, 33, 3, 64, "float32", "mlx", bits=6)), offset=3
    ),
    ONE_PACKED: Case(
        plan=_whole(_problem(9, 70, 5, 32, "float32", "marlin", bits=1), fragments_m=2)
    ),
    EIGHT_NATIVE: Case(plan=_whole(_problem(3, 45, 3, 128, "float32", "mlx", bits=8))),
    SYMMETRIC: Case(
        plan=_whole(
            _problem(9, 70, 3, 64, "float32", "marlin", mode="symmetric", bits=6),
            fragments_m=1,
        )
    ),
    ZERO_POINTS: Case(
        plan=_whole(_problem(3, 70, 3, 64, "float32", "marlin", mode="zero_point"))
    ),
    MXFP4: Case(
        plan=_whole(
            _problem(9, 45, 5, 32, "float32", "mlx", mode="mxfp4"), fragments_m=2
        )
    ),
    MXFP8: Case(
        plan=_whole(
            _problem(9, 70, 5, 32, "float32", "marlin", mode="mxfp8", bits=8),
            fragments_m=1,
        ),
        offset=3,
    ),
    NVFP4: Case(
        plan=_whole(
            _problem(9, 70, 12, 16, "float32", "marlin", mode="nvfp4"), fragments_m=1
        )
    ),
    NVFP4_NATIVE: Case(
        plan=_whole(_problem(3, 45, 12, 16, "float32", "mlx", mode="nvfp4"))
    ),
    SIXTEENS: Case(
        plan=_whole(_problem(9, 70, 12, 16, "float16", "marlin", bits=3), fragments_m=2)
    ),
    WHOLE_ROWS: Case(
        plan=_whole(_problem(9, 70, 1, 192, "float32", "marlin", bits=8), fragments_m=1)
    ),
    LONG_GROUPS: Case(
        plan=_whole(_problem(3, 45, 2, 256, "float32", "marlin", mode="symmetric"))
    ),
    GLOBAL: Case(
        plan=_slices(
            _whole(
                _problem(
                    9, 45, 24, 16, "float32", "marlin", mode="nvfp4", global_scale=True
                ),
                fragments_m=1,
            )
        )
    ),
    GLOBAL_GEMV: Case(
        plan=_slices(
            _whole(
                _problem(
                    3, 45, 24, 16, "float32", "marlin", mode="nvfp4", global_scale=True
                )
            )
        )
    ),
    GLOBAL_DENSE: Case(
        plan=DensePlan(
            problem=_problem(
                5, 45, 12, 16, "float32", "marlin", mode="nvfp4", global_scale=True
            ),
            chunk=32,
        )
    ),
    STAGED_ONE: Case(
        plan=_staged(
            _plan(
                _problem(13, 70, 7, 64, "float32", "mlx"),
                fragments_m=1,
                simdgroups_m=2,
                simdgroups_k=2,
                k_parallel=3,
                num_threadgroups=4,
                subtract=True,
            ),
            1,
        )
    ),
    STAGED_TWO: Case(
        plan=_staged(
            _streams(
                _whole(
                    _problem(27, 70, 5, 64, "float32", "mlx"),
                    fragments_m=2,
                    simdgroups_m=2,
                    simdgroups_k=1,
                ),
                7,
            ),
            2,
        )
    ),
    STAGED_THREE: Case(
        plan=_staged(
            _streams(
                _whole(
                    _problem(27, 70, 23, 32, "float16", "marlin"),
                    fragments_m=2,
                    simdgroups_m=2,
                    simdgroups_k=2,
                    subtract=False,
                ),
                7,
            ),
            3,
            2,
        )
    ),
    STAGED_WIDE: Case(
        plan=_staged(
            _wide(
                _whole(_problem(13, 190, 7, 64, "float16", "mlx"), fragments_m=1),
                2,
                simdgroups_n=2,
            ),
            2,
            1,
        )
    ),
    STAGED_NVFP4: Case(
        plan=_staged(
            _whole(
                _problem(9, 70, 12, 16, "float32", "mlx", mode="nvfp4"), fragments_m=1
            ),
            1,
        )
    ),
    STAGED_GLOBAL: Case(
        plan=_staged(
            _whole(
                _problem(
                    9,
                    70,
                    12,
                    16,
                    "float16",
                    "marlin",
                    mode="nvfp4",
                    global_scale=True,
                ),
                fragments_m=1,
            ),
            2,
        )
    ),
    STAGED_LEFT_OUT: Case(
        plan=_staged(
            _whole(
                _problem(24, 32, 8, 64, "float16", "marlin"),
                fragments_m=2,
                simdgroups_m=2,
                simdgroups_k=1,
            ),
            3,
        )
    ),
    # 64 rows of 36 floats, and 6144 bytes of a stage.
    STAGED_SCRATCH: Case(
        plan=_staged(
            _whole(
                _problem(57, 32, 3, 32, "float16", "marlin"),
                fragments_m=2,
                simdgroups_m=4,
                simdgroups_k=1,
            ),
            1,
        )
    ),
    BATCH_GEMV: Case(
        plan=_plan(
            _problem(2, 70, 5, 64, "float32", "mlx", batch=3),
            fragments_m=0,
            simdgroups_m=1,
            simdgroups_k=2,
            k_parallel=3,
            num_threadgroups=7,
            subtract=True,
        )
    ),
    BATCH_GEMM: Case(
        plan=_streams(
            _whole(
                _problem(13, 40, 5, 64, "float32", "marlin", batch=3),
                fragments_m=1,
                simdgroups_k=1,
            ),
            13,
        )
    ),
    BATCH_FUSED: Case(
        plan=_whole(_problem(3, 40, 3, 64, "float32", "mlx", _ALL, batch=3))
    ),
    DENSE: Case(
        plan=DensePlan(
            problem=_problem(5, 70, 3, 64, "float32", "mlx", bits=3), chunk=32
        )
    ),
    DENSE_BACK: Case(
        plan=DensePlan(
            problem=_problem(5, 45, 12, 16, "float32", "marlin", mode="nvfp4"),
            transposed=False,
            chunk=64,
        )
    ),
}
