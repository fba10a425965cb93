"""Products of whole, ragged and split tiles on which a planted bug must show."""

from mutants.cases.case import Case, cases_of
from mutants.cases.plans import in_ranges, native, packed, streams, wide_tiles

PRODUCT_CASES = cases_of(
    {
        # Seven groups of 32: the last k tile is half. Slices of one and of two tiles.
        "gemv, packed groups of 32, k tail, slices": in_ranges(
            (0, 1, 2, 3, 2), 3, 70, 7, 32, "float16", "marlin"
        ),
        "gemv, native groups of 64, nine tiles in four slices": in_ranges(
            (0, 1, 2, 4, 5), 2, 70, 9, 64, "bfloat16", "mlx"
        ),
        "gemv, packed float32, idle threadgroups, whole k": in_ranges(
            (0, 1, 3, 1, 3),
            *(3, 100, 3, 64, "float32", "marlin"),
            partition="ceil",
            operand="exact",
        ),
        "gemm, packed groups of 128, ragged m, slices": in_ranges(
            (2, 2, 2, 3, 2), 27, 70, 5, 128, "float16", "marlin"
        ),
        "gemm, native groups of 32, k tail, two tiles of m": in_ranges(
            (1, 1, 2, 1, 4), 13, 70, 7, 32, "bfloat16", "mlx"
        ),
        "gemm, native float32, idle threadgroups, slices": in_ranges(
            (2, 1, 2, 4, 5),
            *(9, 70, 5, 64, "float32", "mlx"),
            partition="ceil",
            operand="exact",
        ),
        "gemm, native groups of 128, ragged m, whole k": in_ranges(
            (2, 1, 2, 1, 2), 13, 70, 3, 128, "bfloat16", "mlx"
        ),
        "gemm, packed, odd offsets": Case(
            plan=in_ranges((1, 1, 1, 1, 2), 6, 33, 3, 64, "float16", "marlin"),
            offset=3,
        ),
        "gemm, native, odd offsets": Case(
            plan=in_ranges((1, 1, 1, 1, 2), 6, 33, 3, 64, "float32", "mlx"), offset=3
        ),
        "gemv, bfloat16, odd offsets": Case(
            plan=in_ranges((0, 1, 1, 1, 2), 2, 33, 3, 64, "bfloat16", "mlx"), offset=3
        ),
        "gemm, eight rows too many": in_ranges(
            (2, 2, 1, 1, 1), 24, 32, 4, 64, "float16", "marlin"
        ),
        "gemm, seven groups of 128 for three slices of three simdgroups": in_ranges(
            (2, 1, 3, 3, 6), 13, 33, 7, 128, "float32", "mlx", operand="exact"
        ),
        # 6 tiles of 9 k tiles; a group would be cut at 5, 10, 16, 21: 10 and 16 snap.
        "gemv, streams in two groups, at least three k tiles each": streams(
            10, native(3, 190, 9, 64), minimum=3, groups=2
        ),
        "gemm, streams of one or two k tiles": streams(
            19, native(13, 70, 5, 64, fragments_m=1, simdgroups_k=1)
        ),
        "gemm, three tiles whole, the rest as streams": streams(
            8, packed(13, 190, 5, 64, fragments_m=2), whole=3
        ),
        "gemm, four simdgroups of which two stand side by side": wide_tiles(
            native(13, 190, 7, 64, fragments_m=1, simdgroups_k=4)
        ),
        "gemv, atomic sums of slices": in_ranges(
            (0, 1, 2, 3, 11),
            *(3, 70, 5, 64, "float32", "mlx"),
            operand="exact",
            reduction="atomic",
        ),
        "gemm, native, tiles that are all whole": native(
            9, 96, 3, 64, dtype="bfloat16", fragments_m=2
        ),
        "gemv, native, tiles that are all whole": native(
            4, 64, 3, 64, dtype="bfloat16"
        ),
        "gemm, packed halves with the least offset": packed(
            13, 70, 3, 64, dtype="float16", fragments_m=2, operand="least_offset"
        ),
        "gemm, native bfloats by bfloats": native(
            13, 70, 3, 64, dtype="bfloat16", fragments_m=2, operand="bfloat"
        ),
        "gemm, packed 8-bit halves by floats": packed(
            *(13, 70, 3, 64),
            dtype="bfloat16",
            bits=8,
            fragments_m=2,
            operand="half_by_float",
        ),
        # 40 columns: the last tile has one row fragment of w, and three too many.
        "gemm, a whole tile each, 8 columns in the last one": packed(
            13, 40, 3, 64, dtype="float16", fragments_m=2
        ),
    }
)
