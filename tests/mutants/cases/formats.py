"""Products with weights of every format on which a planted bug must show."""

from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mutants.cases.case import Case
from mutants.cases.plans import in_two_slices, problem_of, whole_tiles

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
K_GEMV = "gemv, packed K-quants of 4 bits"
K_GEMM = "gemm, packed K-quants of 5 bits, odd offsets"
K_SIXTEENS = "gemm, packed K-quants of 6 bits, slices"
DENSE = "the weight as plain numbers, native codes of 3 bits, by rows"
DENSE_BACK = "the weight as plain numbers, packed nvfp4, by columns"

FORMAT_CASES = {
    THREE_PACKED: Case(
        plan=whole_tiles(
            problem_of(13, 70, 3, 64, "float32", "marlin", bits=3), fragments_m=2
        )
    ),
    THREE_NATIVE: Case(
        plan=whole_tiles(
            problem_of(9, 45, 7, 32, "float32", "mlx", bits=3), fragments_m=1
        )
    ),
    FIVE_NATIVE: Case(
        plan=whole_tiles(
            problem_of(13, 70, 3, 64, "float16", "mlx", bits=5),
            fragments_m=1,
            subtract=False,
        )
    ),
    SIX_NATIVE: Case(
        plan=whole_tiles(problem_of(2, 33, 3, 64, "float32", "mlx", bits=6)), offset=3
    ),
    ONE_PACKED: Case(
        plan=whole_tiles(
            problem_of(9, 70, 5, 32, "float32", "marlin", bits=1), fragments_m=2
        )
    ),
    EIGHT_NATIVE: Case(
        plan=whole_tiles(problem_of(3, 45, 3, 128, "float32", "mlx", bits=8))
    ),
    SYMMETRIC: Case(
        plan=whole_tiles(
            problem_of(9, 70, 3, 64, "float32", "marlin", mode="symmetric", bits=6),
            fragments_m=1,
        )
    ),
    ZERO_POINTS: Case(
        plan=whole_tiles(
            problem_of(3, 70, 3, 64, "float32", "marlin", mode="zero_point")
        )
    ),
    MXFP4: Case(
        plan=whole_tiles(
            problem_of(9, 45, 5, 32, "float32", "mlx", mode="mxfp4"), fragments_m=2
        )
    ),
    MXFP8: Case(
        plan=whole_tiles(
            problem_of(9, 70, 5, 32, "float32", "marlin", mode="mxfp8", bits=8),
            fragments_m=1,
        ),
        offset=3,
    ),
    NVFP4: Case(
        plan=whole_tiles(
            problem_of(9, 70, 12, 16, "float32", "marlin", mode="nvfp4"), fragments_m=1
        )
    ),
    NVFP4_NATIVE: Case(
        plan=whole_tiles(problem_of(3, 45, 12, 16, "float32", "mlx", mode="nvfp4"))
    ),
    SIXTEENS: Case(
        plan=whole_tiles(
            problem_of(9, 70, 12, 16, "float16", "marlin", bits=3), fragments_m=2
        )
    ),
    WHOLE_ROWS: Case(
        plan=whole_tiles(
            problem_of(9, 70, 1, 192, "float32", "marlin", bits=8), fragments_m=1
        )
    ),
    LONG_GROUPS: Case(
        plan=whole_tiles(
            problem_of(3, 45, 2, 256, "float32", "marlin", mode="symmetric")
        )
    ),
    GLOBAL: Case(
        plan=in_two_slices(
            whole_tiles(
                problem_of(
                    9, 45, 24, 16, "float32", "marlin", mode="nvfp4", global_scale=True
                ),
                fragments_m=1,
            )
        )
    ),
    GLOBAL_GEMV: Case(
        plan=in_two_slices(
            whole_tiles(
                problem_of(
                    3, 45, 24, 16, "float32", "marlin", mode="nvfp4", global_scale=True
                )
            )
        )
    ),
    GLOBAL_DENSE: Case(
        plan=DequantizePlan(
            problem=problem_of(
                5, 45, 12, 16, "float32", "marlin", mode="nvfp4", global_scale=True
            ),
            chunk=32,
        )
    ),
    K_GEMV: Case(
        plan=whole_tiles(
            problem_of(3, 45, 24, 32, "float32", "marlin", mode="k_quant", bits=4)
        )
    ),
    K_GEMM: Case(
        plan=whole_tiles(
            problem_of(9, 70, 16, 32, "float32", "marlin", mode="k_quant", bits=5),
            fragments_m=2,
        ),
        offset=3,
    ),
    K_SIXTEENS: Case(
        plan=in_two_slices(
            whole_tiles(
                problem_of(9, 45, 32, 16, "float32", "marlin", mode="k_quant", bits=6),
                fragments_m=1,
            )
        )
    ),
    DENSE: Case(
        plan=DequantizePlan(
            problem=problem_of(5, 70, 3, 64, "float32", "mlx", bits=3), chunk=32
        )
    ),
    DENSE_BACK: Case(
        plan=DequantizePlan(
            problem=problem_of(5, 45, 12, 16, "float32", "marlin", mode="nvfp4"),
            transposed=False,
            chunk=64,
        )
    ),
}
