"""Products with weights of every format on which a planted bug must show."""

from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mutants.cases.case import Case, cases_of
from mutants.cases.plans import in_two_slices, problem_of, whole_tiles

FORMAT_CASES = cases_of(
    {
        "gemm, packed codes of 3 bits, groups of 64": whole_tiles(
            problem_of(13, 70, 3, 64, "float32", "marlin", bits=3), fragments_m=2
        ),
        "gemm, native codes of 3 bits, groups of 32": whole_tiles(
            problem_of(9, 45, 7, 32, "float32", "mlx", bits=3), fragments_m=1
        ),
        "gemm, native codes of 5 bits, groups of 64": whole_tiles(
            problem_of(13, 70, 3, 64, "float16", "mlx", bits=5),
            fragments_m=1,
            operand="offset",
        ),
        "gemv, native codes of 6 bits, odd offsets": Case(
            plan=whole_tiles(problem_of(2, 33, 3, 64, "float32", "mlx", bits=6)),
            offset=3,
        ),
        "gemm, packed codes of 1 bit, groups of 32": whole_tiles(
            problem_of(9, 70, 5, 32, "float32", "marlin", bits=1), fragments_m=2
        ),
        "gemv, native codes of 8 bits, groups of 128": whole_tiles(
            problem_of(3, 45, 3, 128, "float32", "mlx", bits=8)
        ),
        "gemm, packed symmetric codes of 6 bits": whole_tiles(
            problem_of(9, 70, 3, 64, "float32", "marlin", mode="symmetric", bits=6),
            fragments_m=1,
        ),
        "gemv, packed codes of 4 bits with zero points": whole_tiles(
            problem_of(3, 70, 3, 64, "float32", "marlin", mode="zero_point")
        ),
        "gemm, native mxfp4": whole_tiles(
            problem_of(9, 45, 5, 32, "float32", "mlx", mode="mxfp4"), fragments_m=2
        ),
        "gemm, packed mxfp8, odd offsets": Case(
            plan=whole_tiles(
                problem_of(9, 70, 5, 32, "float32", "marlin", mode="mxfp8", bits=8),
                fragments_m=1,
            ),
            offset=3,
        ),
        "gemm, packed nvfp4": whole_tiles(
            problem_of(9, 70, 12, 16, "float32", "marlin", mode="nvfp4"), fragments_m=1
        ),
        "gemv, native nvfp4": whole_tiles(
            problem_of(3, 45, 12, 16, "float32", "mlx", mode="nvfp4")
        ),
        "gemm, packed codes of 3 bits, groups of 16": whole_tiles(
            problem_of(9, 70, 12, 16, "float16", "marlin", bits=3), fragments_m=2
        ),
        "gemm, packed codes of 8 bits, one group a row": whole_tiles(
            problem_of(9, 70, 1, 192, "float32", "marlin", bits=8), fragments_m=1
        ),
        "gemv, packed symmetric codes of 4 bits, groups of 256": whole_tiles(
            problem_of(3, 45, 2, 256, "float32", "marlin", mode="symmetric")
        ),
        "gemm, packed nvfp4 with a global scale, slices": in_two_slices(
            whole_tiles(
                problem_of(
                    9, 45, 24, 16, "float32", "marlin", mode="nvfp4", global_scale=True
                ),
                fragments_m=1,
            )
        ),
        "gemv, packed nvfp4 with a global scale, slices": in_two_slices(
            whole_tiles(
                problem_of(
                    3, 45, 24, 16, "float32", "marlin", mode="nvfp4", global_scale=True
                )
            )
        ),
        "the weight as plain numbers, packed nvfp4 with a global scale": DequantizePlan(
            problem=problem_of(
                5, 45, 12, 16, "float32", "marlin", mode="nvfp4", global_scale=True
            ),
            chunk=32,
        ),
        "gemm, packed codebook, groups of 64": whole_tiles(
            problem_of(9, 70, 3, 64, "float16", "marlin", mode="codebook"),
            fragments_m=2,
            operand="offset",
        ),
        "gemv, packed codebook, odd groups of 32": whole_tiles(
            problem_of(3, 45, 5, 32, "float32", "marlin", mode="codebook")
        ),
        "gemv, packed codebook with super-blocks, slices": in_two_slices(
            whole_tiles(
                problem_of(3, 45, 24, 32, "float32", "marlin", mode="k_codebook")
            )
        ),
        "the weight as plain numbers, packed codebook": DequantizePlan(
            problem=problem_of(5, 70, 3, 64, "float32", "marlin", mode="codebook"),
            chunk=32,
        ),
        "gemv, packed K-quants of 4 bits": whole_tiles(
            problem_of(3, 45, 24, 32, "float32", "marlin", mode="k_quant", bits=4)
        ),
        "gemm, packed K-quants of 5 bits, odd offsets": Case(
            plan=whole_tiles(
                problem_of(9, 70, 16, 32, "float32", "marlin", mode="k_quant", bits=5),
                fragments_m=2,
            ),
            offset=3,
        ),
        "gemm, packed K-quants of 2 bits, slices": in_two_slices(
            whole_tiles(
                problem_of(9, 70, 32, 16, "float32", "marlin", mode="k_quant", bits=2),
                fragments_m=1,
            )
        ),
        "gemm, packed K-quants of 6 bits, slices": in_two_slices(
            whole_tiles(
                problem_of(9, 45, 32, 16, "float32", "marlin", mode="k_quant", bits=6),
                fragments_m=1,
            )
        ),
        "the weight as plain numbers, native codes of 3 bits, by rows": DequantizePlan(
            problem=problem_of(5, 70, 3, 64, "float32", "mlx", bits=3), chunk=32
        ),
        "the weight as plain numbers, packed nvfp4, by columns": DequantizePlan(
            problem=problem_of(5, 45, 12, 16, "float32", "marlin", mode="nvfp4"),
            transposed=False,
            chunk=64,
        ),
    }
)
