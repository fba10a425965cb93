"""Plans for Apple GPUs that have the fields which a caller gives."""

from collections.abc import Iterator
from typing import Any

from mlx_marlin.backends.metal import candidates
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.kernel_choice import default_kernel
from mlx_marlin.backends.metal.kernel_limits import (
    KERNELS,
    TENSOR_KERNEL,
    THREADGROUP_LIMIT,
)
from mlx_marlin.backends.metal.plan import MetalPlan, buffer_bytes
from mlx_marlin.planning import explicit
from mlx_marlin.planning.explicit import WORK_FIELDS, PlanOverrides
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.decompositions import WideWork
from mlx_marlin.planning.work.tiles import FRAGMENT, Kernel, step_k
from mlx_marlin.weights.formats import TILE_N

OF_BODY = ("fragments_m", "simdgroups_m", "operand", "buffers", "loaders")
"""Fields that all plans have in common."""
DEFAULT_BUFFERS = 2
"""Buffers of `gemm_staged` if they fit: the fewest with one barrier per stage."""


def plans(
    problem: Problem, device: Device, overrides: PlanOverrides
) -> Iterator[MetalPlan]:
    """Yields the plans with the given fields, at least one."""
    kernel = overrides.get("kernel", default_kernel(problem, device))
    _check_kernel(kernel, device)
    given: dict[str, Any] = {
        name: value for name, value in overrides.items() if name in OF_BODY
    }
    if kernel == "gemm_staged":
        given.setdefault("buffers", _buffers(problem, overrides))
    body = candidates.body_of(problem, device, kernel, **given)
    reduction, simdgroups_k = overrides.get("reduction"), overrides.get("simdgroups_k")
    if problem.invariant and not WORK_FIELDS & overrides.keys():
        work, simdgroups_n, count = candidates.invariant_work(body, device)
        count = count if simdgroups_k is None else simdgroups_k
        yield candidates.with_work(body, work, simdgroups_n, count, reduction)
        return
    works = _works(body, device, overrides)
    works = [pair for pair in works if explicit.can_meet(pair[0], overrides)]
    if not works:
        raise explicit.nothing_fits(overrides)
    for work, simdgroups_n in works:
        count = (
            candidates.simdgroups_along_k(body, work, device, simdgroups_n)
            if simdgroups_k is None
            else simdgroups_k
        )
        yield candidates.with_work(body, work, simdgroups_n, count, reduction)


def _works(body: MetalPlan, device: Device, overrides: PlanOverrides) -> list[WideWork]:
    widest = overrides.get("simdgroups_k")
    if not WORK_FIELDS & overrides.keys():
        return candidates.works_of(body, device, widest)
    works = explicit.works(candidates.grid_of(body, device, widest), overrides)
    if body.problem.epilogue.gated or body.problem.norm is not None:
        return [(work, body.simdgroups_n) for work, _ in works]
    return works


def _check_kernel(kernel: Kernel, device: Device) -> None:
    if kernel not in KERNELS:
        raise ValueError(
            f"kernel={kernel!r} is not one of Metal's, {KERNELS}; others need "
            f"another device, such as chip='NVIDIA H200'"
        )
    if kernel == TENSOR_KERNEL and not device.has_tensor_units:
        raise ValueError(
            f"kernel={kernel!r} needs tensor operations, and {device.variant} has "
            f"none: expected an M5 or later with macOS 26.2 or later"
        )


def _buffers(problem: Problem, overrides: PlanOverrides) -> int:
    """Returns the number of buffers that fits in memory next to the given fields."""
    rows = FRAGMENT * overrides.get("fragments_m", 1) * overrides.get("simdgroups_m", 1)
    k = step_k(problem.group_size) * overrides.get("simdgroups_k", 1)
    size = buffer_bytes(rows, TILE_N, k, problem.fragment_bytes)
    return DEFAULT_BUFFERS if DEFAULT_BUFFERS * size <= THREADGROUP_LIMIT else 1
