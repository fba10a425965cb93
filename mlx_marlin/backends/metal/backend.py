"""The Metal back end: plans and kernels for Apple GPUs and for the emulator.

The module implements `backends.base.Backend`.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from mlx_marlin.backends.base import KernelCall
from mlx_marlin.backends.launch import Launch
from mlx_marlin.backends.metal import experts, kernel_limits
from mlx_marlin.backends.metal.choice import best
from mlx_marlin.backends.metal.choice import candidates as candidates
from mlx_marlin.backends.metal.cost import predict as predict
from mlx_marlin.backends.metal.device import DEFAULT, Device
from mlx_marlin.backends.metal.experts import MetalGatherPlan
from mlx_marlin.backends.metal.kernel_choice import (
    PROBED,
    default_kernel,
    has_registers,
)
from mlx_marlin.backends.metal.kernel_limits import (
    KERNELS,
    NORM_ROWS,
    OPERATION_FRAGMENTS,
    TENSOR_KERNEL,
)
from mlx_marlin.backends.metal.launches import BY_TYPE
from mlx_marlin.backends.metal.launches import launches as launches
from mlx_marlin.backends.metal.plan import MetalPlan, splits_packed_tile
from mlx_marlin.backends.traits import Traits
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.device import Residency
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.gather_plan import AnyProblem, GatherPlan, GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import Prediction
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
        from mlx_marlin.backends.metal.cost import dequantize_seconds

        return dequantize_seconds(plan.problem, device)
    return experts.gather_seconds(plan.gather, device)


def handover(
    problem: AnyProblem, device: Device, predicted: Callable[[], Prediction]
) -> str | None:
    """Returns why stock MLX should serve a problem for speed, or None.

    A packed weight stays with these kernels, but operations that its product fuses may
    be predicted to be faster apart.
    """
    from mlx_marlin.backends.metal import handover as rules

    if isinstance(problem, GatherProblem):
        return rules.reason_of_experts(problem, device)
    normed = problem.norm is not None
    if normed and not has_registers(problem, device, 0):
        return (
            f"{problem.m} rows on {device.variant}: a product with its norm takes more "
            f"registers than a thread has, {device.core.thread_registers}"
        )
    if problem.layout == "marlin" and (problem.epilogue.gated or normed):
        rest: dict[str, Any] = {"norm": None} if normed else {"epilogue": PLAIN}
        apart = predict(best(replace(problem, **rest), device), device).seconds
        return rules.faster_apart(problem, device, apart, predicted().seconds)
    if problem.layout == "marlin":
        return None
    return rules.reason(problem, device, predicted)


def dequantize_first(
    problem: Problem, device: Device, predicted: Callable[[], Prediction]
) -> DequantizePlan | None:
    """Returns the plan that decodes the weight first, if it is faster.

    A table says so of a weight in MLX's layout, which stock MLX could serve too.
    """
    from mlx_marlin.backends.metal.cost import dequantize_if_faster

    if problem.layout == "marlin":
        return dequantize_if_faster(problem, device, predicted().seconds)
    from mlx_marlin.backends.metal.handover import is_decoded_first

    others = inf if is_decoded_first(problem, device) else 0.0
    return dequantize_if_faster(problem, device, others)


def ahead(mlx: str) -> None:
    """Returns nothing: MLX's kernels for Metal are compiled already."""


def experiments(problem: Problem, device: Device) -> list[Plan]:
    """Returns plans that the model does not choose by itself.

    They are those of `gemm_staged` if several simdgroups of the chosen plan decode the
    same weights, and variants with more registers than were counted for a thread; none
    is predicted to be much slower.
    """
    from mlx_marlin.backends.metal import choice

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
