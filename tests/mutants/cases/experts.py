"""Products of experts on which a planted bug must show."""

from dataclasses import replace
from typing import Any

import metal_emulator
from mlx_marlin.backends.metal.experts import MetalGatherPlan
from mlx_marlin.planning.gather_plan import GatherProblem
from mutants.cases.plans import problem_of
from support.expert_products import ExpertProducts

# 37 pairs of expert 1, 8 of expert 2, none of expert 0: the last of them comes after
# 32 others, and the last pair is not in a whole run of 32.
_MANY = tuple(2 if pair % 6 == 3 else 1 for pair in range(45))
# One pair of expert 0, two of expert 1, 18 of expert 2: a whole tile and two more.
_FEW = (2, 1, 2, 0, 1, *(2,) * 16)


def _case(
    chosen: tuple[int, ...],
    shape: tuple[int, int, int],
    layout: str,
    *,
    simdgroups: tuple[int, int],
    bits: int = 4,
    fragments_m: int = 1,
    offset: int = 0,
    **gather: Any,
) -> ExpertProducts:
    """Returns products with three experts of n, groups of k, and group size."""
    problem = problem_of(len(chosen), *shape, "float32", layout, bits=bits)
    plan = MetalGatherPlan(
        gather=GatherProblem(problem=problem, experts=3, **gather),
        fragments_m=fragments_m,
        simdgroups_m=simdgroups[0],
        simdgroups_k=simdgroups[1],
        dot_rows=2 if chosen == _FEW else 0,
        operand="exact",
    )
    return ExpertProducts(plan=plan, chosen=chosen, seed=3, offset=offset)


_SHAPE = (41, 5, 64)
_CLIPPED = _case(
    _FEW, _SHAPE, "marlin", simdgroups=(2, 4), gate="swiglu_oai", bias=True
)

EXPERT_CASES = {
    "experts, gate and up of packed codes": _case(
        _FEW, _SHAPE, "marlin", simdgroups=(1, 4), gate="silu", pairs_per_row=3
    ),
    "experts, gate and up of gpt-oss, packed codes": _CLIPPED,
    "experts, gpt-oss's gate has a NaN in the bias of gate": replace(
        _CLIPPED, not_a_number=("biases", 0)
    ),
    "experts, gpt-oss's gate has a NaN in the bias of up": replace(
        _CLIPPED, not_a_number=("biases", 1)
    ),
    "experts, biases, native codes": _case(
        _FEW, _SHAPE, "mlx", simdgroups=(2, 4), bias=True
    ),
    "experts, native codes of 4 bits, odd offsets": _case(
        _MANY, (41, 3, 64), "mlx", simdgroups=(1, 2), fragments_m=2, offset=3
    ),
    "experts, packed codes of 3 bits, groups of 32, k tail": _case(
        _MANY, (41, 5, 32), "marlin", simdgroups=(2, 2), bits=3
    ),
    "experts, packed codes of 4 bits, whole tiles": _case(
        _MANY, (64, 2, 64), "marlin", simdgroups=(1, 2)
    ),
    "experts of one row and of two, native codes of 4 bits, odd offsets": _case(
        _FEW, _SHAPE, "mlx", simdgroups=(2, 2), offset=3
    ),
    "experts of one row and of two, packed codes, whole tiles": _case(
        _FEW, (64, 4, 64), "marlin", simdgroups=(1, 4), fragments_m=2
    ),
}


def miscounted(case: ExpertProducts) -> str | None:
    """Words of a chosen expert once for every tile of rows, and its matrices."""
    plan, problem = case.plan, case.plan.problem
    found = metal_emulator.trace(case.run, *case.arrays())[0]
    readers = matrices = 0
    for expert in {*case.chosen}:
        count = case.chosen.count(expert)
        for first in range(0, count, plan.rows):
            rows = min(plan.rows, count - first)
            few = rows <= plan.dot_rows
            simdgroups = -(-rows // (8 * plan.fragments_m))
            readers += 1 if few else simdgroups
            matrices += 0 if few else simdgroups * plan.fragments_m
    counted = found.of("w").read_bytes, found.count("matrix")
    expected = (
        readers * problem.code_bytes,
        matrices * (problem.n // 8) * (problem.k // 8),
    )
    if counted == expected:
        return None
    return f"{counted} bytes and matrix products, expected {expected}"
