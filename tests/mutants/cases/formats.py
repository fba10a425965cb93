"""Products with weights of every format on which a planted bug must show."""

from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mutants.cases.case import Case, cases_of
from mutants.cases.plans import in_two_slices, native, packed, problem_of

_SCALED = {"mode": "nvfp4", "global_scale": True}

FORMAT_CASES = cases_of(
    {
        "gemm, packed codes of 3 bits, groups of 64": packed(
            13, 70, 3, 64, bits=3, fragments_m=2
        ),
        "gemm, native codes of 3 bits, groups of 32": native(
            9, 45, 7, 32, bits=3, fragments_m=1
        ),
        "gemm, native codes of 5 bits, groups of 64": native(
            13, 70, 3, 64, dtype="float16", bits=5, fragments_m=1, operand="offset"
        ),
        "gemv, native codes of 6 bits, odd offsets": Case(
            plan=native(2, 33, 3, 64, bits=6), offset=3
        ),
        "gemm, packed codes of 1 bit, groups of 32": packed(
            9, 70, 5, 32, bits=1, fragments_m=2
        ),
        "gemv, native codes of 8 bits, groups of 128": native(3, 45, 3, 128, bits=8),
        "gemm, packed symmetric codes of 6 bits": packed(
            9, 70, 3, 64, mode="symmetric", bits=6, fragments_m=1
        ),
        "gemv, packed codes of 4 bits with zero points": packed(
            3, 70, 3, 64, mode="zero_point"
        ),
        "gemm, native mxfp4": native(9, 45, 5, 32, mode="mxfp4", fragments_m=2),
        "gemm, packed mxfp8, odd offsets": Case(
            plan=packed(9, 70, 5, 32, mode="mxfp8", bits=8, fragments_m=1), offset=3
        ),
        "gemm, packed nvfp4": packed(9, 70, 12, 16, mode="nvfp4", fragments_m=1),
        "gemv, native nvfp4": native(3, 45, 12, 16, mode="nvfp4"),
        "gemm, packed codes of 3 bits, groups of 16": packed(
            9, 70, 12, 16, dtype="float16", bits=3, fragments_m=2
        ),
        "gemm, packed codes of 8 bits, one group a row": packed(
            9, 70, 1, 192, bits=8, fragments_m=1
        ),
        "gemv, packed symmetric codes of 4 bits, groups of 256": packed(
            3, 45, 2, 256, mode="symmetric"
        ),
        "gemm, packed nvfp4 with a global scale, slices": in_two_slices(
            packed(9, 45, 24, 16, fragments_m=1, **_SCALED)
        ),
        "gemv, packed nvfp4 with a global scale, slices": in_two_slices(
            packed(3, 45, 24, 16, **_SCALED)
        ),
        "the weight as plain numbers, packed nvfp4 with a global scale": DequantizePlan(
            problem=problem_of(5, 45, 12, 16, "float32", "marlin", **_SCALED), chunk=32
        ),
        "gemm, packed codebook, groups of 64": packed(
            9,
            70,
            3,
            64,
            dtype="float16",
            mode="codebook",
            fragments_m=2,
            operand="offset",
        ),
        "gemv, packed codebook, odd groups of 32": packed(
            3, 45, 5, 32, mode="codebook"
        ),
        "gemv, packed codebook with super-blocks, slices": in_two_slices(
            packed(3, 45, 24, 32, mode="k_codebook")
        ),
        "the weight as plain numbers, packed codebook": DequantizePlan(
            problem=problem_of(5, 70, 3, 64, "float32", "marlin", mode="codebook"),
            chunk=32,
        ),
        "gemv, packed K-quants of 4 bits": packed(3, 45, 24, 32, mode="k_quant"),
        "gemm, packed K-quants of 5 bits, odd offsets": Case(
            plan=packed(9, 70, 16, 32, mode="k_quant", bits=5, fragments_m=2), offset=3
        ),
        "gemm, packed K-quants of 2 bits, slices": in_two_slices(
            packed(9, 70, 32, 16, mode="k_quant", bits=2, fragments_m=1)
        ),
        "gemm, packed K-quants of 6 bits, slices": in_two_slices(
            packed(9, 45, 32, 16, mode="k_quant", bits=6, fragments_m=1)
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
