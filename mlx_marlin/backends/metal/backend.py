"""The Metal back end: plans and kernels for Apple GPUs and for the emulator.

The module implements `backends.base.Backend`.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlx_marlin.backends.base import KernelCall
from mlx_marlin.backends.launch import Launch
from mlx_marlin.backends.metal.choice import best
from mlx_marlin.backends.metal.choice import candidates as candidates
from mlx_marlin.backends.metal.cost.predict import predict as predict
from mlx_marlin.backends.metal.cost.residency import residency as residency
from mlx_marlin.backends.metal.device import DEFAULT, Device
from mlx_marlin.backends.metal.experts.plan import MetalGatherPlan
from mlx_marlin.backends.metal.kernel_choice import default_kernel, has_registers
from mlx_marlin.backends.metal.launches import BY_TYPE
from mlx_marlin.backends.metal.launches import launches as launches
from mlx_marlin.backends.metal.limits import (
    KERNELS,
    NORM_ROWS,
    OPERATION_FRAGMENTS,
    TENSOR_KERNEL,
)
from mlx_marlin.backends.metal.operands import PROBED
from mlx_marlin.backends.metal.plan import MetalPlan, splits_packed_tile
from mlx_marlin.backends.traits import Traits
from mlx_marlin.planning.dequantize_plan import DequantizePlan
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
        from mlx_marlin.backends.metal.experts import search as experts

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
    from mlx_marlin.backends.metal.experts import search as experts

    return experts.choose_gather(gather, device)


def seconds(plan: DequantizePlan | GatherPlan, device: Device) -> float:
    """Returns the predicted time of a plan that decodes first or is of experts."""
    if isinstance(plan, DequantizePlan):
        from mlx_marlin.backends.metal.dequantize import dequantize_seconds

        return dequantize_seconds(plan.problem, device)
    from mlx_marlin.backends.metal.experts import search as experts

    return experts.gather_seconds(plan.gather, device)[1]


def predict_stock(problem: Problem, device: Device) -> Any:
    """Returns the time that the model predicts for stock MLX."""
    from mlx_marlin.backends.metal.stock.prediction import stock_prediction

    return stock_prediction(problem, device)


def stock_seconds(problem: AnyProblem, device: Device) -> float:
    """Returns the predicted time of stock MLX with norm and epilogue."""
    if isinstance(problem, GatherProblem):
        from mlx_marlin.backends.metal.experts import search as experts

        return experts.gather_seconds(problem, device)[0]
    from mlx_marlin.backends.metal.stock import handover as stock

    return stock.stock_seconds(problem, device)


def handover(
    problem: AnyProblem, device: Device, predicted: Callable[[], Prediction]
) -> str | None:
    """Returns why stock MLX should serve a problem for speed, or None.

    A packed weight stays with these kernels, but operations that its product fuses may
    be predicted to be faster apart.
    """
    if isinstance(problem, GatherProblem):
        from mlx_marlin.backends.metal.experts import search as experts

        return experts.gather_handover(problem, device)
    from mlx_marlin.backends.metal.stock import handover as stock

    normed = problem.norm is not None
    if normed and not has_registers(problem, device, 0):
        return (
            f"{problem.m} rows on {device.variant}: a product with its norm takes more "
            f"registers than a thread has, {device.core.thread_registers}"
        )
    if problem.layout == "marlin" and (problem.epilogue.gated or normed):
        rest: dict[str, Any] = {"norm": None} if normed else {"epilogue": PLAIN}
        apart = predict(best(replace(problem, **rest), device), device).seconds
        return stock.faster_apart(problem, device, apart, predicted().seconds)
    return stock.handover(problem, device, predicted())


def dequantize_first(
    problem: Problem, device: Device, predicted: Callable[[], Prediction]
) -> DequantizePlan | None:
    """Returns the plan that decodes the weight first, if it is faster.

    For a weight in MLX's layout it must be faster by the margin of `handover`.
    """
    from mlx_marlin.backends.metal.dequantize import dequantize_if_faster

    others = predicted().seconds
    if problem.layout == "mlx":
        from mlx_marlin.backends.metal.stock.margin import margin_over_stock

        margin = margin_over_stock(problem, device)
        others = min(others, stock_seconds(problem, device)) / margin
    return dequantize_if_faster(problem, device, others)


def ahead(mlx: str) -> None:
    """Returns nothing: MLX's kernels for Metal are compiled already."""


def experiments(problem: Problem, device: Device) -> list[Plan]:
    """Returns plans that the model does not choose by itself.

    They are those of `gemm_staged` if several simdgroups of the chosen plan decode the
    same weights, and variants with more registers than were counted for a thread; none
    is predicted to be much slower.
    """
    from mlx_marlin.backends.metal.experiments import tuned

    return tuned.experiments(problem, device)


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


def probes(plan: Any) -> Sequence[Any]:
    """Returns the checks of the operations that not every GPU is known to have."""
    if isinstance(plan, MetalPlan) and plan.has_tensor_operations:
        from mlx_marlin.backends.metal import tensor_probe

        return tensor_probe.probes(plan)
    if getattr(plan, "operand", None) in PROBED:
        from mlx_marlin.backends.metal import operand_probe

        return (operand_probe.probe(plan.operand),)
    return ()


def alternative(
    plan: MetalPlan | MetalGatherPlan, device: Device
) -> Plan | GatherPlan | None:
    """Returns the best plan that depends on fewer operations that a GPU may lack.

    A kernel with two tensor operations a simdgroup may spill registers, and with one be
    right. Codes of a form that is probed may be exact ones instead.
    """
    if isinstance(plan, MetalGatherPlan):
        from mlx_marlin.backends.metal.experts import search as experts

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
