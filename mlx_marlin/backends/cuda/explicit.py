"""Plans for CUDA devices that have the fields which a caller gives."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from mlx_marlin.backends.cuda import candidates, limits, pipelined
from mlx_marlin.backends.cuda.candidates import Body, fewest_fragments, plan_of
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.planning import explicit
from mlx_marlin.planning.explicit import WORK_FIELDS, PlanOverrides
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import Kernel
from mlx_marlin.planning.work.work import Work

OF_WORK = WORK_FIELDS - {"simdgroups_n"}
"""The fields that determine how work is divided: all tiles have the same width."""


def plans(
    problem: Problem, device: CudaDevice, overrides: PlanOverrides
) -> Iterator[CudaPlan]:
    """Yields the plans with the given fields, at least one."""
    _check(device, overrides)
    builds = [*_builds(problem, device, overrides)]
    if not builds:
        raise explicit.nothing_fits(overrides)
    yield from candidates.valid(builds)


def _builds(
    problem: Problem, device: CudaDevice, overrides: PlanOverrides
) -> Iterator[Callable[[], CudaPlan]]:
    """Yields what builds the plans."""
    errors, found = [], False
    given: dict[str, Any] = {
        name: value
        for name, value in overrides.items()
        if name in ("buffers", "reduction")
    }
    for body in _bodies(problem, device, overrides):
        try:
            works = _works(body, device, overrides)
        except ValueError as error:  # too few tiles; narrower ones may be enough
            errors.append(error)
            continue
        found = True
        for work in works:
            if explicit.can_meet(work, overrides):
                warps_k = overrides.get("simdgroups_k")
                yield partial(plan_of, body, work, device, warps_k, **given)
    if errors and not found:
        raise errors[0]


def _bodies(
    problem: Problem, device: CudaDevice, overrides: PlanOverrides
) -> Iterator[Body]:
    named = (overrides["kernel"],) if "kernel" in overrides else None
    for kernel in named or candidates.kernels(problem, device):
        fragments_m = overrides.get("fragments_m", fewest_fragments(problem, kernel))
        if not named and not _fits_stages(kernel, fragments_m, overrides):
            continue
        widths = (
            (overrides["simdgroups_n"],)
            if "simdgroups_n" in overrides
            else candidates.widths(problem, kernel, overrides.get("simdgroups_k", 1))
        )
        for tiles_n in widths:
            yield Body(problem, kernel, fragments_m, tiles_n)


def _fits_stages(kernel: Kernel, fragments_m: int, overrides: PlanOverrides) -> bool:
    """Returns whether a kernel, if it is pipelined, can have the given fields."""
    if kernel not in pipelined.KERNELS:
        return True
    traits = pipelined.KERNELS[kernel]
    named = {"buffers", "loaders"} & overrides.keys()
    if fragments_m not in traits.fragments_m or named:
        return False
    tiles_n = overrides.get("simdgroups_n", 1)
    warps_k = overrides.get("simdgroups_k", 1)
    warps = pipelined.simdgroups(kernel, tiles_n, warps_k)
    affordable = pipelined.affordable_buffers(fragments_m, warps_k)
    return warps <= traits.most_simdgroups and bool(affordable)


def _works(body: Body, device: CudaDevice, overrides: PlanOverrides) -> list[Work]:
    named = {name: value for name, value in overrides.items() if name in OF_WORK}
    if not named:
        return [*candidates.worth_comparing(body, device)]
    return [work for work, _ in explicit.works(body.grid(device), named)]


def _check(device: CudaDevice, overrides: PlanOverrides) -> None:
    """Raises ValueError for fields that no CUDA kernel supports."""
    kernel = overrides.get("kernel", "mma")
    if kernel not in OF_CUDA:
        raise ValueError(f"kernel={kernel!r} is not one of CUDA's, {OF_CUDA}")
    _check_fixed(kernel, overrides)
    if overrides.get("strategy") == "hytis":
        raise ValueError(
            f"strategy='hytis' has tiles of two widths, which {kernel} has not"
        )
    tiles_n, warps_k = (
        overrides.get("simdgroups_n", 1),
        overrides.get("simdgroups_k", 1),
    )
    if min(tiles_n, warps_k) < 1 or tiles_n * warps_k > limits.MOST_SIMDGROUPS:
        raise ValueError(
            f"simdgroups_n={tiles_n} x simdgroups_k={warps_k}, expected 1 to "
            f"{limits.MOST_SIMDGROUPS} simdgroups"
        )
    known = candidates.FRAGMENTS_M[kernel]
    if overrides.get("fragments_m", known[0]) not in known:
        raise ValueError(
            f"fragments_m={overrides['fragments_m']} is not one of {known}"
        )
    if kernel in pipelined.KERNELS:
        _check_device(kernel, device)


def _check_fixed(kernel: Kernel, overrides: PlanOverrides) -> None:
    """Raises ValueError if a field that is constant on CUDA has another value."""
    staging = (
        {"loaders": pipelined.LOADERS}
        if kernel in pipelined.KERNELS
        else {"buffers": 0, "loaders": 0}
    )
    expected: dict[str, Any] = {"simdgroups_m": 1, "operand": "exact", **staging}
    given = cast(dict[str, Any], overrides)
    for name, value in expected.items():
        if given.get(name, value) != value:
            raise ValueError(
                f"{name}={given[name]!r}, expected {value!r} on a CUDA device"
            )


def _check_device(kernel: Kernel, device: CudaDevice) -> None:
    if device.capability != pipelined.CAPABILITY:
        needed = ".".join(map(str, pipelined.CAPABILITY))
        raise ValueError(
            f"kernel={kernel!r} needs compute capability {needed}, and {device.name} "
            f"has {'.'.join(map(str, device.capability))}"
        )
