"""Plans of the staged kernel on which a planted bug must show."""

from functools import partial

from mutants.cases.case import cases_of
from mutants.cases.plans import in_ranges, native, packed, staged, streams, wide_tiles

_halves = partial(packed, dtype="float16", fragments_m=2, simdgroups_k=1)

STAGED_CASES = cases_of(
    {
        "staged, one buffer, two simdgroups along k, slices": staged(
            1,
            in_ranges(
                (1, 2, 2, 3, 4), 13, 70, 7, 64, "float32", "mlx", operand="exact"
            ),
        ),
        "staged, two buffers, ragged m and n, streams of one or two k tiles": staged(
            2,
            streams(
                7, native(27, 70, 5, 64, fragments_m=2, simdgroups_m=2, simdgroups_k=1)
            ),
        ),
        "staged, three buffers, two loaders, packed groups of 32, streams": staged(
            3,
            streams(
                7,
                _halves(
                    27, 70, 23, 32, simdgroups_m=2, simdgroups_k=2, operand="offset"
                ),
            ),
            loaders=2,
        ),
        "staged, two buffers and a loader, two simdgroups side by side": staged(
            2, wide_tiles(native(13, 190, 7, 64, dtype="float16", fragments_m=1)), 1
        ),
        "staged, one buffer, native nvfp4": staged(
            1, native(9, 70, 12, 16, mode="nvfp4", fragments_m=1)
        ),
        "staged, two buffers, packed nvfp4 with a global scale": staged(
            2,
            _halves(
                9,
                70,
                12,
                16,
                fragments_m=1,
                simdgroups_k=2,
                mode="nvfp4",
                global_scale=True,
            ),
        ),
        "staged, three buffers, eight rows too many": staged(
            3, _halves(24, 32, 8, 64, simdgroups_m=2)
        ),
        # 64 rows of 36 floats, and 6144 bytes of a stage.
        "staged, one buffer that is smaller than the scratch": staged(
            1, _halves(57, 32, 3, 32, simdgroups_m=4)
        ),
    }
)
