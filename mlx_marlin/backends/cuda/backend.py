"""The CUDA back end: plans and kernels for NVIDIA GPUs.

The module implements `backends.base.Backend`.
"""

import platform
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mlx_marlin.backends import planner
from mlx_marlin.backends.base import KernelCall, Prepared, Traits
from mlx_marlin.backends.children import Ahead
from mlx_marlin.backends.cuda import limits, search
from mlx_marlin.backends.cuda.cost import (
    OWN_HEAD_NORM_SECONDS,
    OWN_NORM_SECONDS,
    OWN_ROPE_SECONDS,
    decoded_seconds,
)
from mlx_marlin.backends.cuda.cost import predict as predict
from mlx_marlin.backends.cuda.cost import residency as residency
from mlx_marlin.backends.cuda.device import DEFAULT, CudaDevice
from mlx_marlin.backends.cuda.launches import BY_TYPE
from mlx_marlin.backends.cuda.launches import launches as launches
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.backends.cuda.search import candidates as candidates
from mlx_marlin.backends.launch import Launch
from mlx_marlin.planning.dequantize_plan import (
    LEAST_ROWS,
    DequantizePlan,
    dequantize_plan,
)
from mlx_marlin.planning.gather_plan import AnyProblem, GatherPlan, GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem

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
        return search.gather_unsupported(problem, device)
    if not transpose and problem.batch > 1:
        return "our CUDA kernels multiply a batch by transposed weights only"
    return device.unsupported or limits.why_not(problem)


def choose_gather(gather: GatherProblem, device: CudaDevice) -> GatherPlan:
    """Returns the plan for experts' products."""
    return search.choose_gather(gather, device)


def seconds(plan: Any, device: CudaDevice) -> None:
    """Returns None: there is no model of these plans."""


def handover(
    problem: AnyProblem, device: CudaDevice, plan: CudaPlan | None = None
) -> str | None:
    """Returns why stock MLX should serve a problem for speed, or None."""
    if isinstance(problem, GatherProblem):
        return None  # stock MLX is not faster
    for unfused, seconds, reason in _unfused(problem):
        apart = planner.propose(unfused, device).seconds + seconds
        ours = predict(plan, device) if plan else planner.propose(problem, device)
        if ours.seconds > apart:
            return f"on {device.variant} {reason}"
    if problem.norm is not None or problem.invariant or problem.layout == "marlin":
        return None
    most = most_rows(problem)
    is_small = problem.n * problem.k < SMALL
    if is_small and problem.m < LEAST_ROWS_OF_SMALL:
        return f"{problem.m} rows of so small a weight: stock MLX is as fast"
    if problem.m <= most:
        return None
    return (
        f"{problem.m} rows on {device.variant}: our CUDA kernels serve up to {most} "
        f"with such a weight in the layout {problem.layout!r}"
    )


def dequantize_first(problem: Problem, device: CudaDevice) -> DequantizePlan | None:
    """Returns the plan that decodes a packed weight first, if it is faster."""
    if problem.layout == "mlx" or problem.batch > 1 or problem.invariant:
        return None
    if problem.m < LEAST_ROWS or problem.norm is not None:
        return None
    if decoded_seconds(problem, device) >= planner.propose(problem, device).seconds:
        return None
    return dequantize_plan(problem)


def ahead(mlx: str) -> Ahead:
    """Returns what compiles MLX's own kernels ahead, for a version of MLX."""
    from mlx_marlin.backends.cuda.compiling import ahead as compiling

    return compiling.Processes(mlx)


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
    from mlx_marlin.backends.cuda.compiling import preparation

    return preparation.prepare(launch)


MOST_ROWS_OF_MLX = ((100_000_000, 32), (30_000_000, 8), (0, 5))
"""Most rows for which the kernels serve an affine 4-bit weight in MLX's layout, by its
minimal number of elements; for more, stock MLX does (measured, docs/lab)."""
SMALL, LEAST_ROWS_OF_SMALL = 8_000_000, 3
"""Elements of a weight in MLX's layout, and the rows from which on the kernels serve a
smaller one: with fewer rows the host is the limit, and stock MLX is as fast (1024x4096
on an H100, docs/cuda.md)."""
FEW_ROWS = 5
"""Most rows for other formats in MLX's layout, which were not measured; for these stock
MLX takes longer than for 8 rows."""


def _unfused(problem: Problem) -> Iterator[tuple[Problem, float, str]]:
    """Yields the product without its RMSNorm, and without its rotation.

    Each comes with the seconds of MLX's separate kernels for the omitted operation, and
    the reason to return if the two are faster than the fused product.
    """
    if problem.norm is not None:
        reason = "every block of this product would normalize the rows again"
        yield replace(problem, norm=None), OWN_NORM_SECONDS, reason
    epilogue = problem.epilogue
    if epilogue.rotation is not None:
        norms = 0 if epilogue.rotation.norm is None else 2
        # One rope each for q and k; a single row without norms needs only one.
        ropes = 2 if problem.m > 1 or norms else 1
        seconds = ropes * OWN_ROPE_SECONDS + norms * OWN_HEAD_NORM_SECONDS
        own = "norms and ropes take" if norms else "a rope takes"
        reason = f"to rotate heads costs this product more time than {own}"
        yield (
            replace(problem, epilogue=replace(epilogue, rotation=None)),
            seconds,
            reason,
        )


def most_rows(problem: Problem) -> int:
    """Returns the most rows for which the kernels serve a weight in MLX's layout."""
    if (problem.mode, problem.bits) != ("affine", 4):
        return FEW_ROWS
    size = problem.n * problem.k
    return next(rows for least, rows in MOST_ROWS_OF_MLX if size >= least)
