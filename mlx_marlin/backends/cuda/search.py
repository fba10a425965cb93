"""The search for a plan on CUDA, of a product and of experts."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, cast

from mlx_marlin.backends.cuda import limits
from mlx_marlin.backends.cuda.candidates import (
    FRAGMENTS_M,
    Body,
    fewest_fragments,
    fitting,
    kernels,
    plan_of,
    plans,
    valid,
    widths,
    worth_comparing,
)
from mlx_marlin.backends.cuda.cost import predict
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.backends.cuda.plan import MAX_PAIRS_PER_ROW, CudaGatherPlan, CudaPlan
from mlx_marlin.planning import explicit, search
from mlx_marlin.planning.explicit import WORK_FIELDS, PlanOverrides
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.problem import (
    INVARIANT_ROWS,
    MOST_ELEMENTS,
    Problem,
    largest_array,
)
from mlx_marlin.planning.search import Candidate, Prediction
from mlx_marlin.planning.work.decompositions import data_parallel
from mlx_marlin.planning.work.tiles import Kernel
from mlx_marlin.planning.work.work import STRATEGIES, Work
from mlx_marlin.weights.formats import TILE_N


def candidates(
    problem: Problem, device: CudaDevice, overrides: PlanOverrides
) -> Iterator[Candidate]:
    """Yields the plans to compare, at least one."""
    for plan in _plans(problem, device, overrides):
        predicted = predict(plan, device)
        yield Candidate(_rank(plan, device, predicted), predicted, plan)


def _plans(
    problem: Problem, device: CudaDevice, overrides: PlanOverrides
) -> Iterable[CudaPlan]:
    if problem.invariant and problem.m != INVARIANT_ROWS:
        reference = make(replace(problem, m=INVARIANT_ROWS), device, overrides)
        fragments_m = overrides.get("fragments_m", fewest_fragments(problem, "mma"))
        return [fitting(_with_rows(reference, problem, fragments_m), device)]
    if (reason := limits.why_not(problem)) is not None:
        raise ValueError(reason)
    if overrides:
        return plans_with(problem, device, overrides)
    return plans(problem, device)


def make(problem: Problem, device: CudaDevice, overrides: PlanOverrides) -> CudaPlan:
    """Returns the best plan with the given fields."""
    found = search.best(candidates(problem, device, overrides)).plan
    assert isinstance(found, CudaPlan)
    return found


def _rank(plan: CudaPlan, device: CudaDevice, found: Prediction) -> tuple[float, ...]:
    """Returns the sort key of a plan: its time, then its simplicity.

    The time is that of the product alone, as in a chain: what a joined model computes
    next waits for it. Of plans whose times differ by less than `MODEL_ERROR`, the one
    that leaves more multiprocessors to other work may be preferred.
    """
    busy = plan.work.threadgroups - plan.work.idle
    share = min(busy / device.multiprocessors, 1.0)
    return (
        found.seconds
        * (1 + search.MODEL_ERROR * share)
        * search.split_factor(plan.work.is_split),
        found.memory,
        OF_CUDA.index(plan.kernel),
        STRATEGIES.index(plan.work.strategy),
        plan.simdgroups_n,
    )


def _with_rows(plan: CudaPlan, problem: Problem, fragments_m: int) -> CudaPlan:
    """Returns an invariant plan for other rows, with the same division of k."""
    rows = limits.FRAGMENT_ROWS * fragments_m
    tiles = problem.batch * -(-problem.m // rows) * plan.n_tiles
    work = data_parallel(tiles, plan.k_tiles)
    if plan.work.strategy == "split_k":
        work = replace(plan.work, tiles=tiles, threadgroups=tiles * plan.work.slices)
    return replace(
        plan,
        problem=problem,
        tile=replace(plan.tile, m=rows),
        fragments_m=fragments_m,
        work=work,
    )


GATED_SIMDGROUPS_N = (2, 4, 6, 8)
"""Tiles side by side in a block that computes as many columns of gate as of up."""
MAX_BATCH = 64
"""Limit of the experts that are compared as a batch: more load any device as evenly."""


def _max_batch(problem: Problem) -> int:
    """Returns how many products of this shape a batch may have."""
    elements = largest_array(problem.m, problem.n, problem.k, problem.bits, batch=2)
    return (MOST_ELEMENTS - 1) // (elements // 2)


@lru_cache(maxsize=4096)
def choose_gather(gather: GatherProblem, device: CudaDevice) -> CudaGatherPlan:
    """Returns the plan for experts' products; cached.

    The block is the one that suits a batch of products best, with a product for each
    expert that is expected to be chosen.
    """
    problem = gather.problem
    # A tile for twice the mean: experts are chosen unevenly.
    fragments = -(-2 * problem.m // (gather.experts * limits.FRAGMENT_ROWS))
    fragments_m = min(max(fragments, 1), limits.FRAGMENTS_M[-1])
    batched = replace(problem, m=limits.FRAGMENT_ROWS * fragments_m)
    if gather.gate:
        batched = replace(batched, n=2 * problem.n)
    chosen = min(round(gather.chosen_experts), MAX_BATCH)
    batched = replace(batched, batch=max(min(chosen, _max_batch(batched)), 1))
    overrides: PlanOverrides = {
        "kernel": "mma",
        "strategy": "data_parallel",
        "fragments_m": fragments_m,
    }
    alternatives: list[PlanOverrides] = [overrides]
    if gather.gate:
        alternatives = [
            {**overrides, "simdgroups_n": count} for count in GATED_SIMDGROUPS_N
        ]
    plan = min(
        (make(batched, device, fields) for fields in alternatives),
        key=lambda plan: predict(plan, device).seconds,
    )
    return CudaGatherPlan(
        gather=gather,
        fragments_m=fragments_m,
        simdgroups_n=plan.simdgroups_n,
        simdgroups_k=plan.simdgroups_k,
    )


def gather_unsupported(gather: GatherProblem, device: CudaDevice) -> str | None:
    """Returns why the kernel cannot compute experts' products on a device, or None."""
    problem = gather.problem
    if problem.invariant:
        return "our CUDA kernels take no experts with invariant=True"
    if gather.gate and not _takes_gate(gather):
        return (
            f"our CUDA kernel gates packed experts of whole tiles of {TILE_N} columns, "
            f"with 1 to {MAX_PAIRS_PER_ROW} consecutive pairs of each row"
        )
    words = largest_array(1, gather.experts * problem.n, problem.k, problem.bits)
    if problem.layout == "mlx" and words >= MOST_ELEMENTS:
        return "our CUDA kernels count MLX's words in 32 bits, and there are more"
    return device.unsupported or limits.why_not(problem)


def _takes_gate(gather: GatherProblem) -> bool:
    problem = gather.problem
    is_tiled = problem.layout == "marlin" and problem.n % TILE_N == 0
    return is_tiled and 0 < gather.pairs_per_row <= MAX_PAIRS_PER_ROW


OF_WORK = WORK_FIELDS - {"simdgroups_n"}
"""The fields that determine how work is divided: all tiles have the same width."""


def plans_with(
    problem: Problem, device: CudaDevice, overrides: PlanOverrides
) -> Iterator[CudaPlan]:
    """Yields the plans with the given fields, at least one."""
    _check(device, overrides)
    builds = [*_builds(problem, device, overrides)]
    if not builds:
        raise explicit.nothing_fits(overrides)
    yield from valid(builds)


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
    for kernel in named or kernels(problem, device):
        fragments_m = overrides.get("fragments_m", fewest_fragments(problem, kernel))
        if not named and not _fits_stages(kernel, fragments_m, overrides):
            continue
        given = (
            (overrides["simdgroups_n"],)
            if "simdgroups_n" in overrides
            else widths(problem, kernel, overrides.get("simdgroups_k", 1))
        )
        for tiles_n in given:
            yield Body(problem, kernel, fragments_m, tiles_n)


def _fits_stages(kernel: Kernel, fragments_m: int, overrides: PlanOverrides) -> bool:
    """Returns whether a kernel, if it is pipelined, can have the given fields."""
    if kernel not in limits.PIPELINED:
        return True
    traits = limits.PIPELINED[kernel]
    named = {"buffers", "loaders"} & overrides.keys()
    if fragments_m not in traits.fragments_m or named:
        return False
    tiles_n = overrides.get("simdgroups_n", 1)
    warps_k = overrides.get("simdgroups_k", 1)
    warps = limits.simdgroups(kernel, tiles_n, warps_k)
    affordable = limits.affordable_buffers(fragments_m, warps_k)
    return warps <= traits.most_simdgroups and bool(affordable)


def _works(body: Body, device: CudaDevice, overrides: PlanOverrides) -> list[Work]:
    named = {name: value for name, value in overrides.items() if name in OF_WORK}
    if not named:
        return [*worth_comparing(body, device)]
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
    known = FRAGMENTS_M[kernel]
    if overrides.get("fragments_m", known[0]) not in known:
        raise ValueError(
            f"fragments_m={overrides['fragments_m']} is not one of {known}"
        )
    if kernel in limits.PIPELINED:
        _check_device(kernel, device)


def _check_fixed(kernel: Kernel, overrides: PlanOverrides) -> None:
    """Raises ValueError if a field that is constant on CUDA has another value."""
    staging = (
        {"loaders": limits.LOADERS}
        if kernel in limits.PIPELINED
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
    if device.capability != limits.PIPELINED_CAPABILITY:
        needed = ".".join(map(str, limits.PIPELINED_CAPABILITY))
        raise ValueError(
            f"kernel={kernel!r} needs compute capability {needed}, and {device.name} "
            f"has {'.'.join(map(str, device.capability))}"
        )
