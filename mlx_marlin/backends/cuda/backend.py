"""The CUDA back end: plans and kernels for NVIDIA GPUs."""

import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

from mlx_marlin.backends.base import AnyProblem, KernelCall, Prepared
from mlx_marlin.backends.cuda import cost, handover, launches, limits, search
from mlx_marlin.backends.cuda.device import DEFAULT, CudaDevice
from mlx_marlin.backends.cuda.experts import search as experts
from mlx_marlin.backends.cuda.experts.plan import CudaGatherPlan
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.backends.cuda.residency import residency
from mlx_marlin.backends.launch import Launch
from mlx_marlin.backends.traits import Traits
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.device import Residency
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.prediction import Prediction
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import BestSoFar, Candidate


class CudaBackend:
    """Implements `Backend` for CUDA."""

    name = "cuda"
    traits = Traits(
        device_noun="a CUDA device",
        default_device=DEFAULT,
        kernels=limits.OF_CUDA,
        plan_type=CudaPlan,
        launches=frozenset(launches.BY_TYPE),
        default_layout="marlin",
        dtypes=limits.DTYPES,
        replays_graphs=True,
        unified_memory=False,
        stock_multiplies_float32=False,
        stock_masks_attention=False,
        stock_attends_by_capacity=True,
        compiles_ahead=True,
        fusions=frozenset({"residual", "gate", "norm", "rope", "experts"}),
        tunes_models=False,
    )

    def unsupported(
        self, problem: AnyProblem, device: CudaDevice, transpose: bool = True
    ) -> str | None:
        """Returns why the kernels cannot compute a problem on a device, or None."""
        if isinstance(problem, GatherProblem):
            return experts.gather_unsupported(problem, device)
        if not transpose and problem.batch > 1:
            return "our CUDA kernels multiply a batch by transposed weights only"
        return device.unsupported or limits.why_not(problem)

    def candidates(
        self,
        problem: Problem,
        device: CudaDevice,
        overrides: PlanOverrides,
        limit: BestSoFar,
    ) -> Iterator[Candidate]:
        """Yields the plans to compare, at least one.

        Raises:
            ValueError: If no plan has the fields in `overrides`.
        """
        return search.compared(problem, device, overrides)

    def choose_gather(
        self, gather: GatherProblem, device: CudaDevice
    ) -> CudaGatherPlan:
        """Returns the plan for experts' products."""
        return experts.choose_gather(gather, device)

    def predict(self, plan: CudaPlan, device: CudaDevice) -> Prediction:
        """Returns the time that the cost model predicts for a plan."""
        return cost.predict(plan, device)

    def residency(self, plan: CudaPlan, device: CudaDevice) -> Residency:
        """Returns how many blocks of a plan are resident on a multiprocessor."""
        return residency(plan, device)

    def seconds(self, plan: Any, device: CudaDevice) -> None:
        """Returns None: there is no model of these plans."""

    def predict_stock(self, problem: Problem, device: CudaDevice) -> None:
        """Returns None: there is no model of stock MLX on CUDA."""

    def stock_seconds(self, problem: AnyProblem, device: CudaDevice) -> None:
        """Returns None: there is no model of stock MLX on CUDA."""

    def handover(
        self,
        problem: AnyProblem,
        device: CudaDevice,
        predicted: Callable[[], Prediction],
    ) -> str | None:
        """Returns why stock MLX should serve a problem for speed, or None."""
        if isinstance(problem, GatherProblem):
            return None  # stock MLX is not faster
        return handover.handover(problem, device)

    def dequantize_first(
        self, problem: Problem, device: CudaDevice, predicted: Callable[[], Prediction]
    ) -> DequantizePlan | None:
        """Returns the plan that decodes the weight first, if it is faster."""
        return handover.dequantized(problem)

    def experiments(self, problem: Problem, device: CudaDevice) -> list[Plan]:
        """Returns no plans: all kernels are among the candidates."""
        return []

    def find_device(self, name: str, cores: int | None) -> CudaDevice:
        """Returns a GPU by its name.

        Raises:
            ValueError: If the name is not known.
        """
        return CudaDevice.named(name, cores)

    def detect_device(self) -> CudaDevice | None:
        """Returns the CUDA device that MLX computes on; None where it has none."""
        if sys.platform == "darwin":
            return None
        from mlx_marlin.backends.cuda import detection

        return detection.detect_device()

    def system_build(self) -> str:
        """Returns the system's kernel release and the version of the CUDA driver."""
        from mlx_marlin.backends.cuda import detection

        return f"{platform.release()}, driver {detection.driver_version()}"

    def probes(self, plan: Any) -> tuple[()]:
        """Returns nothing: the kernels depend on no unit whose layout may change."""
        return ()

    def alternative(self, plan: CudaPlan, device: CudaDevice) -> None:
        """Returns None: stock MLX serves what a kernel cannot."""

    def launches(self, plan: Any) -> tuple[Launch, ...]:
        """Returns the launches that compute a plan, in order."""
        return launches.of(plan)

    def kernel(self, launch: Launch) -> KernelCall:
        """Returns a call that launches a kernel; the first call builds it."""
        from mlx_marlin.backends import kernels

        return kernels.lazily(launch, _prepare)


BACKEND = CudaBackend()


def _prepare(launch: Launch) -> Prepared:
    """Prepares the kernel of a launch."""
    from mlx_marlin.backends.cuda.compiling import preparation
    from mlx_marlin.backends.cuda.compiling.kernel_text import KernelInstance

    return preparation.prepare(
        KernelInstance(
            source=launch.source,
            template=launch.template,
            inputs=launch.dtypes,
            outputs=tuple(output.dtype for output in launch.outputs),
        )
    )
