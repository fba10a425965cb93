"""The launches of every kind of plan that has a CUDA kernel."""

from collections.abc import Callable
from typing import Any

from mlx_marlin.backends import build
from mlx_marlin.backends.cuda import arguments, source
from mlx_marlin.backends.cuda.experts.plan import CudaGatherPlan
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.backends.launch import Launch
from mlx_marlin.planning.block_plans import CombinePlan, RoutePlan
from mlx_marlin.planning.dequantize_plan import DequantizePlan


def launches(plan: Any) -> tuple[Launch, ...]:
    """Returns the launches of a plan, in order."""
    launches_of = BY_TYPE.get(type(plan))
    if launches_of is None:
        raise ValueError(f"the back end 'cuda' has no kernel for {plan!r}")
    return launches_of(plan)


def _of_product(plan: CudaPlan) -> tuple[Launch, ...]:
    integers = {"numbers": arguments.numbers(plan)}
    text, template = source.of_product(plan), arguments.product_template(plan)
    first = build.product(plan, text, template, integers)
    if not plan.needs_second_pass:
        return (first,)
    text, template = source.of_reduce(plan), arguments.reduce_template(plan)
    return first, build.reduce(plan, text, template, integers)


def _of_experts(plan: CudaGatherPlan) -> tuple[Launch]:
    text, template = source.gather_source(plan), arguments.gather_template(plan)
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
