"""Products of normalized rows on which a planted bug must show."""

from dataclasses import replace

from mlx_marlin.planning.epilogue import Epilogue
from mutants.cases.plans import problem_of, whole_tiles
from support.normed_products import Normed

NORMED = "gemv, two normalized rows with a bias"
NORMED_GATED = "gemv, gate and up of normalized rows"

_GATED = Epilogue(activation="silu", gated=True)
_BIASED = Epilogue(bias=True)

NORMED_CASES = {
    NORMED: Normed(
        plan=whole_tiles(
            replace(problem_of(2, 70, 5, 64, "float32", "mlx", _BIASED), norm=0.5),
            simdgroups_k=4,
        )
    ),
    NORMED_GATED: Normed(
        plan=whole_tiles(
            replace(problem_of(2, 128, 5, 64, "float32", "marlin", _GATED), norm=0.5),
            simdgroups_k=4,
        )
    ),
}
