"""Plans of the kernel with tensor operations on which a planted bug must show."""

from dataclasses import replace
from functools import partial

from mutants.cases.case import cases_of
from mutants.cases.plans import in_ranges, whole_tiles

_tensor = partial(
    whole_tiles, dtype="float16", fragments_m=2, operand="offset", kernel="gemm_tensor"
)

TENSOR_CASES = cases_of(
    {
        "tensor, ragged m and n, four simdgroups along k": _tensor(
            13, 70, 9, 64, layout="mlx", simdgroups_k=4
        ),
        "tensor, two simdgroups side by side, packed groups of 32": _tensor(
            27, 70, 11, 32, layout="marlin", simdgroups_m=2
        ),
        "tensor, two operations a simdgroup, two simdgroups side by side": _tensor(
            43, 70, 5, 64, layout="marlin", simdgroups_m=2, fragments_m=4
        ),
        "tensor, bfloat16, packed codes of 8 bits, slices": replace(
            in_ranges(
                (2, 1, 2, 2, 4),
                *(11, 70, 7, 64, "bfloat16", "marlin"),
                bits=8,
                operand="exact",
            ),
            kernel="gemm_tensor",
        ),
        "tensor, exact operands, four simdgroups along k": _tensor(
            13, 70, 23, 64, layout="mlx", simdgroups_k=4, operand="exact"
        ),
        "tensor, one row": _tensor(1, 70, 4, 64, layout="mlx"),
    }
)
