"""Products of normalized rows on which a planted bug must show."""

from dataclasses import replace

from mlx_marlin.planning.epilogue import Epilogue
from mutants.cases.plans import problem_of, whole_tiles
from support.normed_products import Normed

_GATED = Epilogue(activation="silu", gated=True)
_BIASED = Epilogue(bias=True)

NORMED_CASES = {
    "gemv, two normalized rows with a bias": Normed(
        plan=whole_tiles(
            replace(problem_of(2, 70, 5, 64, "float32", "mlx", _BIASED), norm=0.5),
            simdgroups_k=4,
        )
    ),
    "gemv, gate and up of normalized rows": Normed(
        plan=whole_tiles(
            replace(problem_of(2, 128, 5, 64, "float32", "marlin", _GATED), norm=0.5),
            simdgroups_k=4,
        )
    ),
}
