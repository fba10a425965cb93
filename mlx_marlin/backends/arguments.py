"""Says what a plan's kernels are told: template arguments and numbers.

Template arguments are what the compiler knows. Numbers are what a kernel reads.
"""

import struct
from itertools import accumulate

from mlx_marlin.backends.cuda.experts_plan import CudaGatherPlan
from mlx_marlin.backends.metal.experts_plan import GatherPlan
from mlx_marlin.planning.epilogue import ACTIVATIONS, PLAIN, Epilogue, Rotation
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights.formats import (
    CHANNEL,
    CODES,
    GROUP_SIZES,
    TILE_K,
    TILE_N,
    planes_of,
)
from mlx_marlin.weights.layout import bit_places

GATES = {"silu": ACTIVATIONS.index("silu"), "swiglu_oai": len(ACTIVATIONS)}
"""As `cuda/gated.cuh` numbers them."""
TemplateValue = str | int | bool
"""A dtype's name, a number or a flag."""
GLOBAL_FLOATING = len(CODES)
"""MODE of small floats that have a global scale too."""


def product_template(plan: Plan) -> dict[str, TemplateValue]:
    """Returns the template arguments of a plan's first kernel."""
    problem = plan.problem
    if plan.on_cuda:
        return _cuda_template(plan)
    shared: dict[str, TemplateValue] = {
        "SIMDGROUPS_K": plan.simdgroups_k,
        "WIDE": plan.simdgroups_n,
        "WHOLE": plan.is_whole,
        **({} if plan.buffers else {"BATCHED": problem.batch > 1}),
        **weight_template(problem),
        "SUBTRACT": plan.subtract,
    }
    fused = {} if plan.is_split else _epilogue_template(plan)
    if plan.kernel == "gemv":
        return {"ROWS": plan.tile.m, **shared, **fused}
    staged = {"BUFFERS": plan.buffers, "LOADERS": plan.loaders} if plan.buffers else {}
    return {
        "FRAGMENTS_M": plan.fragments_m,
        "SIMDGROUPS_M": plan.simdgroups_m,
        **shared,
        "RAGGED": problem.n % TILE_N != 0,
        "WIDEN": problem.in_float,
        **staged,
        **fused,
    }


def _cuda_template(plan: Plan) -> dict[str, TemplateValue]:
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
        **({} if plan.is_split else _epilogue_template(plan)),
    }


def gather_template(plan: GatherPlan) -> dict[str, TemplateValue]:
    """Returns the template arguments of the kernel for experts' products."""
    return {
        "FRAGMENTS_M": plan.fragments_m,
        "SIMDGROUPS_M": plan.simdgroups_m,
        "SIMDGROUPS_K": plan.simdgroups_k,
        "DOT_ROWS": plan.dot_rows,
        "RAGGED": plan.problem.n % TILE_N != 0,
        **weight_template(plan.problem),
        "SUBTRACT": plan.subtract,
        "WIDEN": plan.problem.in_float,
    }


def cuda_gather_template(plan: CudaGatherPlan) -> dict[str, TemplateValue]:
    """Returns the template arguments of CUDA's kernel for experts' products."""
    return {
        "FRAGMENTS_M": plan.fragments_m,
        "SIMDGROUPS_N": plan.simdgroups_n,
        "SIMDGROUPS_K": plan.simdgroups_k,
        "BY_PAIR": plan.by_pair,
        "EACH": plan.each,
        **({"ACTIVATION": GATES[plan.gate]} if plan.gate else {}),
        **({"T": plan.problem.dtype} if plan.bias else {}),
        **weight_template(plan.problem),
    }


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


def repack_tiles(bits: int) -> int:
    """Returns how many tiles along k a threadgroup moves.

    As few as make a row of them whole lines of 128 bytes in MLX's layout.
    """
    return 16 // (bits & -bits)


def repack_template(bits: int, order: str) -> dict[str, TemplateValue]:
    """Returns the template arguments of `Codes` in `lib/repack.metal`.

    Args:
        bits: Bits of a code.
        order: The order of k, "k32" or "k64".
    """
    planes = planes_of(bits)
    low, high = (
        [_hexadecimal(half) for half in _row_and_k(bit_places(plane, order))]
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


def reduce_template(plan: Plan) -> dict[str, TemplateValue]:
    """Returns the template arguments of the reduce that follows a split plan."""
    shared: dict[str, TemplateValue] = {"BATCHED": plan.problem.batch > 1}
    if plan.on_cuda:
        shared["SIMDGROUPS_N"] = plan.simdgroups_n
    return shared | (_epilogue_template(plan) or {"T": plan.problem.dtype})


def shape(plan: Plan) -> tuple[int, ...]:
    """Returns the sizes that `read_work` in `lib/work.metal` reads.

    MLX hands over an input of fewer than eight elements in Metal's `constant` address
    space, where a value that all threads share belongs: hence two short arrays.
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
    """Returns who computes what, as `read_work` in `lib/work.metal` reads it."""
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
    """Returns the first column of each result that the product holds, and the end."""
    return (0, *accumulate(plan.problem.epilogue.parts or (plan.problem.n,)))


def numbers(plan: Plan) -> tuple[int, ...]:
    """Returns all that CUDA's kernels read of a plan, in one array."""
    several = plan.problem.epilogue.parts
    return (*shape(plan), *schedule(plan), *(parts(plan) if several else ()))


def finishing_schedule(plan: Plan) -> tuple[int, ...]:
    """Returns the schedule that a split plan's reduce reads: atomic sums are whole."""
    if plan.reduction == "workspace":
        return schedule(plan)
    return (plan.work.tiles, *schedule(plan)[1:])


def _epilogue_template(plan: Plan) -> dict[str, TemplateValue]:
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
        "EACH": rotation.each,
        "FACTOR": _float_bits(rotation.factor),
    }
    if rotation.norm is None:
        return known
    return {
        **known,
        "HEAD_EPSILON": _float_bits(rotation.norm),
        "QUERIES": rotation.queries,
    }


def _norm_template(problem: Problem) -> dict[str, TemplateValue]:
    return {} if problem.norm is None else {"EPSILON": _float_bits(problem.norm)}


def _float_bits(value: float) -> int:
    """Returns the bits of a float32: templates have no floats."""
    return int.from_bytes(struct.pack("<f", value), "little")


def _row_and_k(places: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    k_bits = TILE_K.bit_length() - 1
    return places[k_bits:], places[:k_bits]


def _hexadecimal(digits: tuple[int, ...]) -> int:
    return sum(digit << 4 * i for i, digit in enumerate(digits))
