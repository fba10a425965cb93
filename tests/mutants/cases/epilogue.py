"""Products with epilogues, and batches, on which a planted bug must show."""

from mlx_marlin.planning.epilogue import Epilogue
from mutants.cases.case import Case
from mutants.cases.plans import in_ranges, problem_of, streams, whole_tiles

FUSED = "gemm, with everything that an epilogue can do"
FUSED_SPLIT = "gemv, slices, everything in the reduce"
FUSED_GELU = "gemv, gelu in float32"
FUSED_APPROX = "gemv, approximate gelu in float32"
PARTS = "gemm, three results that share columns of tiles"
PARTS_SPLIT = "gemv, two results, put together by the reduce"
GATED_GEMV = "gemv, gate and up of ragged halves"
GATED_GEMM = "gemm, packed gate and up"
BATCH_GEMV = "gemv, three products of nine tiles in slices"
BATCH_GEMM = "gemm, packed, three products as streams"
BATCH_FUSED = "gemv, three products with everything that an epilogue can do"

_GATED = Epilogue(activation="silu", gated=True)
_ALL = Epilogue(bias=True, activation="silu", multiply=True, residual=True)

EPILOGUE_CASES = {
    FUSED: Case(
        plan=whole_tiles(
            problem_of(13, 70, 3, 64, "float32", "mlx", _ALL), fragments_m=2
        )
    ),
    FUSED_SPLIT: Case(
        plan=in_ranges(
            problem_of(3, 70, 5, 64, "float32", "mlx", _ALL),
            fragments_m=0,
            simdgroups_m=1,
            simdgroups_k=1,
            k_parallel=3,
            num_threadgroups=4,
            subtract=True,
        )
    ),
    FUSED_GELU: Case(
        plan=whole_tiles(
            problem_of(3, 70, 3, 64, "float32", "mlx", Epilogue(activation="gelu"))
        )
    ),
    FUSED_APPROX: Case(
        plan=whole_tiles(
            problem_of(
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
        plan=whole_tiles(
            problem_of(
                11, 70, 3, 64, "float16", "mlx", Epilogue(bias=True, parts=(33, 5, 32))
            ),
            fragments_m=2,
        )
    ),
    PARTS_SPLIT: Case(
        plan=in_ranges(
            problem_of(3, 70, 5, 64, "float32", "mlx", Epilogue(parts=(7, 63))),
            fragments_m=0,
            simdgroups_m=1,
            simdgroups_k=1,
            k_parallel=3,
            num_threadgroups=4,
            subtract=True,
        )
    ),
    GATED_GEMV: Case(
        plan=whole_tiles(
            problem_of(2, 90, 5, 64, "float32", "mlx", _GATED), simdgroups_k=4
        )
    ),
    GATED_GEMM: Case(
        plan=whole_tiles(
            problem_of(13, 128, 5, 64, "float32", "marlin", _GATED),
            fragments_m=2,
            simdgroups_k=4,
        )
    ),
    BATCH_GEMV: Case(
        plan=in_ranges(
            problem_of(2, 70, 5, 64, "float32", "mlx", batch=3),
            fragments_m=0,
            simdgroups_m=1,
            simdgroups_k=2,
            k_parallel=3,
            num_threadgroups=7,
            subtract=True,
        )
    ),
    BATCH_GEMM: Case(
        plan=streams(
            whole_tiles(
                problem_of(13, 40, 5, 64, "float32", "marlin", batch=3),
                fragments_m=1,
                simdgroups_k=1,
            ),
            13,
        )
    ),
    BATCH_FUSED: Case(
        plan=whole_tiles(problem_of(3, 40, 3, 64, "float32", "mlx", _ALL, batch=3))
    ),
}
