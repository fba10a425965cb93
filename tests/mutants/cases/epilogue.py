"""Products with epilogues, and batches, on which a planted bug must show."""

from mlx_marlin.planning.epilogue import Epilogue
from mutants.cases.case import cases_of
from mutants.cases.plans import in_ranges, problem_of, streams, whole_tiles

_GATED = Epilogue(activation="silu", gated=True)
_ALL = Epilogue(bias=True, activation="silu", multiply=True, residual=True)

EPILOGUE_CASES = cases_of(
    {
        "gemm, with everything that an epilogue can do": whole_tiles(
            problem_of(13, 70, 3, 64, "float32", "mlx", _ALL), fragments_m=2
        ),
        "gemv, slices, everything in the reduce": in_ranges(
            problem_of(3, 70, 5, 64, "float32", "mlx", _ALL),
            (0, 1, 1, 3, 4),
            operand="exact",
        ),
        "gemv, gelu in float32": whole_tiles(
            problem_of(3, 70, 3, 64, "float32", "mlx", Epilogue(activation="gelu"))
        ),
        "gemv, approximate gelu in float32": whole_tiles(
            problem_of(
                3,
                70,
                3,
                64,
                "float32",
                "mlx",
                Epilogue(activation="gelu_approx", multiply=True),
            )
        ),
        "gemm, three results that share columns of tiles": whole_tiles(
            problem_of(
                11, 70, 3, 64, "float16", "mlx", Epilogue(bias=True, parts=(33, 5, 32))
            ),
            fragments_m=2,
        ),
        "gemv, two results, put together by the reduce": in_ranges(
            problem_of(3, 70, 5, 64, "float32", "mlx", Epilogue(parts=(7, 63))),
            (0, 1, 1, 3, 4),
            operand="exact",
        ),
        "gemv, gate and up of ragged halves": whole_tiles(
            problem_of(2, 90, 5, 64, "float32", "mlx", _GATED), simdgroups_k=4
        ),
        "gemm, packed gate and up": whole_tiles(
            problem_of(13, 128, 5, 64, "float32", "marlin", _GATED),
            fragments_m=2,
            simdgroups_k=4,
        ),
        "gemv, three products of nine tiles in slices": in_ranges(
            problem_of(2, 70, 5, 64, "float32", "mlx", batch=3),
            (0, 1, 2, 3, 7),
            operand="exact",
        ),
        "gemm, packed, three products as streams": streams(
            whole_tiles(
                problem_of(13, 40, 5, 64, "float32", "marlin", batch=3),
                fragments_m=1,
                simdgroups_k=1,
            ),
            13,
        ),
        "gemv, three products with everything that an epilogue can do": whole_tiles(
            problem_of(3, 40, 3, 64, "float32", "mlx", _ALL, batch=3)
        ),
    }
)
