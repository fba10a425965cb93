"""Arguments of kernels: template arguments, which are constants to the compiler, and
numbers, which the kernels read from arrays."""

import struct
from itertools import accumulate

from mlx_marlin.backends.launch import TemplateValue
from mlx_marlin.planning.epilogue import ACTIVATIONS, PLAIN, Epilogue, Rotation
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
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
