"""The launches of every kind of plan that has a CUDA kernel."""

from collections.abc import Callable
from typing import Any

from mlx_marlin.backends import shared_launches
from mlx_marlin.backends.cuda import arguments, source
from mlx_marlin.backends.cuda.experts.plan import CudaGatherPlan
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.backends.launch import Launch
from mlx_marlin.planning.block_plans import CombinePlan, RoutePlan
from mlx_marlin.planning.dequantize_plan import DequantizePlan


def launches(plan: Any) -> tuple[Launch, ...]:
    """Returns the launches of a plan, in order."""
    build = BY_TYPE.get(type(plan))
    if build is None:
        raise ValueError(f"the back end 'cuda' has no kernel for {plan!r}")
    return build(plan)


def _of_product(plan: CudaPlan) -> tuple[Launch, ...]:
    integers = {"numbers": arguments.numbers(plan)}
    text, template = source.of_product(plan), arguments.product_template(plan)
    first = shared_launches.product(plan, text, template, integers)
    if not plan.needs_second_pass:
        return (first,)
    text, template = source.of_reduce(plan), arguments.reduce_template(plan)
    return first, shared_launches.reduce(plan, text, template, integers)


def _of_experts(plan: CudaGatherPlan) -> tuple[Launch]:
    text, template = source.gather_source(plan), arguments.gather_template(plan)
    return (shared_launches.gather(plan, text, template),)


BY_TYPE: dict[type, Callable[[Any], tuple[Launch, ...]]] = {
    CudaPlan: _of_product,
    CudaGatherPlan: _of_experts,
    DequantizePlan: lambda plan: shared_launches.dequantize(
        plan, source.of_dequantize(plan.problem)
    ),
    RoutePlan: lambda plan: (
        shared_launches.route(plan, source.routing_source("route")),
    ),
    CombinePlan: lambda plan: (
        shared_launches.combine(plan, source.routing_source("combine")),
    ),
}
