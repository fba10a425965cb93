"""The candidate plans of a product on Metal, subject to overrides."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from mlx_marlin.backends.metal.cost import SIMDGROUPS_TO_FILL, predict
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experiments.staging import buffer_bytes
from mlx_marlin.backends.metal.limits import (
    FRAGMENTS_M,
    GEMV_ROWS,
    MAX_SIMDGROUPS,
    MAX_SIMDGROUPS_M,
    TENSOR_FRAGMENTS_M,
    TENSOR_KERNEL,
    THREADGROUP_LIMIT,
)
from mlx_marlin.backends.metal.plan import MetalPlan, columns_of_tile
from mlx_marlin.planning.overrides import PlanOverrides, can_meet, nothing_fits
from mlx_marlin.planning.problem import INVARIANT_ROWS, Problem
from mlx_marlin.planning.work import (
    Work,
    data_parallel,
    decompositions,
)
from mlx_marlin.planning.work.decompositions import WORK_OVERRIDES, TileGrid, WideWork
from mlx_marlin.planning.work.division import Strategy
from mlx_marlin.planning.work.tiles import (
    FRAGMENT,
    Kernel,
    Reduction,
    Tile,
    k_tile,
    step_k,
)
from mlx_marlin.weights.formats import TILE_N

ROWS_OF_ONE_FRAGMENT = 8
"""Most rows for which a simdgroup holds one row fragment. For more rows it holds two,
which share the decoded weights; the kernel skips a second one past the last row."""
SIMDGROUPS_K = (1, 2, 4, 8)
"""Numbers of simdgroups that may share a tile's k."""
INVARIANT_SIMDGROUPS_K = (1, 2)
"""Numbers of simdgroups along k that fit with any m."""
DEFAULT_BUFFERS = 2
"""Buffers of `gemm_staged` if they fit: the fewest with one barrier per stage."""


def candidates(
    problem: Problem,
    device: Device,
    overrides: PlanOverrides,
    worth: Callable[[MetalPlan, Work], bool] = lambda body, work: True,
) -> Iterator[MetalPlan]:
    """Yields the candidate plans, at least one.

    Args:
        problem: The product to compute.
        device: The chip to plan for.
        overrides: Fields of the plans.
        worth: Whether to build the plan of some work, given a plan with the same
            threadgroups. Default: always.

    Raises:
        ValueError: If no valid plan has the given fields.
    """
    body = _body(problem, overrides)
    if problem.invariant and not WORK_OVERRIDES & overrides.keys():
        yield _invariant(body, device, overrides)
        return
    grid = TileGrid(
        m_tiles=body.m_tiles,
        n_tiles=body.n_tiles,
        batch=problem.batch,
        k_tiles=body.k_tiles,
        trips=body.tile.k // k_tile(1),
        cores=device.cores,
        widest=_widest(body, overrides),
        x_bytes=problem.activation_bytes,
    )
    works = list(_works(body, grid, overrides))
    if overrides:
        works = [pair for pair in works if can_meet(pair[0], overrides)]
    if not WORK_OVERRIDES & overrides.keys():
        works = [pair for pair in works if _may_split(body, pair[0], device)]
    if not works:
        raise nothing_fits(overrides)
    shared = _fields(body)
    for work, simdgroups_n in works:
        if not worth(body, work):
            continue
        count = (
            overrides["simdgroups_k"]
            if "simdgroups_k" in overrides
            else _simdgroups_k(body, work, device, simdgroups_n)
        )
        yield _with_work(shared, work, simdgroups_n, count, overrides)


def _widest(body: MetalPlan, overrides: PlanOverrides) -> int:
    """Returns the most tiles side by side in a wide tile."""
    if body.has_tensor_operations:
        return 1
    return overrides.get("simdgroups_k", _most_along_k(body))


def _may_split(body: MetalPlan, work: Work, device: Device) -> bool:
    """Returns whether plans with this work are compared.

    `gemm_tensor` splits no tiles that fill the GPU: in a chain, published kernels lost
    more by a second dispatch than they gained (avlp12/mlx-vlm, docs/m5.md).
    """
    fills = body.work.tiles >= device.cores
    return not (body.has_tensor_operations and fills and work.is_split)


def _works(
    body: MetalPlan, grid: TileGrid, overrides: PlanOverrides
) -> Iterator[WideWork]:
    """Yields divisions of the work, with the tiles side by side in their wide tiles."""
    problem = body.problem
    if not problem.epilogue.gated and problem.norm is None:
        yield from decompositions.works(grid, overrides)
    elif WORK_OVERRIDES & overrides.keys():
        for work, _ in decompositions.works(grid, overrides):
            yield work, body.simdgroups_n
    else:
        yield body.work, body.simdgroups_n


def _body(problem: Problem, overrides: PlanOverrides) -> MetalPlan:
    """Returns the data-parallel plan with the threadgroups of all candidates."""
    kernel = overrides.get("kernel", default_kernel(problem))
    buffers = overrides.get("buffers", _buffers(problem, kernel, overrides))
    most = most_rows(problem, buffers)
    fragments_m = overrides.get("fragments_m", _fragments_m(problem, kernel, most))
    simdgroups_m = overrides.get(
        "simdgroups_m", _simdgroups_m(problem, fragments_m, most)
    )
    rows = problem.m if kernel == "gemv" else FRAGMENT * fragments_m * simdgroups_m
    columns = columns_of_tile(problem)
    tile = Tile(m=rows, n=columns, k=k_tile(problem.group_size))
    tiles = problem.batch * -(-problem.m // tile.m) * -(-problem.n // tile.n)
    simdgroups_n = columns // TILE_N
    return MetalPlan(
        problem=problem,
        kernel=kernel,
        tile=tile,
        fragments_m=fragments_m,
        simdgroups_m=simdgroups_m,
        simdgroups_n=simdgroups_n,
        simdgroups_k=simdgroups_n,
        work=data_parallel(tiles, -(-problem.k // tile.k)),
        subtract=overrides.get("subtract", subtracts(problem, fragments_m, kernel)),
        buffers=buffers,
        loaders=overrides.get("loaders", 0),
    )


def _fields(plan: MetalPlan) -> dict[str, Any]:
    """Returns a plan's fields; constructing from them is faster than `replace`."""
    return {field.name: getattr(plan, field.name) for field in fields(plan)}


def _with_work(
    shared: dict[str, Any],
    work: Work,
    simdgroups_n: int,
    simdgroups_k: int,
    overrides: PlanOverrides,
) -> MetalPlan:
    default: Reduction = "workspace" if work.is_split else "none"
    return MetalPlan(
        **{
            **shared,
            "work": work,
            "simdgroups_n": simdgroups_n,
            "simdgroups_k": simdgroups_k,
            "reduction": overrides.get("reduction", default),
        }
    )


def default_kernel(problem: Problem) -> Kernel:
    """Returns the kernel with fewer issue slots: dot products for a few rows.

    `gemm_tensor` is compared with it where there are tensor units.
    """
    few = problem.m <= GEMV_ROWS[problem.dtype] and not problem.invariant
    return "gemv" if few else "gemm_register"


def _buffers(problem: Problem, kernel: Kernel, overrides: PlanOverrides) -> int:
    """Returns the number of buffers that fits in memory next to what overrides fix."""
    if kernel != "gemm_staged":
        return 0
    rows = FRAGMENT * overrides.get("fragments_m", 1) * overrides.get("simdgroups_m", 1)
    k = step_k(problem.group_size) * overrides.get("simdgroups_k", 1)
    size = buffer_bytes(rows, TILE_N, k, problem.fragment_bytes)
    return DEFAULT_BUFFERS if DEFAULT_BUFFERS * size <= THREADGROUP_LIMIT else 1


def most_rows(problem: Problem, buffers: int) -> int:
    """Returns the rows of the largest tile that fits, with `buffers` in memory."""
    most = FRAGMENT * max(FRAGMENTS_M) * MAX_SIMDGROUPS_M
    if buffers < 1:
        return most
    row = buffer_bytes(1, 0, step_k(problem.group_size), problem.fragment_bytes)
    return min(THREADGROUP_LIMIT // (buffers * row) - TILE_N, most)


def _fragments_m(problem: Problem, kernel: Kernel, most: int) -> int:
    """Returns the number of 8-row fragments that a simdgroup holds."""
    if kernel == "gemv":
        return 0
    if kernel == TENSOR_KERNEL:
        return TENSOR_FRAGMENTS_M
    few = problem.m <= ROWS_OF_ONE_FRAGMENT or most < 2 * FRAGMENT
    return 1 if few else 2


def subtracts(problem: Problem, fragments_m: int, kernel: Kernel | None = None) -> bool:
    """Returns whether the offset of codes is subtracted first, which is more exact.

    If x is widened to float32, the conversion of codes subtracts it at no cost. In half
    it costs 9 % with one fragment and 4 % with two (counted). The difference is visible
    in float32 results.

    Tensor operations take half codes with bfloat16 activations. They need no more than
    the 8 significant bits of a bfloat16 then: codes of 8 bits have 9 with their offset.
    """
    if problem.invariant or problem.format.codes == "floating":
        return True  # floats have no offset
    if kernel == TENSOR_KERNEL:
        return problem.dtype == "bfloat16" and problem.bits == 8
    if fragments_m == 0:
        return problem.dtype == "float32"
    return fragments_m >= 2 or problem.dtype != "float16"


def _simdgroups_m(problem: Problem, fragments_m: int, most: int) -> int:
    """Returns the number of simdgroups side by side along the rows."""
    if fragments_m == 0:
        return 1
    rows = FRAGMENT * fragments_m
    return max(min(-(-problem.m // rows), MAX_SIMDGROUPS_M, most // rows), 1)


def _most_along_k(body: MetalPlan) -> int:
    """Returns the most simdgroups along k that threads and memory allow."""
    threads = (MAX_SIMDGROUPS - body.loaders) // body.simdgroups_m
    return min(threads, THREADGROUP_LIMIT * body.simdgroups_k // body.threadgroup_bytes)


def _simdgroups_k(
    body: MetalPlan, work: Work, device: Device, simdgroups_n: int
) -> int:
    """Returns the fewest simdgroups along k that fill a core, or the most that fit.

    The number does not exceed the main-loop iterations of a mean split, because further
    simdgroups would be idle. `gemm_tensor` always has the most: published kernels of
    this design hide latency with 4 to 16 simdgroups along k.
    """
    trips = work.total // work.pieces * (body.tile.k // k_tile(1)) * body.simdgroups_n
    most = max(1, min(_most_along_k(body), trips))
    per_core = max(-(-work.threadgroups // device.cores), 1)
    enough = SIMDGROUPS_TO_FILL / (per_core * body.simdgroups_m)
    if body.has_tensor_operations:
        enough = most
    chosen = simdgroups_n
    for count in SIMDGROUPS_K:
        if count <= most and count % simdgroups_n == 0:
            chosen = count
            if count >= enough:
                break
    return chosen


def _invariant(body: MetalPlan, device: Device, overrides: PlanOverrides) -> MetalPlan:
    """Returns the plan whose splits of k depend only on the weight and the device."""
    weight = replace(body.problem, m=INVARIANT_ROWS)
    slices, simdgroups_k = _invariant_split(weight, device)
    tiles = body.work.tiles
    work = data_parallel(tiles, body.k_tiles)
    if slices > 1:
        work = replace(
            work,
            strategy="split_k",
            threadgroups=tiles * slices,
            whole=0,
            slices=slices,
        )
    simdgroups_k = overrides.get("simdgroups_k", simdgroups_k)
    return _with_work(_fields(body), work, 1, simdgroups_k, overrides)


@lru_cache(maxsize=1024)
def _invariant_split(problem: Problem, device: Device) -> tuple[int, int]:
    """Returns the best (slices of k, simdgroups along k) for `INVARIANT_ROWS` rows."""
    strategies: tuple[Strategy, ...] = ("data_parallel", "split_k")
    plans = [
        plan
        for strategy in strategies
        for count in INVARIANT_SIMDGROUPS_K
        for plan in candidates(
            problem, device, PlanOverrides(strategy=strategy, simdgroups_k=count)
        )
    ]
    best = min(plans, key=lambda plan: predict(plan, device).seconds)
    return best.work.slices, best.simdgroups_k
