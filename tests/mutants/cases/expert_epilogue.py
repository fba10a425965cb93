"""Products of experts with biases and gates on which a planted bug must show."""

from dataclasses import replace

from mlx_marlin.backends.metal.experts.plan import MetalGatherPlan
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.problem import Problem
from support.expert_products import ExpertProducts

# One pair of expert 0, two of expert 1, 18 of expert 2: a whole tile and two more.
_CHOSEN = (2, 1, 2, 0, 1, *(2,) * 16)


def _case(
    layout: str,
    n: int,
    simdgroups_m: int,
    gate: str | None,
    *,
    bias: bool,
    each: int = 0,
) -> ExpertProducts:
    problem = Problem(
        m=len(_CHOSEN),
        n=n,
        k=320,
        group_size=64,
        bits=4,
        dtype="float32",
        scale_dtype="float32",
        layout=layout,
    )
    plan = MetalGatherPlan(
        gather=GatherProblem(
            problem=problem, experts=3, pairs_per_row=each, gate=gate, bias=bias
        ),
        fragments_m=1,
        simdgroups_m=simdgroups_m,
        simdgroups_k=4,
        dot_rows=2,
        operand="exact",
    )
    return ExpertProducts(plan=plan, chosen=_CHOSEN, seed=3)


_CLIPPED = _case("marlin", 41, 2, "swiglu_oai", bias=True)

EXPERT_EPILOGUE_CASES = {
    "experts, gate and up of packed codes": _case(
        "marlin", 41, 1, "silu", bias=False, each=3
    ),
    "experts, gate and up of gpt-oss, packed codes": _CLIPPED,
    "experts, gpt-oss's gate has a NaN in the bias of gate": replace(
        _CLIPPED, not_a_number=("biases", 0)
    ),
    "experts, gpt-oss's gate has a NaN in the bias of up": replace(
        _CLIPPED, not_a_number=("biases", 1)
    ),
    "experts, biases, native codes": _case("mlx", 41, 2, None, bias=True),
}
