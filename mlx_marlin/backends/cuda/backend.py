"""The CUDA back end: plans and kernels for NVIDIA GPUs.

The module implements `backends.base.Backend`.
"""

import platform
import sys
from collections.abc import Callable
from typing import Any

from mlx_marlin.backends.base import KernelCall, Prepared
from mlx_marlin.backends.children import Ahead
from mlx_marlin.backends.cuda import limits
from mlx_marlin.backends.cuda.cost import predict as predict
from mlx_marlin.backends.cuda.cost import residency as residency
from mlx_marlin.backends.cuda.device import DEFAULT, CudaDevice
from mlx_marlin.backends.cuda.launches import BY_TYPE
from mlx_marlin.backends.cuda.launches import launches as launches
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.backends.cuda.search import candidates as candidates
from mlx_marlin.backends.launch import Launch
from mlx_marlin.backends.traits import Traits
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.gather_plan import AnyProblem, GatherPlan, GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import Prediction

name = "cuda"
traits = Traits(
    device_noun="a CUDA device",
    default_device=DEFAULT,
    kernels=limits.OF_CUDA,
    plan_type=CudaPlan,
    launches=frozenset(BY_TYPE),
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
find_device = CudaDevice.named


def unsupported(
    problem: AnyProblem, device: CudaDevice, transpose: bool = True
) -> str | None:
    """Returns why the kernels cannot compute a problem on a device, or None."""
    if isinstance(problem, GatherProblem):
        from mlx_marlin.backends.cuda import search as experts

        return experts.gather_unsupported(problem, device)
    if not transpose and problem.batch > 1:
        return "our CUDA kernels multiply a batch by transposed weights only"
    return device.unsupported or limits.why_not(problem)


def choose_gather(gather: GatherProblem, device: CudaDevice) -> GatherPlan:
    """Returns the plan for experts' products."""
    from mlx_marlin.backends.cuda import search as experts

    return experts.choose_gather(gather, device)


def seconds(plan: Any, device: CudaDevice) -> None:
    """Returns None: there is no model of these plans."""


def handover(
    problem: AnyProblem, device: CudaDevice, predicted: Callable[[], Prediction]
) -> str | None:
    """Returns why stock MLX should serve a problem for speed, or None."""
    if isinstance(problem, GatherProblem):
        return None  # stock MLX is not faster
    from mlx_marlin.backends.cuda import handover as rules

    return rules.handover(problem, device)


def dequantize_first(
    problem: Problem, device: CudaDevice, predicted: Callable[[], Prediction]
) -> DequantizePlan | None:
    """Returns the plan that decodes the weight first, if it is faster."""
    from mlx_marlin.backends.cuda import handover as rules

    return rules.dequantized(problem, device, predicted)


def ahead(mlx: str) -> Ahead:
    """Returns what compiles MLX's own kernels ahead, for a version of MLX."""
    from mlx_marlin.backends.cuda.compiling import ahead as processes

    return processes.Ahead(mlx)


def experiments(problem: Problem, device: CudaDevice) -> list[Plan]:
    """Returns no plans: all kernels are among the candidates."""
    return []


def detect_device() -> CudaDevice | None:
    """Returns the CUDA device that MLX computes on; None where it has none."""
    if sys.platform == "darwin":
        return None
    from mlx_marlin.backends.cuda import detection

    return detection.detect_device()


def system_build() -> str:
    """Returns the system's kernel release and the version of the CUDA driver."""
    from mlx_marlin.backends.cuda import detection

    return f"{platform.release()}, driver {detection.driver_version()}"


def probes(plan: Any) -> tuple[()]:
    """Returns nothing: the kernels depend on no unit whose layout may change."""
    return ()


def alternative(plan: CudaPlan, device: CudaDevice) -> None:
    """Returns None: stock MLX serves what a kernel cannot."""


def kernel(launch: Launch) -> KernelCall:
    """Returns a call that launches a kernel; the first call builds it."""
    from mlx_marlin.backends import kernels

    return kernels.lazily(launch, _prepare)


def _prepare(launch: Launch) -> Prepared:
    """Prepares the kernel of a launch."""
    from mlx_marlin.backends.cuda.compiling import preparation

    return preparation.prepare(launch)
