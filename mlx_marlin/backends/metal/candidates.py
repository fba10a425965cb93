"""The candidate plans of a product on Metal."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from mlx_marlin.backends.metal.cost import SIMDGROUPS_TO_FILL, predict
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.kernel_limits import (
    FRAGMENTS_M,
    MAX_SIMDGROUPS,
    MAX_SIMDGROUPS_M,
    TENSOR_FRAGMENTS_M,
    TENSOR_KERNEL,
    TENSOR_REGISTERS,
    THREADGROUP_LIMIT,
    default_kernel,
    has_registers,
    operand_of,
)
from mlx_marlin.backends.metal.plan import MetalPlan, buffer_bytes, columns_of_tile
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.problem import INVARIANT_ROWS, Problem
from mlx_marlin.planning.work import decompositions
from mlx_marlin.planning.work.decompositions import TileGrid, WideWork, data_parallel
from mlx_marlin.planning.work.tiles import (
    FRAGMENT,
    Kernel,
    Reduction,
    Tile,
    k_tile,
    step_k,
)
from mlx_marlin.planning.work.work import Work
from mlx_marlin.weights.formats import TILE_N

ROWS_OF_ONE_FRAGMENT = 8
"""Most rows for which a simdgroup holds one row fragment. For more rows it holds two,
which share the decoded weights; the kernel skips a second one past the last row."""
SIMDGROUPS_K = (1, 2, 4, 8)
"""Numbers of simdgroups that may share a tile's k."""
WHOLE_TILES = ("data_parallel", "hytis")
"""Strategies that give each threadgroup one whole tile, wide or narrow."""
INVARIANT_SIMDGROUPS_K = (1, 2)
"""Numbers of simdgroups along k that fit with any m."""


def plans(problem: Problem, device: Device, kernel: Kernel) -> Iterator[MetalPlan]:
    """Yields the candidate plans, at least one."""
    body = body_of(problem, device, kernel)
    if problem.invariant:
        yield with_work(body, *invariant_work(body, device))
        return
    for work, simdgroups_n in works_of(body, device):
        count = simdgroups_along_k(body, work, device, simdgroups_n)
        yield with_work(body, work, simdgroups_n, count)


def works_of(
    body: MetalPlan, device: Device, widest: int | None = None
) -> list[WideWork]:
    """Returns divisions of the work, with the tiles side by side in their wide tiles.

    `gemm_tensor` splits no tiles that fill the GPU: in a chain, published kernels lost
    more by a second dispatch than they gained (avlp12/mlx-vlm, docs/m5.md). Ranges of
    work may take more registers than a thread has.
    """
    if body.problem.epilogue.gated or body.problem.norm is not None:
        return [(body.work, body.simdgroups_n)]
    works = decompositions.works(grid_of(body, device, widest))
    if not body.has_tensor_operations:
        operand = body.operand
        if has_registers(body.problem, device, body.fragments_m, operand, True):
            return [*works]
        return [pair for pair in works if pair[0].strategy in WHOLE_TILES]
    if body.work.tiles >= device.cores:
        return [pair for pair in works if not pair[0].is_split]
    return [*works]


def grid_of(body: MetalPlan, device: Device, widest: int | None = None) -> TileGrid:
    """Returns the tiles of a plan, to be divided."""
    widest = _most_along_k(body) if widest is None else widest
    return TileGrid(
        m_tiles=body.m_tiles,
        n_tiles=body.n_tiles,
        batch=body.problem.batch,
        k_tiles=body.k_tiles,
        trips=body.tile.k // k_tile(1),
        cores=device.cores,
        widest=1 if body.has_tensor_operations else widest,
        x_bytes=body.problem.activation_bytes,
    )


def body_of(
    problem: Problem,
    device: Device,
    kernel: Kernel,
    *,
    fragments_m: int | None = None,
    simdgroups_m: int | None = None,
    operand: CodeForm | None = None,
    buffers: int = 0,
    loaders: int = 0,
) -> MetalPlan:
    """Returns the data-parallel plan with the threadgroups of all candidates."""
    most = most_rows(problem, buffers)
    if fragments_m is None:
        fragments_m = (
            _tensor_fragments_m(problem, device, simdgroups_m)
            if kernel == TENSOR_KERNEL
            else _fragments_m(problem, device, kernel, most, operand)
        )
    if simdgroups_m is None:
        simdgroups_m = _simdgroups_m(problem, fragments_m, most)
    if operand is None:
        operand = operand_of(problem, device, fragments_m, kernel)
    rows = problem.m if kernel == "gemv" else FRAGMENT * fragments_m * simdgroups_m
    columns = columns_of_tile(problem)
    tile = Tile(m=rows, n=columns, k=k_tile(problem.group_size))
    tiles = problem.batch * -(-problem.m // tile.m) * -(-problem.n // tile.n)
    return MetalPlan(
        problem=problem,
        kernel=kernel,
        tile=tile,
        fragments_m=fragments_m,
        simdgroups_m=simdgroups_m,
        simdgroups_n=columns // TILE_N,
        simdgroups_k=columns // TILE_N,
        work=data_parallel(tiles, -(-problem.k // tile.k)),
        operand=operand,
        buffers=buffers,
        loaders=loaders,
    )


def with_work(
    body: MetalPlan,
    work: Work,
    simdgroups_n: int,
    simdgroups_k: int,
    reduction: Reduction | None = None,
) -> MetalPlan:
    """Returns a plan with the threadgroups of `body` and other work."""
    return replace(
        body,
        work=work,
        simdgroups_n=simdgroups_n,
        simdgroups_k=simdgroups_k,
        reduction=reduction or ("workspace" if work.is_split else "none"),
    )


def most_rows(problem: Problem, buffers: int) -> int:
    """Returns the rows of the largest tile that fits, with `buffers` in memory."""
    most = FRAGMENT * max(FRAGMENTS_M) * MAX_SIMDGROUPS_M
    if buffers < 1:
        return most
    row = buffer_bytes(1, 0, step_k(problem.group_size), problem.fragment_bytes)
    return min(THREADGROUP_LIMIT // (buffers * row) - TILE_N, most)


def _fragments_m(
    problem: Problem,
    device: Device,
    kernel: Kernel,
    most: int,
    operand: CodeForm | None,
) -> int:
    """Returns the number of 8-row fragments that a simdgroup holds."""
    if kernel == "gemv":
        return 0
    few = problem.m <= ROWS_OF_ONE_FRAGMENT or most < 2 * FRAGMENT
    # Invariant plans may have ranges, whatever the number of rows.
    fits = has_registers(problem, device, 2, operand, problem.invariant)
    return 2 if fits and not few else 1


def _tensor_fragments_m(
    problem: Problem, device: Device, simdgroups_m: int | None
) -> int:
    """Returns the row fragments that a simdgroup of `gemm_tensor` holds.

    With two operations a simdgroup, weights are decoded once for 17 to 32 rows, if a
    thread has the registers. If a caller wants several simdgroups along m, each has one
    operation.
    """
    one, two = TENSOR_FRAGMENTS_M
    fits = TENSOR_REGISTERS[two] <= device.core.thread_registers
    suits = FRAGMENT * one < problem.m <= FRAGMENT * two and simdgroups_m in (None, 1)
    return two if suits and fits else one


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


def simdgroups_along_k(
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


def invariant_work(body: MetalPlan, device: Device) -> tuple[Work, int, int]:
    """Returns work whose splits of k depend only on the weight and the device."""
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
    return work, body.simdgroups_n, simdgroups_k


@lru_cache(maxsize=1024)
def _invariant_split(problem: Problem, device: Device) -> tuple[int, int]:
    """Returns the best (slices of k, simdgroups along k) for `INVARIANT_ROWS` rows."""
    body = body_of(problem, device, default_kernel(problem, device))
    splits = [work for work, _ in decompositions.slices_of_k(grid_of(body, device))]
    plans = [
        with_work(body, work, body.simdgroups_n, count)
        for work in (body.work, *splits)
        for count in INVARIANT_SIMDGROUPS_K
    ]
    best = min(plans, key=lambda plan: predict(plan, device).seconds)
    return best.work.slices, best.simdgroups_k
