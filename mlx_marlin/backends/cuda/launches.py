"""The launches of every kind of plan on CUDA, and their template arguments."""

from collections.abc import Callable
from typing import Any

from mlx_marlin.backends import build
from mlx_marlin.backends.build import (
    GATES,
    REDUCE_ROWS,
    epilogue_template,
    float_bits,
    parts,
    schedule,
    shape,
    weight_template,
)
from mlx_marlin.backends.cuda import source
from mlx_marlin.backends.cuda.plan import CudaGatherPlan, CudaPlan
from mlx_marlin.backends.launch import Launch, TemplateValue
from mlx_marlin.planning.block_plans import CombinePlan, RoutePlan
from mlx_marlin.planning.dequantize_plan import DequantizePlan
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


def launches(plan: Any) -> tuple[Launch, ...]:
    """Returns the launches of a plan, in order."""
    launches_of = BY_TYPE.get(type(plan))
    if launches_of is None:
        raise ValueError(f"the back end 'cuda' has no kernel for {plan!r}")
    return launches_of(plan)


def _of_product(plan: CudaPlan) -> tuple[Launch, ...]:
    integers = {"numbers": numbers(plan)}
    text, template = source.of_product(plan), product_template(plan)
    first = build.product(plan, text, template, integers)
    if not plan.needs_second_pass:
        return (first,)
    text, template = source.of_reduce(plan), reduce_template(plan)
    return first, build.reduce(plan, text, template, integers)


def _of_experts(plan: CudaGatherPlan) -> tuple[Launch]:
    text, template = source.gather_source(plan), gather_template(plan)
    return (build.gather(plan, text, template),)


BY_TYPE: dict[type, Callable[[Any], tuple[Launch, ...]]] = {
    CudaPlan: _of_product,
    CudaGatherPlan: _of_experts,
    DequantizePlan: lambda plan: build.dequantize(
        plan, source.of_dequantize(plan.problem)
    ),
    RoutePlan: lambda plan: (build.route(plan, source.routing_source("route")),),
    CombinePlan: lambda plan: (build.combine(plan, source.routing_source("combine")),),
}
