"""The launches of every kind of plan on Metal, and their template arguments."""

from collections.abc import Callable
from typing import Any

from mlx_marlin.backends import build
from mlx_marlin.backends import build as shared_arguments
from mlx_marlin.backends.build import (
    GATES,
    REDUCE_ROWS,
    epilogue_schedule,
    epilogue_template,
    float_bits,
    parts,
    schedule,
    weight_template,
)
from mlx_marlin.backends.launch import Launch, Output, TemplateValue, inputs_of
from mlx_marlin.backends.metal import source
from mlx_marlin.backends.metal.experts import MetalGatherPlan
from mlx_marlin.backends.metal.kernel_limits import OPERANDS
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning.block_plans import (
    NORM_SIDE,
    REPACK_THREADS,
    AddNormPlan,
    CombinePlan,
    HeadsPlan,
    RepackPlan,
    RoutePlan,
)
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.work.tiles import SIMD_WIDTH
from mlx_marlin.weights.formats import TILE_K, TILE_N, planes_of
from mlx_marlin.weights.layout import bit_permutation

NO_EPILOGUE: dict[str, TemplateValue] = {
    "BIAS": False,
    "ACTIVATION": 0,
    "MULTIPLY": False,
    "RESIDUAL": False,
    "PARTS": 1,
}
"""Template arguments of an epilogue that does nothing."""


def product_template(plan: MetalPlan) -> dict[str, TemplateValue]:
    """Returns the template arguments of a plan's first kernel."""
    problem = plan.problem
    shared: dict[str, TemplateValue] = {
        "SIMDGROUPS_K": plan.simdgroups_k,
        "TILES_N": plan.simdgroups_n,
        "WHOLE": plan.is_whole,
        **({} if plan.buffers else {"BATCHED": problem.batch > 1}),
        **weight_template(problem),
        "OPERAND": OPERANDS.index(plan.operand),
    }
    fused = {} if plan.is_split else _fused_template(plan)
    ragged = {"RAGGED": problem.columns % TILE_N != 0}
    if plan.kernel == "gemv":
        return {"ROWS": plan.tile.m, **shared, **ragged, **fused}
    groups: dict[str, TemplateValue] = {
        "FRAGMENTS_M": plan.fragments_m,
        "SIMDGROUPS_M": plan.simdgroups_m,
    }
    if plan.has_tensor_operations:
        del shared["TILES_N"]
        return {**groups, **shared, **fused}
    return {
        **groups,
        **shared,
        **ragged,
        **_staging_template(plan),
        **fused,
    }


def _staging_template(plan: MetalPlan) -> dict[str, TemplateValue]:
    if not plan.buffers:
        return {}
    return {
        "BUFFERS": plan.buffers,
        "LOADERS": plan.loaders,
        "FRAGMENT_BYTES": plan.problem.fragment_bytes,
    }


def _fused_template(plan: MetalPlan) -> dict[str, TemplateValue]:
    problem = plan.problem
    if problem.norm is None:
        return epilogue_template(plan)
    # A kernel with a norm always has an epilogue, which may do nothing.
    epilogue = epilogue_template(plan) or {"T": problem.dtype, **NO_EPILOGUE}
    return {**epilogue, "EPSILON": float_bits(problem.norm)}


def reduce_template(plan: MetalPlan) -> dict[str, TemplateValue]:
    """Returns the template arguments of the reduce kernel of a split plan."""
    shared: dict[str, TemplateValue] = {
        "ROWS": REDUCE_ROWS,
        "BATCHED": plan.problem.batch > 1,
    }
    return shared | (epilogue_template(plan) or {"T": plan.problem.dtype})


def gather_template(plan: MetalGatherPlan) -> dict[str, TemplateValue]:
    """Returns the template arguments of the gather kernel."""
    return {
        "FRAGMENTS_M": plan.fragments_m,
        "SIMDGROUPS_M": plan.simdgroups_m,
        "SIMDGROUPS_K": plan.simdgroups_k,
        "DOT_ROWS": plan.dot_rows,
        "RAGGED": plan.problem.n % TILE_N != 0,
        **weight_template(plan.problem),
        "OPERAND": OPERANDS.index(plan.operand),
        **_expert_template(plan.gather),
    }


def _expert_template(gather: GatherProblem) -> dict[str, TemplateValue]:
    if not gather.is_fused:
        return {}
    return {"GATE": GATES.get(gather.gate or "", 0), "BIAS": gather.bias}


def shape(plan: MetalPlan) -> tuple[int, ...]:
    """Returns the sizes that `read_work` reads; n is that of the result."""
    m, _, *others = shared_arguments.shape(plan)
    return (m, plan.problem.columns, *others)


def repack_tiles(bits: int) -> int:
    """Returns the number of tiles along k that a threadgroup of `pack` moves.

    It is the fewest whose rows are whole lines of 128 bytes in MLX's layout.
    """
    return 16 // (bits & -bits)


def repack_template(bits: int, order: str) -> dict[str, TemplateValue]:
    """Returns the template arguments of `Codes` in `lib/repack.metal`."""
    planes = planes_of(bits)
    low, high = (
        [_hexadecimal(half) for half in _row_and_k(bit_permutation(plane, order))]
        for plane in (planes[0], planes[-1])
    )
    return {
        "BITS": bits,
        "TILES": repack_tiles(bits),
        "LOW": planes[0],
        "LOW_ROW": low[0],
        "LOW_K": low[1],
        "HIGH_ROW": high[0],
        "HIGH_K": high[1],
    }


def heads_template(plan: HeadsPlan) -> dict[str, TemplateValue]:
    """Returns the template arguments of the kernel that rotates heads."""
    heads = plan.heads
    return {
        "HEADS": heads.heads,
        "KV_HEADS": heads.kv_heads,
        "FEATURES": heads.features,
        "COLUMNS": heads.columns,
        "TOKENS": plan.tokens,
        "PER_STREAM": plan.per_stream,
        "NORM": heads.norm is not None,
        "EPSILON": float_bits(heads.norm or 0.0),
        "FACTOR": float_bits(heads.factor),
    }


def norm_template(plan: AddNormPlan) -> dict[str, TemplateValue]:
    """Returns the template arguments of the kernel that adds and normalizes rows."""
    return {
        "N": plan.n,
        "THREADS": plan.threadgroup,
        "SIDE": NORM_SIDE,
        "EPSILON": float_bits(plan.epsilon),
    }


def _row_and_k(
    bit_offsets: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    k_bits = TILE_K.bit_length() - 1
    return bit_offsets[k_bits:], bit_offsets[:k_bits]


def _hexadecimal(digits: tuple[int, ...]) -> int:
    return sum(digit << 4 * i for i, digit in enumerate(digits))


def launches(plan: Any) -> tuple[Launch, ...]:
    """Returns the launches of a plan, in order."""
    launches_of = BY_TYPE.get(type(plan))
    if launches_of is None:
        raise ValueError(f"the back end 'metal' has no kernel for {plan!r}")
    return launches_of(plan)


def _of_product(plan: MetalPlan) -> tuple[Launch, ...]:
    integers = {
        "shape": shape(plan),
        "schedule": schedule(plan),
        "parts": parts(plan),
    }
    text, template = source.of_product(plan), product_template(plan)
    first = build.product(plan, text, template, integers)
    if not plan.needs_second_pass:
        return (first,)
    text, template = source.of_reduce(plan), reduce_template(plan)
    integers["schedule"] = epilogue_schedule(plan)
    return first, build.reduce(plan, text, template, integers)


def _of_experts(plan: MetalGatherPlan) -> tuple[Launch]:
    text = source.kernel_source("gather_fused" if plan.gather.is_fused else "gather")
    return (build.gather(plan, text, gather_template(plan)),)


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
            template=(*heads_template(plan).items(),),
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
            template=(*norm_template(plan).items(),),
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
    template = repack_template(plan.bits, plan.order)
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
