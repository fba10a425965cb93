"""The Metal back end: plans and kernels for Apple GPUs and for the emulator."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mlx_marlin.backends.base import AnyProblem, KernelCall, Probe
from mlx_marlin.backends.launch import Launch
from mlx_marlin.backends.metal import choice, cost, launches, tensor_probe
from mlx_marlin.backends.metal.candidates import default_kernel
from mlx_marlin.backends.metal.cost.residency import residency
from mlx_marlin.backends.metal.dequantize import (
    dequantize_if_faster,
    dequantize_seconds,
)
from mlx_marlin.backends.metal.device import DEFAULT, Device
from mlx_marlin.backends.metal.experts import search as experts
from mlx_marlin.backends.metal.experts.plan import MetalGatherPlan
from mlx_marlin.backends.metal.limits import KERNELS, NORM_ROWS
from mlx_marlin.backends.metal.plan import MetalPlan, splits_packed_tile
from mlx_marlin.backends.metal.stock.handover import (
    faster_apart,
    handover,
    stock_seconds,
)
from mlx_marlin.backends.metal.stock.margin import margin_over_stock
from mlx_marlin.backends.metal.stock.prediction import StockPrediction, stock_prediction
from mlx_marlin.backends.traits import Traits
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.device import Residency
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.prediction import Prediction
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import BestSoFar, Candidate
from mlx_marlin.weights.formats import TILE_N


class MetalBackend:
    """Implements `Backend` for Metal."""

    name = "metal"
    traits = Traits(
        device_noun="an Apple chip",
        default_device=DEFAULT,
        kernels=KERNELS,
        plan_type=MetalPlan,
        launches=frozenset(launches.BY_TYPE),
        pads_small_inputs=True,
        keeps_experts_bits=True,
    )

    def unsupported(
        self, problem: AnyProblem, device: Device, transpose: bool = True
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
                f"our Metal kernels normalize at most {NORM_ROWS} rows, got "
                f"m={problem.m}"
            )
        return None

    def candidates(
        self,
        problem: Problem,
        device: Device,
        overrides: PlanOverrides,
        limit: BestSoFar,
    ) -> Iterator[Candidate]:
        """Yields the plans to compare, at least one.

        Raises:
            ValueError: If no plan has the fields in `overrides`.
        """
        return choice.compared(problem, device, overrides, limit)

    def choose_gather(self, gather: GatherProblem, device: Device) -> MetalGatherPlan:
        """Returns the plan for experts' products."""
        return experts.choose_gather(gather, device)

    def predict(self, plan: MetalPlan, device: Device) -> Prediction:
        """Returns the time that the cost model predicts for a plan."""
        return cost.predict(plan, device)

    def residency(self, plan: MetalPlan, device: Device) -> Residency:
        """Returns how many threadgroups of a plan are resident on a core."""
        return residency(plan, device)

    def seconds(self, plan: DequantizePlan | MetalGatherPlan, device: Device) -> float:
        """Returns the predicted time of a plan that decodes first or is of experts."""
        if isinstance(plan, DequantizePlan):
            return dequantize_seconds(plan.problem, device)
        return experts.gather_seconds(plan.gather, device)[1]

    def predict_stock(self, problem: Problem, device: Device) -> StockPrediction:
        """Returns the time that the model predicts for stock MLX."""
        return stock_prediction(problem, device)

    def stock_seconds(self, problem: AnyProblem, device: Device) -> float:
        """Returns the predicted time of stock MLX with norm and epilogue."""
        if isinstance(problem, GatherProblem):
            return experts.gather_seconds(problem, device)[0]
        return stock_seconds(problem, device)

    def handover(
        self, problem: AnyProblem, device: Device, predicted: Callable[[], Prediction]
    ) -> str | None:
        """Returns why stock MLX should serve a problem for speed, or None.

        A packed weight stays with these kernels, but operations that its product fuses
        may be predicted to be faster apart.
        """
        if isinstance(problem, GatherProblem):
            return experts.gather_handover(problem, device)
        normed = problem.norm is not None
        if problem.layout == "marlin" and (problem.epilogue.gated or normed):
            rest: dict[str, Any] = {"norm": None} if normed else {"epilogue": PLAIN}
            plan = choice.best(replace(problem, **rest), device)
            apart = cost.predict(plan, device).seconds
            return faster_apart(problem, device, apart, predicted().seconds)
        return handover(problem, device, predicted())

    def dequantize_first(
        self, problem: Problem, device: Device, predicted: Callable[[], Prediction]
    ) -> DequantizePlan | None:
        """Returns the plan that decodes the weight first, if it is faster.

        For a weight in MLX's layout it must be faster by the margin of `handover`.
        """
        others = predicted().seconds
        if problem.layout == "mlx":
            margin = margin_over_stock(problem, device)
            others = min(others, stock_seconds(problem, device)) / margin
        return dequantize_if_faster(problem, device, others)

    def experiments(self, problem: Problem, device: Device) -> list[Plan]:
        """Returns plans of `gemm_staged`, which is never among the candidates.

        There are some if several simdgroups of the chosen plan decode the same weights,
        and `gemm_staged` is not predicted to be much slower.
        """
        from mlx_marlin.backends.metal.experiments import tuned

        return tuned.experiments(problem, device)

    def find_device(self, name: str, cores: int | None) -> Device:
        """Returns a chip by its name.

        Raises:
            UnknownDeviceError: If the name is not known.
        """
        return Device.named(name, cores)

    def detect_device(self) -> Device | None:
        """Returns this Mac's chip; None on another system."""
        if sys.platform != "darwin":
            return None
        from mlx_marlin.backends.metal import detection

        return detection.detect_device()

    def system_build(self) -> str:
        """Returns the build of macOS, or another system's kernel release."""
        from mlx_marlin.backends.metal import detection

        return detection.os_build()

    def probes(self, plan: Any) -> Sequence[Probe]:
        """Returns the checks of tensor operations, if a plan's kernel has them."""
        is_product = isinstance(plan, MetalPlan)
        return tensor_probe.probes(plan) if is_product else ()

    def alternative(self, plan: MetalPlan, device: Device) -> Plan | None:
        """Returns the best plan without tensor operations for one with them."""
        if not plan.has_tensor_operations:
            return None
        overrides = PlanOverrides(kernel=default_kernel(plan.problem))
        return choice.best(plan.problem, device, overrides)

    def launches(self, plan: Any) -> tuple[Launch, ...]:
        """Returns the launches that compute a plan, in order."""
        return launches.of(plan)

    def kernel(self, launch: Launch) -> KernelCall:
        """Returns a call that launches a kernel, whose text declares its memory."""
        from mlx_marlin.backends import kernels

        return kernels.kernel(launch.source)


BACKEND = MetalBackend()
