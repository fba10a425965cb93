"""The candidate plans of a product on CUDA, subject to overrides."""

from collections.abc import Iterable, Iterator

from mlx_marlin.backends.cuda import limits, pipelined
from mlx_marlin.backends.cuda.cost import MOST_WARPS, CandidateConfig
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.planning.overrides import PlanOverrides, can_meet
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work import Work, data_parallel, decompositions
from mlx_marlin.planning.work.decompositions import TileGrid
from mlx_marlin.planning.work.tiles import PADDED_COLUMNS, Kernel, k_tile
from mlx_marlin.weights.formats import TILE_N

FRAGMENTS_M: dict[str, tuple[int, ...]] = {
    "mma": limits.FRAGMENTS_M,
    **{kernel: traits.fragments_m for kernel, traits in pipelined.KERNELS.items()},
}
LEAST_ROWS = 9
"""Fewest rows for which pipelined kernels are compared; for 8, "mma" already reads at
about the memory bandwidth."""
SCHEDULERS = 4
"""Warp schedulers of a multiprocessor (NVIDIA, CUDA C++ Programming Guide). A multiple
of them wastes no registers."""
MOST_SLICES = 16
"""Most warps that share a tile's k: the best number if a block has one packed tile
(measured, docs/lab, 4096→4096)."""
LEAST_K_TILES = 2
"""Fewest k tiles of a warp's slice."""
EVEN_ENOUGH = 0.9
"""Mean load over the highest load of a multiprocessor from which whole tiles are not
split."""
MOST_MULTIPLIERS: dict[str, dict[int, int]] = {
    "mma_staged": {1: 28, 2: 28, 3: 24, 4: 20},
    "wgmma": {2: 24, 3: 16, 4: 16, 6: 8, 8: 8},
}
"""Most warps that multiply, by fragments_m: more leave too few registers for the sums
(measured, docs/lab)."""
FEW_MULTIPLIERS = {"mma_staged": 20, "wgmma": 8}
"""The same for codes of more than 4 bits, whose words take twice the registers (a
guess)."""


def configs(
    problem: Problem, device: CudaDevice, overrides: PlanOverrides
) -> Iterator[CandidateConfig]:
    """Yields the candidates that satisfy the overrides.

    Raises:
        ValueError: If no kernel and width allows the given division of the work.
    """
    first_error: ValueError | None = None
    found = False
    for kernel in _kernels(problem, device, overrides):
        fragments_m = overrides.get("fragments_m", fewest_fragments(problem, kernel))
        for tiles_n in _widths(problem, kernel, overrides):
            try:
                works = [*_works(problem, fragments_m, tiles_n, device, overrides)]
            except ValueError as error:  # too few tiles; narrower ones may be enough
                first_error = first_error or error
                continue
            found = True
            for work in works:
                if can_meet(work, overrides):
                    warps_k = _warps_k(
                        problem, kernel, fragments_m, tiles_n, work, device, overrides
                    )
                    yield CandidateConfig(kernel, fragments_m, work, tiles_n, warps_k)
    if first_error and not found:
        raise first_error


def _warps_k(
    problem: Problem,
    kernel: Kernel,
    fragments_m: int,
    tiles_n: int,
    work: Work,
    device: CudaDevice,
    overrides: PlanOverrides,
) -> int:
    if "simdgroups_k" in overrides:
        return overrides["simdgroups_k"]
    if kernel == "mma":
        return _slices(problem, fragments_m, tiles_n, work, device)
    return _staged_slices(problem, kernel, fragments_m, tiles_n, work)


def _kernels(
    problem: Problem, device: CudaDevice, overrides: PlanOverrides
) -> Iterator[Kernel]:
    if "kernel" in overrides:
        yield overrides["kernel"]
        return
    yield "mma"
    supported = device.capability == pipelined.CAPABILITY and problem.m >= LEAST_ROWS
    room = device.shared_bytes - pipelined.BARRIER_BYTES
    fits = room >= pipelined.MOST_BUFFER_BYTES
    if not (supported and fits) or pipelined.why_not(problem):
        return
    for kernel in OF_CUDA[1:]:
        if _fits_stages(problem, kernel, overrides):
            yield kernel


def _fits_stages(problem: Problem, kernel: Kernel, overrides: PlanOverrides) -> bool:
    """Returns whether a pipelined kernel can have the given fields."""
    traits = pipelined.KERNELS[kernel]
    fragments_m = overrides.get("fragments_m", fewest_fragments(problem, kernel))
    if (
        fragments_m not in traits.fragments_m
        or {"buffers", "loaders"} & overrides.keys()
    ):
        return False
    tiles_n, warps_k = (
        overrides.get("simdgroups_n", 1),
        overrides.get("simdgroups_k", 1),
    )
    warps = pipelined.simdgroups(kernel, tiles_n, warps_k)
    return warps <= traits.most_simdgroups and bool(
        pipelined.affordable_buffers(fragments_m, warps_k)
    )


def _widths(
    problem: Problem, kernel: Kernel, overrides: PlanOverrides
) -> Iterable[int]:
    if "simdgroups_n" in overrides:
        return (overrides["simdgroups_n"],)
    warps_k = overrides.get("simdgroups_k", 1)
    room = limits.MOST_SIMDGROUPS // warps_k
    if kernel in pipelined.KERNELS:
        traits = pipelined.KERNELS[kernel]
        multipliers = traits.most_simdgroups - pipelined.LOADERS
        # At least one, so that its plan reports what is wrong.
        room = traits.together * max(multipliers // traits.together // warps_k, 1)
    most = min(limits.MOST_SIMDGROUPS_N, -(-problem.n // TILE_N), room)
    step = limits.least_tiles(problem)
    return range(step, max(most, step) + 1, step)


def _works(
    problem: Problem,
    fragments_m: int,
    tiles_n: int,
    device: CudaDevice,
    overrides: PlanOverrides,
) -> Iterator[Work]:
    rows = limits.FRAGMENT_ROWS * fragments_m
    grid = TileGrid(
        m_tiles=-(-problem.m // rows),
        n_tiles=-(-problem.n // (TILE_N * tiles_n)),
        batch=problem.batch,
        k_tiles=-(-problem.k // k_tile(problem.group_size)),
        trips=k_tile(problem.group_size) // 64,
        cores=device.multiprocessors,
        widest=1,  # all tiles have the same width
        x_bytes=problem.activation_bytes,
    )
    named = {key: value for key, value in overrides.items() if key != "simdgroups_n"}
    if named.keys() & decompositions.WORK_OVERRIDES:
        yield from (work for work, _ in decompositions.works(grid, named))
        return
    yield from _worth_comparing(grid, problem)


def _worth_comparing(grid: TileGrid, problem: Problem) -> Iterator[Work]:
    """Yields whole tiles, and splits if those would leave multiprocessors idle."""
    tiles, cores = grid.tiles, grid.cores
    yield data_parallel(tiles, grid.k_tiles)
    # A paired epilogue and an RMSNorm need whole tiles, as `CudaPlan` checks.
    if problem.epilogue.is_paired or problem.norm is not None:
        return
    if tiles >= EVEN_ENOUGH * cores * -(-tiles // cores):
        return
    most = grid.k_tiles // LEAST_K_TILES
    slices = min(cores // tiles, most)
    if slices > 1:
        yield Work(
            strategy="split_k",
            tiles=tiles,
            k_tiles=grid.k_tiles,
            threadgroups=tiles * slices,
            slices=slices,
        )
    total = tiles * grid.k_tiles
    if problem.invariant or total < 2 * LEAST_K_TILES * cores:
        return
    yield Work(
        strategy="stream_k",
        tiles=tiles,
        k_tiles=grid.k_tiles,
        threadgroups=cores,
        slices=grid.k_tiles,
        minimum=min(LEAST_K_TILES, grid.k_tiles),
    )


def _slices(
    problem: Problem, fragments_m: int, tiles_n: int, work: Work, device: CudaDevice
) -> int:
    """Returns the most warps along k that memory, warps and k tiles allow."""
    most = MOST_WARPS[-1 if problem.invariant else fragments_m - 1]
    sums = tiles_n * limits.FRAGMENT_ROWS * fragments_m * PADDED_COLUMNS * 4
    room = min(device.shared_bytes, limits.SHARED_LIMIT) - limits.normed_bytes(problem)
    shared = room // sums
    mean = work.total // work.pieces
    warps_k = max(min(most // tiles_n, MOST_SLICES, shared, mean // LEAST_K_TILES), 1)
    return _even(tiles_n, warps_k)


def _even(tiles_n: int, warps_k: int) -> int:
    """Returns one slice fewer if that makes the load of the schedulers even.

    The number is not reduced by more than a quarter.
    """
    fewer = warps_k - 1
    if tiles_n * warps_k % SCHEDULERS and not tiles_n * fewer % SCHEDULERS:
        return fewer if fewer >= 0.75 * warps_k else warps_k
    return warps_k


def _staged_slices(
    problem: Problem, kernel: Kernel, fragments_m: int, tiles_n: int, work: Work
) -> int:
    """Returns the most slices of k that memory, warps and stages allow."""
    few = problem.bits > 4
    most = FEW_MULTIPLIERS[kernel] if few else MOST_MULTIPLIERS[kernel][fragments_m]
    trips = pipelined.STAGE_K // k_tile(problem.group_size)
    stages = -(-(work.total // work.pieces) // trips)
    columns = pipelined.columns(kernel, tiles_n)
    warps_k = _even(columns, max(min(most // columns, stages), 1))
    while warps_k > 1 and not pipelined.affordable_buffers(fragments_m, warps_k):
        warps_k -= 1
    return warps_k


def fewest_fragments(problem: Problem, kernel: Kernel) -> int:
    """Returns the fewest 8-row fragments that give the fewest tiles along m."""
    fragments = -(-problem.m // limits.FRAGMENT_ROWS)
    known = FRAGMENTS_M[kernel]
    least = -(-fragments // -(-fragments // known[-1]))
    return next(count for count in known if count >= least)
