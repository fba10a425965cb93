"""Launches that all back ends have: of products, their splits, experts and routing.

A back end gives the text of a kernel, its template arguments and its integers.
"""

import struct
from collections.abc import Mapping
from itertools import accumulate

from mlx_marlin.backends.launch import Launch, Output, TemplateValue, inputs_of
from mlx_marlin.backends.source import (
    EPILOGUE_OPERANDS,
    EXPERT_BIASES,
    HEAD_NORMS,
    NORM,
    ROTATION,
    SECOND,
    Source,
)
from mlx_marlin.planning.block_plans import CombinePlan, RoutePlan
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.epilogue import ACTIVATIONS, PLAIN, Epilogue, Rotation
from mlx_marlin.planning.gather_plan import GatherPlan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import SIMD_WIDTH
from mlx_marlin.weights.formats import (
    CHANNEL,
    CODES,
    GROUP_SIZES,
)

GATES = {"silu": ACTIVATIONS.index("silu"), "swiglu_oai": len(ACTIVATIONS)}
"""Numbers of the gates of experts in `lib/gate.metal`; 0 is none."""
GLOBAL_FLOATING = len(CODES)
"""MODE of floating codes with a global scale."""


def weight_template(problem: Problem) -> dict[str, TemplateValue]:
    """Returns the template arguments of `WeightFormat` in `lib/decode.metal`."""
    return {
        "MODE": GLOBAL_FLOATING
        if problem.global_scale
        else CODES.index(problem.format.codes),
        "BITS": problem.bits,
        "GROUP": problem.group_size if problem.group_size in GROUP_SIZES else CHANNEL,
        "PACKED": problem.layout == "marlin",
    }


def shape(plan: Plan) -> tuple[int, ...]:
    """Returns the sizes that `read_work` in `lib/work.metal` reads.

    MLX passes an input of fewer than eight elements in Metal's `constant` address
    space, which is the fastest one for values that all threads read. That is why sizes
    and schedule are two short arrays.
    """
    problem = plan.problem
    return (
        problem.m,
        problem.n,
        problem.k,
        plan.tile.m,
        plan.m_tiles,
        plan.k_tiles,
        plan.work.group_tiles,
    )


def schedule(plan: Plan) -> tuple[int, ...]:
    """Returns the division of the work that `read_work` in `lib/work.metal` reads."""
    work = plan.work
    return (
        work.whole,
        work.ranges,
        work.slices,
        work.minimum,
        work.groups,
        int(work.partition == "ceil"),
        plan.problem.batch,
    )


def parts(plan: Plan) -> tuple[int, ...]:
    """Returns the first column of each part of the product, and the last one's end."""
    return (0, *accumulate(plan.problem.epilogue.parts or (plan.problem.n,)))


def epilogue_schedule(plan: Plan) -> tuple[int, ...]:
    """Returns the schedule that the reduce of a split plan reads.

    Atomic sums are complete: to the reduce, no tile is split.
    """
    if plan.reduction == "workspace":
        return schedule(plan)
    return (plan.work.tiles, *schedule(plan)[1:])


def epilogue_template(plan: Plan) -> dict[str, TemplateValue]:
    """Returns the template arguments of an epilogue; none for a plain product."""
    epilogue: Epilogue = plan.problem.epilogue
    if epilogue == PLAIN:
        return {}
    activation = ACTIVATIONS.index(epilogue.activation)
    if epilogue.gated:
        return {"ACTIVATION": activation}
    if epilogue.rotation is not None:
        return {
            "T": plan.problem.dtype,
            "BIAS": epilogue.bias,
            "PARTS": len(parts(plan)) - 1,
            **_rotation_template(epilogue.rotation),
        }
    return {
        "T": plan.problem.dtype,
        "BIAS": epilogue.bias,
        "ACTIVATION": activation,
        "MULTIPLY": epilogue.multiply,
        "RESIDUAL": epilogue.residual,
        "PARTS": len(parts(plan)) - 1,
    }


def _rotation_template(rotation: Rotation) -> dict[str, TemplateValue]:
    known: dict[str, TemplateValue] = {
        "FEATURES": rotation.features,
        "ROTATED": rotation.columns,
        "EACH": rotation.per_row,
        "FACTOR": float_bits(rotation.factor),
    }
    if rotation.norm is None:
        return known
    return {
        **known,
        "HEAD_EPSILON": float_bits(rotation.norm),
        "QUERIES": rotation.queries,
    }


def float_bits(value: float) -> int:
    """Returns the bits of a float32, because template arguments cannot be floats."""
    return int.from_bytes(struct.pack("<f", value), "little")


Template = Mapping[str, TemplateValue]
Integers = Mapping[str, tuple[int, ...]]

IN_CONSTANT = 8
"""MLX passes Metal inputs of fewer elements in the `constant` address space, which the
`device` pointers of our kernels cannot read."""
REDUCE_ROWS = 4
"""Rows of one column that a thread of the reduce kernel adds."""
REDUCE_THREADGROUP = 256
"""Threads of a threadgroup of the reduce kernel. It has no barriers and no threadgroup
memory, so any size is correct; this one is whole simdgroups and every device allows
it. It was not measured."""
STAND_INS = {
    SECOND[0]: "w",
    SECOND[1]: "scales",
    **dict.fromkeys(EXPERT_BIASES, "x"),
    "sources": "experts",
}
"""Operands of the same types as those of experts that a product does not have."""
WEIGHT = ("w", "scales", "biases")


def dtypes_of(problem: Problem) -> dict[str, str]:
    """Returns the dtypes of the arrays that the kernels of a product read."""
    of_x = ("x", *EPILOGUE_OPERANDS, *HEAD_NORMS, *NORM, *EXPERT_BIASES)
    of_scales = ("scales", "biases", SECOND[1])
    integers = ("shape", "schedule", "parts", "numbers", ROTATION[0])
    return {
        **dict.fromkeys(of_x, problem.dtype),
        **dict.fromkeys(("w", SECOND[0], "sources", "experts"), "uint32"),
        **dict.fromkeys(of_scales, problem.scale_dtype),
        **dict.fromkeys(integers, "int32"),
        **dict.fromkeys(("partials", ROTATION[1]), "float32"),
    }


def product(plan: Plan, text: Source, template: Template, integers: Integers) -> Launch:
    """Returns the launch of a plan's first kernel."""
    problem = plan.problem
    split = plan.reduction == "workspace"
    partials = Output("partials", "float32", plan.workspace_shape, None)
    sums = Output("partials", "float32", (problem.n,))
    outputs = (
        (partials,) if split else (sums,) if plan.is_split else _results(plan, text)
    )
    words = problem.n * problem.k * problem.bits // 32
    least = problem.batch * min(problem.n * problem.groups, words)
    others = (*EPILOGUE_OPERANDS, *ROTATION, *HEAD_NORMS, *NORM)
    return Launch(
        source=text,
        template=(*template.items(),),
        inputs=inputs_of(
            text,
            dtypes_of(problem),
            small=(*others, *(WEIGHT if least < IN_CONSTANT else ())),
            reinterpreted=("biases",) if problem.global_scale else (),
        ),
        integers=(*integers.items(),),
        grid=(plan.num_threadgroups * plan.threads, 1, 1),
        threadgroup=(plan.threads, 1, 1),
        shared_bytes=plan.threadgroup_bytes,
        outputs=outputs,
        start=0.0 if text.atomic else None,
    )


def reduce(plan: Plan, text: Source, template: Template, integers: Integers) -> Launch:
    """Returns the launch that adds a split plan's partial sums, in ascending k."""
    problem = plan.problem
    threads = problem.batch * -(-problem.m // REDUCE_ROWS) * problem.n
    few = problem.batch * problem.m * problem.n < IN_CONSTANT
    small = (*EPILOGUE_OPERANDS, *(("partials",) if few else ()))
    return Launch(
        source=text,
        template=(*template.items(),),
        inputs=inputs_of(text, dtypes_of(problem), small=small),
        integers=(*integers.items(),),
        grid=(threads, 1, 1),
        threadgroup=(min(threads, REDUCE_THREADGROUP), 1, 1),
        outputs=_results(plan, text),
    )


def _results(plan: Plan, text: Source) -> tuple[Output, ...]:
    """Returns the results of a product; a kernel may write parts as one array."""
    problem = plan.problem
    rotation = problem.epilogue.rotation
    whole = text.output_names == ("out",)
    columns = (problem.columns,) if whole else problem.epilogue.parts
    pairs = zip(text.output_names, columns, strict=True)
    if rotation is None:
        return tuple(Output(name, problem.dtype, (n,)) for name, n in pairs)
    size = rotation.features
    return tuple(
        Output(name, problem.dtype, (problem.m, n // size, 1, size), None)
        for name, n in pairs
    )


def gather(plan: GatherPlan, text: Source, template: Template) -> Launch:
    """Returns the launch of experts' products."""
    problem, of_experts = plan.problem, plan.gather
    absent = {
        **({} if of_experts.gate else {name: STAND_INS[name] for name in SECOND}),
        **{
            name: STAND_INS[name]
            for name in EXPERT_BIASES[of_experts.weights if of_experts.bias else 0 :]
        },
        **({"sources": STAND_INS["sources"]} if plan.pairs_per_row else {}),
    }
    sizes = (problem.m, problem.n, problem.k, plan.pairs_per_row)
    dtypes = dtypes_of(problem)
    return Launch(
        source=text,
        template=(*template.items(),),
        inputs=inputs_of(text, dtypes, stand_ins=absent, small=tuple(dtypes)),
        integers=tuple(
            (name, sizes) for name in ("shape", "numbers") if name in text.input_names
        ),
        grid=(plan.num_threadgroups * plan.threads, 1, 1),
        threadgroup=(plan.threads, 1, 1),
        shared_bytes=plan.threadgroup_bytes,
        outputs=(Output("out", problem.dtype, (1, problem.n), ("experts", 0)),),
    )


def dequantize(plan: DequantizePlan, text: Source) -> tuple[Launch, ...]:
    """Returns the launches that decode the blocks of a weight, in order."""
    problem = plan.problem
    launches = []
    for i, block in enumerate(plan.chunks):
        _, rows, _, length = block
        threads, threadgroup = plan.decode_threads(block)
        sizes = (plan.rows, problem.k, *block)
        launches.append(
            Launch(
                source=text,
                template=(*weight_template(problem).items(),),
                inputs=inputs_of(
                    text,
                    dtypes_of(problem),
                    small=WEIGHT,
                    reinterpreted=("biases",) if problem.global_scale else (),
                ),
                integers=tuple(
                    (name, sizes)
                    for name in ("shape", "numbers")
                    if name in text.input_names
                ),
                grid=(threads, 1, 1),
                threadgroup=(threadgroup, 1, 1),
                outputs=(Output(f"block{i}", problem.dtype, (rows, length), None),),
            )
        )
    return tuple(launches)


def route(plan: RoutePlan, text: Source) -> Launch:
    """Returns the launch that chooses experts."""
    template: dict[str, TemplateValue] = {
        "T": plan.dtype,
        "EXPERTS": plan.experts,
        "EACH": plan.choices,
        "OF_ALL": plan.of_all,
        "LAST": plan.last,
    }
    return Launch(
        source=text,
        template=(*template.items(),),
        inputs=inputs_of(text, {"logits": plan.dtype}, small=("logits",)),
        grid=(plan.threads, 1, 1),
        threadgroup=(SIMD_WIDTH, 1, 1),
        outputs=(
            Output("experts", "uint32", (plan.choices,), ("logits", 1)),
            Output("scores", "float32", (plan.choices,), ("logits", 1)),
        ),
    )


def combine(plan: CombinePlan, text: Source) -> Launch:
    """Returns the launch that adds weighted results of experts to a residual."""
    dtypes = {"results": plan.dtype, "scores": "float32", "residual": plan.dtype}
    return Launch(
        source=text,
        template=(("T", plan.dtype), ("N", plan.n), ("EACH", plan.choices)),
        inputs=inputs_of(text, dtypes),
        grid=(plan.threads, 1, 1),
        threadgroup=(plan.threadgroup, 1, 1),
        outputs=(Output("out", plan.dtype, (plan.n,), ("residual", 1)),),
    )
