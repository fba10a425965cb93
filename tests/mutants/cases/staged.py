"""Plans of the staged kernel on which a planted bug must show."""

from mutants.cases.case import cases_of
from mutants.cases.plans import (
    in_ranges,
    problem_of,
    staged,
    streams,
    whole_tiles,
    wide_tiles,
)

STAGED_CASES = cases_of(
    {
        "staged, one buffer, two simdgroups along k, slices": staged(
            in_ranges(
                problem_of(13, 70, 7, 64, "float32", "mlx"),
                (1, 2, 2, 3, 4),
                operand="exact",
            ),
            1,
        ),
        "staged, two buffers, ragged m and n, streams of one or two k tiles": staged(
            streams(
                whole_tiles(
                    problem_of(27, 70, 5, 64, "float32", "mlx"),
                    fragments_m=2,
                    simdgroups_m=2,
                    simdgroups_k=1,
                ),
                7,
            ),
            2,
        ),
        "staged, three buffers, two loaders, packed groups of 32, streams": staged(
            streams(
                whole_tiles(
                    problem_of(27, 70, 23, 32, "float16", "marlin"),
                    fragments_m=2,
                    simdgroups_m=2,
                    simdgroups_k=2,
                    operand="offset",
                ),
                7,
            ),
            3,
            2,
        ),
        "staged, two buffers and a loader, two simdgroups side by side": staged(
            wide_tiles(
                whole_tiles(
                    problem_of(13, 190, 7, 64, "float16", "mlx"), fragments_m=1
                ),
                2,
                simdgroups_n=2,
            ),
            2,
            1,
        ),
        "staged, one buffer, native nvfp4": staged(
            whole_tiles(
                problem_of(9, 70, 12, 16, "float32", "mlx", mode="nvfp4"), fragments_m=1
            ),
            1,
        ),
        "staged, two buffers, packed nvfp4 with a global scale": staged(
            whole_tiles(
                problem_of(
                    9, 70, 12, 16, "float16", "marlin", mode="nvfp4", global_scale=True
                ),
                fragments_m=1,
            ),
            2,
        ),
        "staged, three buffers, eight rows too many": staged(
            whole_tiles(
                problem_of(24, 32, 8, 64, "float16", "marlin"),
                fragments_m=2,
                simdgroups_m=2,
                simdgroups_k=1,
            ),
            3,
        ),
        # 64 rows of 36 floats, and 6144 bytes of a stage.
        "staged, one buffer that is smaller than the scratch": staged(
            whole_tiles(
                problem_of(57, 32, 3, 32, "float16", "marlin"),
                fragments_m=2,
                simdgroups_m=4,
                simdgroups_k=1,
            ),
            1,
        ),
    }
)
