"""Plans of the kernel with tensor operations on which a planted bug must show."""

from dataclasses import replace

from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mutants.cases.case import cases_of
from mutants.cases.plans import in_ranges, problem_of, whole_tiles


def tensor(
    problem: Problem, simdgroups_m: int, simdgroups_k: int, fragments_m: int = 2
) -> Plan:
    """Returns a plan of whole tiles, which has exact codes if x is bfloat."""
    return whole_tiles(
        problem,
        fragments_m=fragments_m,
        simdgroups_m=simdgroups_m,
        simdgroups_k=simdgroups_k,
        operand="exact" if problem.dtype == "bfloat16" else "offset",
        kernel="gemm_tensor",
    )


TENSOR_CASES = cases_of(
    {
        "tensor, ragged m and n, four simdgroups along k": tensor(
            problem_of(13, 70, 9, 64, "float16", "mlx"), 1, 4
        ),
        "tensor, two simdgroups side by side, packed groups of 32": tensor(
            problem_of(27, 70, 11, 32, "float16", "marlin"), 2, 2
        ),
        "tensor, two operations a simdgroup, two simdgroups side by side": tensor(
            problem_of(43, 70, 5, 64, "float16", "marlin"), 2, 2, fragments_m=4
        ),
        "tensor, bfloat16, packed codes of 8 bits, slices": replace(
            in_ranges(
                problem_of(11, 70, 7, 64, "bfloat16", "marlin", bits=8),
                (2, 1, 2, 2, 4),
                operand="exact",
            ),
            kernel="gemm_tensor",
        ),
        "tensor, exact operands, four simdgroups along k": replace(
            tensor(problem_of(13, 70, 23, 64, "float16", "mlx"), 1, 4), operand="exact"
        ),
        "tensor, one row": tensor(problem_of(1, 70, 4, 64, "float16", "mlx"), 1, 2),
    }
)
