"""Products of whole, ragged and split tiles on which a planted bug must show."""

from mutants.cases.case import Case, cases_of
from mutants.cases.plans import in_ranges, problem_of, streams, whole_tiles, wide_tiles

# Seven groups of 32: the last k tile is half. Slices of one and of two tiles.
_TAIL_PACKED = problem_of(3, 70, 7, 32, "float16", "marlin")
_TAIL_NATIVE = problem_of(13, 70, 7, 32, "bfloat16", "mlx")
_WIDE_GROUPS = problem_of(27, 70, 5, 128, "float16", "marlin")
_MANY_GROUPS = problem_of(2, 70, 9, 64, "bfloat16", "mlx")

PRODUCT_CASES = cases_of(
    {
        "gemv, packed groups of 32, k tail, slices": in_ranges(
            _TAIL_PACKED, (0, 1, 2, 3, 2)
        ),
        "gemv, native groups of 64, nine tiles in four slices": in_ranges(
            _MANY_GROUPS, (0, 1, 2, 4, 5)
        ),
        "gemv, packed float32, idle threadgroups, whole k": in_ranges(
            problem_of(3, 100, 3, 64, "float32", "marlin"),
            (0, 1, 3, 1, 3),
            partition="ceil",
            operand="exact",
        ),
        "gemm, packed groups of 128, ragged m, slices": in_ranges(
            _WIDE_GROUPS, (2, 2, 2, 3, 2)
        ),
        "gemm, native groups of 32, k tail, two tiles of m": in_ranges(
            _TAIL_NATIVE, (1, 1, 2, 1, 4)
        ),
        "gemm, native float32, idle threadgroups, slices": in_ranges(
            problem_of(9, 70, 5, 64, "float32", "mlx"),
            (2, 1, 2, 4, 5),
            partition="ceil",
            operand="exact",
        ),
        "gemm, native groups of 128, ragged m, whole k": in_ranges(
            problem_of(13, 70, 3, 128, "bfloat16", "mlx"), (2, 1, 2, 1, 2)
        ),
        "gemm, packed, odd offsets": Case(
            plan=in_ranges(
                problem_of(6, 33, 3, 64, "float16", "marlin"), (1, 1, 1, 1, 2)
            ),
            offset=3,
        ),
        "gemm, native, odd offsets": Case(
            plan=in_ranges(problem_of(6, 33, 3, 64, "float32", "mlx"), (1, 1, 1, 1, 2)),
            offset=3,
        ),
        "gemv, bfloat16, odd offsets": Case(
            plan=in_ranges(
                problem_of(2, 33, 3, 64, "bfloat16", "mlx"), (0, 1, 1, 1, 2)
            ),
            offset=3,
        ),
        "gemm, eight rows too many": in_ranges(
            problem_of(24, 32, 4, 64, "float16", "marlin"), (2, 2, 1, 1, 1)
        ),
        "gemm, seven groups of 128 for three slices of three simdgroups": in_ranges(
            problem_of(13, 33, 7, 128, "float32", "mlx"),
            (2, 1, 3, 3, 6),
            operand="exact",
        ),
        # 6 tiles of 9 k tiles; a group would be cut at 5, 10, 16, 21: 10 and 16 snap.
        "gemv, streams in two groups, at least three k tiles each": streams(
            whole_tiles(problem_of(3, 190, 9, 64, "float32", "mlx")),
            10,
            minimum=3,
            groups=2,
        ),
        "gemm, streams of one or two k tiles": streams(
            whole_tiles(
                problem_of(13, 70, 5, 64, "float32", "mlx"),
                fragments_m=1,
                simdgroups_k=1,
            ),
            19,
        ),
        "gemm, three tiles whole, the rest as streams": streams(
            whole_tiles(problem_of(13, 190, 5, 64, "float32", "marlin"), fragments_m=2),
            8,
            whole=3,
        ),
        "gemm, four simdgroups of which two stand side by side": wide_tiles(
            whole_tiles(
                problem_of(13, 190, 7, 64, "float32", "mlx"),
                fragments_m=1,
                simdgroups_k=4,
            ),
            2,
            simdgroups_n=2,
        ),
        "gemv, atomic sums of slices": in_ranges(
            problem_of(3, 70, 5, 64, "float32", "mlx"),
            (0, 1, 2, 3, 11),
            operand="exact",
            reduction="atomic",
        ),
        "gemm, native, tiles that are all whole": whole_tiles(
            problem_of(9, 96, 3, 64, "bfloat16", "mlx"), fragments_m=2
        ),
        "gemv, native, tiles that are all whole": whole_tiles(
            problem_of(4, 64, 3, 64, "bfloat16", "mlx")
        ),
        "gemm, packed halves with the least offset": whole_tiles(
            problem_of(13, 70, 3, 64, "float16", "marlin"),
            fragments_m=2,
            operand="least_offset",
        ),
        "gemm, native bfloats by bfloats": whole_tiles(
            problem_of(13, 70, 3, 64, "bfloat16", "mlx"),
            fragments_m=2,
            operand="bfloat",
        ),
        "gemm, packed 8-bit halves by floats": whole_tiles(
            problem_of(13, 70, 3, 64, "bfloat16", "marlin", bits=8),
            fragments_m=2,
            operand="half_by_float",
        ),
        # 40 columns: the last tile has one row fragment of w, and three too many.
        "gemm, a whole tile each, 8 columns in the last one": whole_tiles(
            problem_of(13, 40, 3, 64, "float16", "marlin"), fragments_m=2
        ),
    }
)
