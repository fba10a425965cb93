"""The options of a search on CUDA, and the plans built from them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

from mlx_marlin.backends.cuda import (
    candidates,
    limits,
    pipelined,
)
from mlx_marlin.backends.cuda.cost import (
    CandidateConfig,
    prediction,
)
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.planning import search
from mlx_marlin.planning.overrides import PlanOverrides, nothing_fits
from mlx_marlin.planning.prediction import Prediction
from mlx_marlin.planning.problem import INVARIANT_ROWS, Problem
from mlx_marlin.planning.search import Option
from mlx_marlin.planning.work import STRATEGIES, Tile, data_parallel
from mlx_marlin.planning.work.tiles import Kernel, Reduction, k_tile
from mlx_marlin.weights.formats import TILE_N


def options(
    problem: Problem, device: CudaDevice, overrides: PlanOverrides
) -> Iterator[Option]:
    """Yields the options to compare, at least one.

    Raises:
        ValueError: If no plan has the given fields.
    """
    if problem.invariant and problem.m != INVARIANT_ROWS:
        reference = make(replace(problem, m=INVARIANT_ROWS), device, overrides)
        plan = _with_rows(reference, problem, device, overrides)
        yield Option((0.0,), predict(plan, device), lambda: plan)
        return
    _check(problem, device, overrides)
    found = False
    for config in candidates.configs(problem, device, overrides):
        found = True
        predicted = prediction(problem, config, device)
        rank = _rank(problem, config, device, predicted)
        # Building a plan may fail for lack of memory while another option fits.
        plan_of = partial(_plan, problem, config, device, overrides)
        yield Option(rank, predicted, plan_of)
    if not found:
        raise nothing_fits(overrides)


def make(problem: Problem, device: CudaDevice, overrides: PlanOverrides) -> CudaPlan:
    """Returns the best plan with the given fields.

    Raises:
        ValueError: If no plan has the given fields.
    """
    found = search.best(lambda limit: options(problem, device, overrides))
    assert isinstance(found, CudaPlan)
    return found


def predict(plan: CudaPlan, device: CudaDevice) -> Prediction:
    """Returns the predicted times of a plan."""
    config = CandidateConfig(
        plan.kernel,
        plan.fragments_m,
        plan.work,
        plan.simdgroups_n,
        plan.simdgroups_k,
    )
    return prediction(plan.problem, config, device)


def _rank(
    problem: Problem, config: CandidateConfig, device: CudaDevice, found: Prediction
) -> tuple[float, ...]:
    """Returns the sort key of a candidate: its time, then its simplicity.

    The time is that of the product alone, as in a chain: what a joined model computes
    next waits for it. Of plans whose times differ by less than `MODEL_ERROR`, the one
    that leaves more multiprocessors to other work may be preferred.
    """
    busy = config.work.threadgroups - config.work.idle
    share = min(busy / device.multiprocessors, 1.0)
    return (
        found.seconds
        * (1 + search.MODEL_ERROR * share)
        * search.split_factor(config.work.is_split),
        found.memory,
        OF_CUDA.index(config.kernel),
        STRATEGIES.index(config.work.strategy),
        config.tiles_n,
    )


def _check(problem: Problem, device: CudaDevice, overrides: PlanOverrides) -> None:
    """Raises ValueError for a problem or overrides that no CUDA kernel supports."""
    reason = limits.why_not(problem)
    if reason is not None:
        raise ValueError(reason)
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
    expected: dict[str, Any] = {"simdgroups_m": 1, "subtract": False, **staging}
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


def _plan(
    problem: Problem,
    config: CandidateConfig,
    device: CudaDevice,
    overrides: PlanOverrides,
) -> CudaPlan:
    work, fragments_m = config.work, config.fragments_m
    default: Reduction = "workspace" if work.is_split else "none"
    staged = config.kernel in pipelined.KERNELS
    buffers = (
        overrides.get("buffers", pipelined.buffers(fragments_m, config.warps_k))
        if staged
        else 0
    )
    plan = CudaPlan(
        problem=problem,
        kernel=config.kernel,
        tile=Tile(
            m=limits.FRAGMENT_ROWS * fragments_m,
            n=TILE_N * config.tiles_n,
            k=k_tile(problem.group_size),
        ),
        fragments_m=fragments_m,
        simdgroups_n=config.tiles_n,
        simdgroups_k=config.warps_k,
        work=work,
        reduction=overrides.get("reduction", default),
        buffers=buffers,
        loaders=pipelined.LOADERS if staged else 0,
    )
    if plan.threadgroup_bytes > device.shared_bytes:
        raise ValueError(
            f"simdgroups_n={config.tiles_n}, simdgroups_k={config.warps_k}, "
            f"fragments_m={fragments_m}, buffers={buffers} "
            f"need {plan.threadgroup_bytes} bytes of shared memory, more than the "
            f"{device.shared_bytes} of {device.name}"
        )
    return plan


def _with_rows(
    plan: CudaPlan, problem: Problem, device: CudaDevice, overrides: PlanOverrides
) -> CudaPlan:
    """Returns an invariant plan for other rows, with the same division of k."""
    fragments_m = overrides.get(
        "fragments_m", candidates.fewest_fragments(problem, "mma")
    )
    m_tiles = -(-problem.m // (limits.FRAGMENT_ROWS * fragments_m))
    tiles = problem.batch * m_tiles * plan.n_tiles
    work = data_parallel(tiles, plan.k_tiles)
    if plan.work.strategy == "split_k":
        slices = plan.work.slices
        work = replace(
            plan.work, tiles=tiles, threadgroups=tiles * slices, slices=slices
        )
    config = CandidateConfig(
        "mma", fragments_m, work, plan.simdgroups_n, plan.simdgroups_k
    )
    return _plan(problem, config, device, overrides)
