"""Products with epilogues, norms and batches, on which a planted bug must show."""

from mlx_marlin.planning.epilogue import Epilogue
from mutants.cases.case import cases_of
from mutants.cases.plans import in_ranges, native, packed, streams
from support.normed_products import Normed

_GATED = Epilogue(activation="silu", gated=True)
_ALL = Epilogue(bias=True, activation="silu", multiply=True, residual=True)
_APPROXIMATE = Epilogue(activation="gelu_approx", multiply=True)
_THREE = Epilogue(bias=True, parts=(33, 5, 32))

EPILOGUE_CASES = cases_of(
    {
        "gemm, with everything that an epilogue can do": native(
            13, 70, 3, 64, epilogue=_ALL, fragments_m=2
        ),
        "gemv, slices, everything in the reduce": in_ranges(
            (0, 1, 1, 3, 4), 3, 70, 5, 64, "float32", "mlx", _ALL, operand="exact"
        ),
        "gemv, gelu in float32": native(
            3, 70, 3, 64, epilogue=Epilogue(activation="gelu")
        ),
        "gemv, approximate gelu in float32": native(
            3, 70, 3, 64, epilogue=_APPROXIMATE
        ),
        "gemm, three results that share columns of tiles": native(
            11, 70, 3, 64, dtype="float16", epilogue=_THREE, fragments_m=2
        ),
        "gemv, two results, put together by the reduce": in_ranges(
            (0, 1, 1, 3, 4),
            *(3, 70, 5, 64, "float32", "mlx", Epilogue(parts=(7, 63))),
            operand="exact",
        ),
        "gemv, gate and up of ragged halves": native(
            2, 90, 5, 64, epilogue=_GATED, simdgroups_k=4
        ),
        "gemm, packed gate and up": packed(
            13, 128, 5, 64, epilogue=_GATED, fragments_m=2, simdgroups_k=4
        ),
        "gemv, three products of nine tiles in slices": in_ranges(
            (0, 1, 2, 3, 7), 2, 70, 5, 64, "float32", "mlx", operand="exact", batch=3
        ),
        "gemm, packed, three products as streams": streams(
            13, packed(13, 40, 5, 64, fragments_m=1, simdgroups_k=1, batch=3)
        ),
        "gemv, three products with everything that an epilogue can do": native(
            3, 40, 3, 64, epilogue=_ALL, batch=3
        ),
    }
)
NORMED_CASES = {
    "gemv, two normalized rows with a bias": Normed(
        plan=native(
            2, 70, 5, 64, epilogue=Epilogue(bias=True), norm=0.5, simdgroups_k=4
        )
    ),
    "gemv, gate and up of normalized rows": Normed(
        plan=packed(2, 128, 5, 64, epilogue=_GATED, norm=0.5, simdgroups_k=4)
    ),
}
