"""The Metal back end: plans and kernels for Apple GPUs and for the emulator.

The module implements `backends.base.Backend`. Where nobody has measured a product, a
table decides whether stock MLX serves a weight in MLX's layout: `python -m
benchmarks.stock` writes `data/handover.json` by a model of stock MLX, from products of
common sizes. A packed weight stays with our kernels, but what its product fuses may be
predicted to be faster apart.
"""

import json
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from mlx_marlin.backends import planner
from mlx_marlin.backends.base import KernelCall, Traits
from mlx_marlin.backends.launch import Launch
from mlx_marlin.backends.metal import choice, experts, kernel_limits
from mlx_marlin.backends.metal.choice import best
from mlx_marlin.backends.metal.choice import candidates as candidates
from mlx_marlin.backends.metal.cost import dequantize_if_faster, dequantize_seconds
from mlx_marlin.backends.metal.cost import predict as predict
from mlx_marlin.backends.metal.device import DEFAULT, Device
from mlx_marlin.backends.metal.experts import MetalGatherPlan
from mlx_marlin.backends.metal.kernel_limits import (
    KERNELS,
    NORM_ROWS,
    OPERATION_FRAGMENTS,
    PROBED,
    TENSOR_KERNEL,
    default_kernel,
    has_registers,
)
from mlx_marlin.backends.metal.launches import BY_TYPE
from mlx_marlin.backends.metal.launches import launches as launches
from mlx_marlin.backends.metal.main_loop import level_seconds, memory_seconds
from mlx_marlin.backends.metal.plan import MetalPlan, splits_packed_tile
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.device import Residency
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.gather_plan import AnyProblem, GatherPlan, GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import MODEL_ERROR
from mlx_marlin.weights.formats import TILE_N

name = "metal"
traits = Traits(
    device_noun="an Apple chip",
    default_device=DEFAULT,
    kernels=KERNELS,
    plan_type=MetalPlan,
    launches=frozenset(BY_TYPE),
    pads_small_inputs=True,
    keeps_experts_bits=True,
)
find_device = Device.named


def unsupported(
    problem: AnyProblem, device: Device, transpose: bool = True
) -> str | None:
    """Returns why the kernels cannot compute a problem, or None."""
    if isinstance(problem, GatherProblem):
        return experts.gather_unsupported(problem)
    if problem.epilogue.gated and problem.invariant:
        return "our Metal kernels gate no products that are invariant"
    if problem.epilogue.gated and splits_packed_tile(problem):
        return (
            f"our Metal kernels gate packed weights whose halves are whole tiles, "
            f"and n / 2 = {problem.columns} is no multiple of {TILE_N}"
        )
    if problem.epilogue.rotation is not None:
        return "our Metal kernels do not fuse rotary embeddings"
    if problem.norm is not None and problem.invariant:
        return "our Metal kernels normalize no rows of products that are invariant"
    if problem.norm is not None and problem.m > NORM_ROWS:
        return (
            f"our Metal kernels normalize at most {NORM_ROWS} rows, got m={problem.m}"
        )
    return None


def choose_gather(gather: GatherProblem, device: Device) -> GatherPlan:
    """Returns the plan for experts' products."""
    return experts.choose_gather(gather, device)


def seconds(plan: DequantizePlan | GatherPlan, device: Device) -> float:
    """Returns the predicted time of a plan that decodes first or is of experts."""
    if isinstance(plan, DequantizePlan):
        return dequantize_seconds(plan.problem, device)
    return experts.gather_seconds(plan.gather, device)


def handover(
    problem: AnyProblem, device: Device, plan: MetalPlan | None = None
) -> str | None:
    """Returns why stock MLX should serve a problem for speed, or None.

    The table's reasons hold for the best plan. Another one is judged by its predicted
    time: a user asks for it, or it stands in for one that a GPU computes wrong.
    """
    if isinstance(problem, GatherProblem):
        return reason_of_experts(problem, device)
    normed = problem.norm is not None
    if normed and not has_registers(problem, device, 0):
        return (
            f"{problem.m} rows on {device.variant}: a product with its norm takes more "
            f"registers than a thread has, {device.core.thread_registers}"
        )
    if problem.layout == "marlin" and (problem.epilogue.gated or normed):
        rest: dict[str, Any] = {"norm": None} if normed else {"epilogue": PLAIN}
        apart = planner.propose(replace(problem, **rest), device).seconds
        return faster_apart(problem, device, apart, _seconds(problem, device, plan))
    if problem.layout == "marlin" or problem.invariant:
        return None
    line = line_of(problem, device)
    if not has(line.ours, problem.m):
        return (
            f"{_rows(problem.m)} on {device.variant}: by the table of {line.chip} our "
            f"kernels serve {words(line.ours)} of such a weight (not measured here)"
        )
    if plan is None:
        return None
    best = planner.propose(problem, device).seconds
    ratio = _seconds(problem, device, plan) / best
    if ratio <= MOST_SLOWER:
        return None
    return (
        f"{_rows(problem.m)} on {device.variant}: this plan is predicted to take "
        f"{ratio:.2f} times the time of the best one, for which the table of "
        f"{line.chip} was written"
    )


def _seconds(problem: Problem, device: Device, plan: MetalPlan | None) -> float:
    if plan is None:
        return planner.propose(problem, device).seconds
    return predict(plan, device).seconds


def dequantize_first(problem: Problem, device: Device) -> DequantizePlan | None:
    """Returns the plan that decodes the weight first, if it is faster.

    A table says so of a weight in MLX's layout, which stock MLX could serve too.
    """
    if problem.layout == "marlin":
        others = planner.propose(problem, device).seconds
    else:
        is_decoded = has(line_of(problem, device).decoded, problem.m)
        others = inf if is_decoded else 0.0
    return dequantize_if_faster(problem, device, others)


def ahead(mlx: str) -> None:
    """Returns nothing: MLX's kernels for Metal are compiled already."""


def experiments(problem: Problem, device: Device) -> list[Plan]:
    """Returns plans that the model does not choose by itself.

    They are those of `gemm_staged` if several simdgroups of the chosen plan decode the
    same weights, and variants with more registers than were counted for a thread; none
    is predicted to be much slower.
    """
    return choice.experiments(problem, device)


def detect_device() -> Device | None:
    """Returns this Mac's chip; None on another system."""
    if sys.platform != "darwin":
        return None
    from mlx_marlin.backends.metal import detection

    return detection.detect_device()


def system_build() -> str:
    """Returns the build of macOS, or another system's kernel release."""
    from mlx_marlin.backends.metal import detection

    return detection.os_build()


def residency(plan: MetalPlan, device: Device) -> Residency:
    """Returns how many threadgroups of a plan are resident on a core."""
    return kernel_limits.residency(plan, plan.registers, device)


def probes(plan: Any) -> Sequence[Any]:
    """Returns the checks of the operations that not every GPU is known to have."""
    if isinstance(plan, MetalPlan) and plan.has_tensor_operations:
        from mlx_marlin.backends.metal import probes

        return probes.probes(plan)
    if getattr(plan, "operand", None) in PROBED:
        from mlx_marlin.backends.metal import probes

        return (probes.probe(plan.operand),)
    return ()


def alternative(
    plan: MetalPlan | MetalGatherPlan, device: Device
) -> Plan | GatherPlan | None:
    """Returns the best plan that depends on fewer operations that a GPU may lack.

    A kernel with two tensor operations a simdgroup may spill registers, and with one be
    right. Codes of a form that is probed may be exact ones instead.
    """
    if isinstance(plan, MetalGatherPlan):
        probed = plan.operand in PROBED
        return experts.choose_gather(plan.gather, device, "exact") if probed else None
    if plan.operand in PROBED:
        given = PlanOverrides(kernel=plan.kernel, operand="exact")
        return best(plan.problem, device, given)
    if not plan.has_tensor_operations:
        return None
    if plan.fragments_m > OPERATION_FRAGMENTS:
        one = PlanOverrides(kernel=TENSOR_KERNEL, fragments_m=OPERATION_FRAGMENTS)
        return best(plan.problem, device, one)
    kernel = default_kernel(plan.problem, device)
    return best(plan.problem, device, {"kernel": kernel})


def kernel(launch: Launch) -> KernelCall:
    """Returns a call that launches a kernel, whose text declares its memory."""
    from mlx_marlin.backends import kernels

    return kernels.kernel(launch.source)


MOST_SLOWER = 1.15
"""Times the time of our best plan that another one may be predicted to take where the
table says that our kernels serve: our least lead over stock MLX in the table."""
FILE = Path(__file__).parents[2] / "data" / "handover.json"


def has(ranges: str, rows: int) -> bool:
    """Returns whether a number of rows is in ranges such as "5-31 33-63 129-"."""
    ends = (each.split("-") for each in ranges.split())
    return any(int(first) <= rows <= int(last or rows) for first, last in ends)


def words(ranges: str) -> str:
    """Returns ranges as text."""
    texts = [
        f"{first} to {last}" if last else f"{first} and more"
        for first, last in (each.split("-") for each in ranges.split())
    ]
    return f"{', '.join(texts) or 'no number of'} rows"


class Line(NamedTuple):
    """What the table says of weights in MLX's layout, in a format, on a chip."""

    chip: str  # The chip of the table
    ours: str  # Ranges of rows that our kernels serve if no weight is decoded first
    decoded: str  # Ranges of rows with which a weight is decoded first
    # Least pairs per expert of our kernel for experts, and the most of sorted pairs,
    # below the least where sorted pairs are never ours
    experts: tuple[float, float]


def reason_of_experts(gather: GatherProblem, device: Device) -> str | None:
    """Returns why stock MLX serves experts in MLX's layout; None if it does not."""
    problem = gather.problem
    if problem.layout != "mlx" or problem.invariant:
        return None
    line = line_of(problem, device)
    least, most = line.experts
    pairs = problem.m / gather.experts
    if least <= pairs and not (gather.is_sorted and pairs > most):
        return None
    limits = f"from {least:g}" + f" to {most:g}" * gather.is_sorted
    if gather.is_sorted and most < least:
        limits = "no number of sorted"
    return (
        f"{_rows(problem.m)} over {gather.experts} experts on {device.variant}: by the "
        f"table of {line.chip} our kernel serves {limits} rows an expert (not measured "
        f"here)"
    )


@lru_cache(maxsize=4096)
def line_of(problem: Problem, device: Device) -> Line:
    """Returns what the table says of a product on a device."""
    table, chip = _table(), _chip(device)
    found = table["chips"][chip][problem.dtype][f"{problem.mode} {problem.bits}"]
    size = bisect_right(table["columns"], problem.n)
    ours = ["", *found["ours"]][size]
    decoded = ["", *found["decoded"]][size] if "decoded" in found else ""
    return Line(chip, ours, decoded, tuple(found["experts"]))


def _chip(device: Device) -> str:
    """Returns the chip of the table that stands for a device.

    It is the newest one up to the device's generation that has its tier, and tensor
    units as the device has them.
    """
    known = [Device.named(name) for name in _table()["chips"]]
    tier = "base" if device.tier == "unknown" else device.tier
    units = device.has_tensor_units
    alike = [each for each in known if each.has_tensor_units == units]
    alike = [each for each in alike if each.tier == tier] or alike
    older = [each for each in alike if each.arch_gen <= device.arch_gen]
    return (older or alike[:1])[-1].name


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return table


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def faster_apart(
    problem: Problem, device: Device, product: float, fused: float
) -> str | None:
    """Returns why separate operations are predicted to be faster, or None.

    They must be faster by `MODEL_ERROR`: a caller asks for one kernel.

    `product`: predicted seconds of the best plan without the norm, or without the
    epilogue.
    `fused`: predicted seconds of the best plan with it.
    """
    norm = norm_seconds(problem, device)
    apart = product + (norm or epilogue_seconds(problem, device))
    if fused <= apart * (1 + MODEL_ERROR):
        return None
    return (
        f"{_rows(problem.m)} on {device.variant}: the model gives a product and its "
        f"{'norm' if norm else 'epilogue'} {apart * 1e6:.1f} us as separate "
        f"operations, and {fused * 1e6:.1f} us as one kernel"
    )


def norm_seconds(problem: Problem, device: Device) -> float:
    """Returns the predicted seconds of an RMSNorm of x as an operation of its own."""
    if problem.norm is None:
        return 0.0
    moved = 2 * problem.activation_bytes
    return level_seconds(device) + memory_seconds(moved, device)


def epilogue_seconds(problem: Problem, device: Device) -> float:
    """Returns the predicted seconds of an epilogue as one operation of its own."""
    epilogue = problem.epilogue
    if epilogue == PLAIN:
        return 0.0
    moved = (2 + epilogue.operands + epilogue.gated) * problem.output_bytes
    return level_seconds(device) + memory_seconds(moved, device)
