"""Products of whole, ragged and split tiles on which a planted bug must show."""

from mutants.cases.case import Case
from mutants.cases.plans import in_ranges, problem_of, streams, whole_tiles, wide_tiles

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
ATOMIC = "gemv, atomic sums of slices"
WHOLE_GEMM = "gemm, a whole tile each, 8 columns in the last one"

# Seven groups of 32: the last k tile is half. Slices of one and of two tiles.
_TAIL_PACKED = problem_of(3, 70, 7, 32, "float16", "marlin")
_TAIL_NATIVE = problem_of(13, 70, 7, 32, "bfloat16", "mlx")
_WIDE_GROUPS = problem_of(27, 70, 5, 128, "float16", "marlin")
_MANY_GROUPS = problem_of(2, 70, 9, 64, "bfloat16", "mlx")

PRODUCT_CASES = {
    GEMV_TAIL: Case(
        plan=in_ranges(
            _TAIL_PACKED,
            fragments_m=0,
            simdgroups_m=1,
            simdgroups_k=2,
            k_parallel=3,
            num_threadgroups=2,
        )
    ),
    GEMV_NATIVE: Case(
        plan=in_ranges(
            _MANY_GROUPS,
            fragments_m=0,
            simdgroups_m=1,
            simdgroups_k=2,
            k_parallel=4,
            num_threadgroups=5,
        )
    ),
    GEMV_IDLE: Case(
        plan=in_ranges(
            problem_of(3, 100, 3, 64, "float32", "marlin"),
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
        plan=in_ranges(
            _WIDE_GROUPS,
            fragments_m=2,
            simdgroups_m=2,
            simdgroups_k=2,
            k_parallel=3,
            num_threadgroups=2,
        )
    ),
    GEMM_TAIL: Case(
        plan=in_ranges(
            _TAIL_NATIVE,
            fragments_m=1,
            simdgroups_m=1,
            simdgroups_k=2,
            k_parallel=1,
            num_threadgroups=4,
        )
    ),
    GEMM_IDLE: Case(
        plan=in_ranges(
            problem_of(9, 70, 5, 64, "float32", "mlx"),
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
        plan=in_ranges(
            problem_of(13, 70, 3, 128, "bfloat16", "mlx"),
            fragments_m=2,
            simdgroups_m=1,
            simdgroups_k=2,
            k_parallel=1,
            num_threadgroups=2,
        )
    ),
    ODD_PACKED: Case(
        plan=in_ranges(
            problem_of(6, 33, 3, 64, "float16", "marlin"),
            fragments_m=1,
            simdgroups_m=1,
            simdgroups_k=1,
            k_parallel=1,
            num_threadgroups=2,
        ),
        offset=3,
    ),
    ODD_NATIVE: Case(
        plan=in_ranges(
            problem_of(6, 33, 3, 64, "float32", "mlx"),
            fragments_m=1,
            simdgroups_m=1,
            simdgroups_k=1,
            k_parallel=1,
            num_threadgroups=2,
        ),
        offset=3,
    ),
    ODD_BFLOAT: Case(
        plan=in_ranges(
            problem_of(2, 33, 3, 64, "bfloat16", "mlx"),
            fragments_m=0,
            simdgroups_m=1,
            simdgroups_k=1,
            k_parallel=1,
            num_threadgroups=2,
        ),
        offset=3,
    ),
    GEMM_LEFT_OUT: Case(
        plan=in_ranges(
            problem_of(24, 32, 4, 64, "float16", "marlin"),
            fragments_m=2,
            simdgroups_m=2,
            simdgroups_k=1,
            k_parallel=1,
            num_threadgroups=1,
        )
    ),
    THIRDS: Case(
        plan=in_ranges(
            problem_of(13, 33, 7, 128, "float32", "mlx"),
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
        plan=streams(
            whole_tiles(problem_of(3, 190, 9, 64, "float32", "mlx")),
            10,
            minimum=3,
            groups=2,
        )
    ),
    STREAM_GEMM: Case(
        plan=streams(
            whole_tiles(
                problem_of(13, 70, 5, 64, "float32", "mlx"),
                fragments_m=1,
                simdgroups_k=1,
            ),
            19,
        )
    ),
    HYBRID: Case(
        plan=streams(
            whole_tiles(problem_of(13, 190, 5, 64, "float32", "marlin"), fragments_m=2),
            8,
            whole=3,
        )
    ),
    HYTIS: Case(
        plan=wide_tiles(
            whole_tiles(
                problem_of(13, 190, 7, 64, "float32", "mlx"),
                fragments_m=1,
                simdgroups_k=4,
            ),
            2,
            simdgroups_n=2,
        )
    ),
    ATOMIC: Case(
        plan=in_ranges(
            problem_of(3, 70, 5, 64, "float32", "mlx"),
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
        plan=whole_tiles(problem_of(13, 40, 3, 64, "float16", "marlin"), fragments_m=2)
    ),
}
