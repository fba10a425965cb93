"""The launches of every kind of plan on Metal."""

from collections.abc import Callable
from typing import Any

from mlx_marlin.backends import build
from mlx_marlin.backends.arguments import epilogue_schedule, parts, schedule
from mlx_marlin.backends.launch import Launch, Output, inputs_of
from mlx_marlin.backends.metal import arguments, source
from mlx_marlin.backends.metal.experts.plan import MetalGatherPlan
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning.block_plans import (
    REPACK_THREADS,
    AddNormPlan,
    CombinePlan,
    HeadsPlan,
    RepackPlan,
    RoutePlan,
)
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.work.tiles import SIMD_WIDTH


def launches(plan: Any) -> tuple[Launch, ...]:
    """Returns the launches of a plan, in order."""
    launches_of = BY_TYPE.get(type(plan))
    if launches_of is None:
        raise ValueError(f"the back end 'metal' has no kernel for {plan!r}")
    return launches_of(plan)


def _of_product(plan: MetalPlan) -> tuple[Launch, ...]:
    integers = {
        "shape": arguments.shape(plan),
        "schedule": schedule(plan),
        "parts": parts(plan),
    }
    text, template = source.of_product(plan), arguments.product_template(plan)
    first = build.product(plan, text, template, integers)
    if not plan.needs_second_pass:
        return (first,)
    text, template = source.of_reduce(plan), arguments.reduce_template(plan)
    integers["schedule"] = epilogue_schedule(plan)
    return first, build.reduce(plan, text, template, integers)


def _of_experts(plan: MetalGatherPlan) -> tuple[Launch]:
    text = source.kernel_source("gather_fused" if plan.gather.is_fused else "gather")
    return (build.gather(plan, text, arguments.gather_template(plan)),)


def _of_heads(plan: HeadsPlan) -> tuple[Launch]:
    text = source.kernel_source("rotate_heads")
    dtypes = dict.fromkeys(text.input_names, plan.dtype)
    dtypes |= {"positions": "int32", "freqs": "float32"}
    norms = ("q_norm", "k_norm")
    absent = dict.fromkeys(norms, "qkv") if plan.heads.norm is None else {}
    shapes = [
        (plan.streams, heads, plan.tokens, plan.heads.features)
        for heads in (plan.heads.heads, plan.heads.kv_heads)
    ]
    return (
        Launch(
            source=text,
            template=(*arguments.heads_template(plan).items(),),
            inputs=inputs_of(text, dtypes, stand_ins=absent),
            grid=(plan.threads, 1, 1),
            threadgroup=(SIMD_WIDTH, 1, 1),
            outputs=tuple(
                Output(name, plan.dtype, shape, None)
                for name, shape in zip(text.output_names, shapes, strict=True)
            ),
        ),
    )


def _of_add_norm(plan: AddNormPlan) -> tuple[Launch]:
    text = source.kernel_source("add_norm")
    return (
        Launch(
            source=text,
            template=(*arguments.norm_template(plan).items(),),
            inputs=inputs_of(text, dict.fromkeys(text.input_names, plan.dtype)),
            grid=(plan.rows * plan.threadgroup, 1, 1),
            threadgroup=(plan.threadgroup, 1, 1),
            outputs=tuple(
                Output(name, plan.dtype, (plan.n,)) for name in text.output_names
            ),
        ),
    )


def _of_repack(plan: RepackPlan) -> tuple[Launch]:
    text = source.kernel_source("pack" if plan.to == "marlin" else "unpack")
    template = arguments.repack_template(plan.bits, plan.order)
    n_tiles, k_tiles = plan.tiles
    groups = -(-k_tiles // int(template["TILES"]))
    dtypes = {"w": "uint32", "shape": "int32"}
    return (
        Launch(
            source=text,
            template=(*template.items(),),
            inputs=inputs_of(text, dtypes, small=("w",)),
            integers=(("shape", (plan.n, plan.k)),),
            grid=(REPACK_THREADS * groups, n_tiles, plan.weights),
            threadgroup=(REPACK_THREADS, 1, 1),
            outputs=(Output("out", "uint32", plan.shape, None),),
        ),
    )


BY_TYPE: dict[type, Callable[[Any], tuple[Launch, ...]]] = {
    MetalPlan: _of_product,
    MetalGatherPlan: _of_experts,
    DequantizePlan: lambda plan: build.dequantize(
        plan, source.kernel_source("dequantize")
    ),
    RoutePlan: lambda plan: (build.route(plan, source.kernel_source("route")),),
    CombinePlan: lambda plan: (build.combine(plan, source.kernel_source("combine")),),
    HeadsPlan: _of_heads,
    AddNormPlan: _of_add_norm,
    RepackPlan: _of_repack,
}
