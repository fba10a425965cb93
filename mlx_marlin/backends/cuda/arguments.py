"""Template arguments of the CUDA kernels, and the numbers of a plan that they read."""

from mlx_marlin.backends.arguments import (
    GATES,
    epilogue_template,
    float_bits,
    parts,
    schedule,
    shape,
    weight_template,
)
from mlx_marlin.backends.build import REDUCE_ROWS
from mlx_marlin.backends.cuda.experts.plan import CudaGatherPlan
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.backends.launch import TemplateValue
from mlx_marlin.planning.problem import Problem


def product_template(plan: CudaPlan) -> dict[str, TemplateValue]:
    """Returns the template arguments of a plan's first kernel."""
    return {
        "FRAGMENTS_M": plan.fragments_m,
        "SIMDGROUPS_N": plan.simdgroups_n,
        "SIMDGROUPS_K": plan.simdgroups_k,
        **({"STAGES": plan.buffers} if plan.buffers else {}),
        "WHOLE": plan.is_whole,
        "SINGLE": plan.work.is_single,
        "BATCHED": plan.problem.batch > 1,
        **weight_template(plan.problem),
        **_norm_template(plan.problem),
        **({} if plan.is_split else epilogue_template(plan)),
    }


def reduce_template(plan: CudaPlan) -> dict[str, TemplateValue]:
    """Returns the template arguments of the reduce kernel of a split plan."""
    shared: dict[str, TemplateValue] = {
        "ROWS": REDUCE_ROWS,
        "BATCHED": plan.problem.batch > 1,
        "SIMDGROUPS_N": plan.simdgroups_n,
    }
    return shared | (epilogue_template(plan) or {"T": plan.problem.dtype})


def gather_template(plan: CudaGatherPlan) -> dict[str, TemplateValue]:
    """Returns the template arguments of the gather kernel."""
    return {
        "FRAGMENTS_M": plan.fragments_m,
        "SIMDGROUPS_N": plan.simdgroups_n,
        "SIMDGROUPS_K": plan.simdgroups_k,
        "BY_PAIR": plan.by_pair,
        "EACH": plan.pairs_per_row,
        **({"ACTIVATION": GATES[plan.gather.gate]} if plan.gather.gate else {}),
        **({"T": plan.problem.dtype} if plan.gather.bias else {}),
        **weight_template(plan.problem),
    }


def numbers(plan: CudaPlan) -> tuple[int, ...]:
    """Returns all numbers of a plan that the kernels read, for one array."""
    has_parts = bool(plan.problem.epilogue.parts)
    return (*shape(plan), *schedule(plan), *(parts(plan) if has_parts else ()))


def _norm_template(problem: Problem) -> dict[str, TemplateValue]:
    return {} if problem.norm is None else {"EPSILON": float_bits(problem.norm)}
