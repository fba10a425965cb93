"""The candidate plans of a product on CUDA."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from mlx_marlin.backends.cuda import limits
from mlx_marlin.backends.cuda.cost import MOST_WARPS
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.decompositions import TileGrid, data_parallel
from mlx_marlin.planning.work.tiles import PADDED_COLUMNS, Kernel, Tile, k_tile
from mlx_marlin.planning.work.work import Work
from mlx_marlin.weights.formats import TILE_N

FRAGMENTS_M: dict[str, tuple[int, ...]] = {
    "mma": limits.FRAGMENTS_M,
    **{kernel: traits.fragments_m for kernel, traits in limits.PIPELINED.items()},
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


class Body(NamedTuple):
    """What the blocks of all work have in common."""

    problem: Problem  # The product to compute
    kernel: Kernel  # The kernel
    fragments_m: int  # As in `CudaPlan`
    tiles_n: int  # Its `simdgroups_n`

    @property
    def tile(self) -> Tile:
        """The tile of a block."""
        return Tile(
            m=limits.FRAGMENT_ROWS * self.fragments_m,
            n=TILE_N * self.tiles_n,
            k=k_tile(self.problem.group_size),
        )

    def grid(self, device: CudaDevice) -> TileGrid:
        """Returns the tiles, to be divided among the multiprocessors of a device."""
        problem, k = self.problem, k_tile(self.problem.group_size)
        return TileGrid(
            m_tiles=-(-problem.m // (limits.FRAGMENT_ROWS * self.fragments_m)),
            n_tiles=-(-problem.n // (TILE_N * self.tiles_n)),
            batch=problem.batch,
            k_tiles=-(-problem.k // k),
            trips=k // 64,
            cores=device.multiprocessors,
            widest=1,  # all tiles have the same width
            x_bytes=problem.activation_bytes,
        )


def plans(problem: Problem, device: CudaDevice) -> Iterator[CudaPlan]:
    """Yields the plans to compare, at least one."""
    yield from valid(
        partial(plan_of, body, work, device)
        for body in _bodies(problem, device)
        for work in worth_comparing(body, device)
    )


def _bodies(problem: Problem, device: CudaDevice) -> Iterator[Body]:
    for kernel in kernels(problem, device):
        for tiles_n in widths(problem, kernel):
            fragments_m = fewest_fragments(problem, kernel)
            yield Body(problem, kernel, fragments_m, tiles_n)


def valid(builds: Iterable[Callable[[], CudaPlan]]) -> Iterator[CudaPlan]:
    """Yields the plans that can be built: one may lack memory where another fits."""
    errors, found = [], False
    for build in builds:
        try:
            plan = build()
        except ValueError as error:
            errors.append(error)
        else:
            found = True
            yield plan
    if errors and not found:
        raise errors[0]


def plan_of(
    body: Body,
    work: Work,
    device: CudaDevice,
    warps_k: int | None = None,
    **given: Any,
) -> CudaPlan:
    """Returns the plan of some work."""
    problem, kernel, fragments_m, tiles_n = body
    if warps_k is None:
        slices = _slices if kernel == "mma" else _staged_slices
        warps_k = slices(body, work, device)
    stages = (
        {"buffers": limits.buffers(fragments_m, warps_k)}
        if kernel in limits.PIPELINED
        else {}
    )
    fields: dict[str, Any] = {
        **stages,
        "loaders": limits.LOADERS if stages else 0,
        "reduction": "workspace" if work.is_split else "none",
        **given,
    }
    plan = CudaPlan(
        problem=problem,
        kernel=kernel,
        tile=body.tile,
        fragments_m=fragments_m,
        simdgroups_n=tiles_n,
        simdgroups_k=warps_k,
        work=work,
        **fields,
    )
    return fitting(plan, device)


def fitting(plan: CudaPlan, device: CudaDevice) -> CudaPlan:
    """Returns a plan; raises ValueError if the device has too little memory for it."""
    if plan.threadgroup_bytes > device.shared_bytes:
        raise ValueError(
            f"simdgroups_n={plan.simdgroups_n}, simdgroups_k={plan.simdgroups_k}, "
            f"fragments_m={plan.fragments_m}, buffers={plan.buffers} "
            f"need {plan.threadgroup_bytes} bytes of shared memory, more than the "
            f"{device.shared_bytes} of {device.name}"
        )
    return plan


def kernels(problem: Problem, device: CudaDevice) -> Iterator[Kernel]:
    """Yields the kernels to compare."""
    yield "mma"
    supported = (
        device.capability == limits.PIPELINED_CAPABILITY and problem.m >= LEAST_ROWS
    )
    room = device.shared_bytes - limits.BARRIER_BYTES
    fits = room >= limits.MOST_BUFFER_BYTES
    if supported and fits and not limits.why_not_pipelined(problem):
        yield from OF_CUDA[1:]


def widths(problem: Problem, kernel: Kernel, warps_k: int = 1) -> range:
    """Returns the numbers of packed tiles side by side to compare."""
    room = limits.MOST_SIMDGROUPS // warps_k
    if kernel in limits.PIPELINED:
        traits = limits.PIPELINED[kernel]
        multipliers = traits.most_simdgroups - limits.LOADERS
        # At least one, so that its plan reports what is wrong.
        room = traits.together * max(multipliers // traits.together // warps_k, 1)
    most = min(limits.MOST_SIMDGROUPS_N, -(-problem.n // TILE_N), room)
    step = limits.least_tiles(problem)
    return range(step, max(most, step) + 1, step)


def worth_comparing(body: Body, device: CudaDevice) -> Iterator[Work]:
    """Yields whole tiles, and splits if those would leave multiprocessors idle."""
    problem, grid = body.problem, body.grid(device)
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


def _slices(body: Body, work: Work, device: CudaDevice) -> int:
    """Returns the most warps along k that memory, warps and k tiles allow."""
    problem, _, fragments_m, tiles_n = body
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


def _staged_slices(body: Body, work: Work, _: CudaDevice) -> int:
    """Returns the most slices of k that memory, warps and stages allow."""
    problem, kernel, fragments_m, tiles_n = body
    few = problem.bits > 4
    most = FEW_MULTIPLIERS[kernel] if few else MOST_MULTIPLIERS[kernel][fragments_m]
    trips = limits.STAGE_K // k_tile(problem.group_size)
    stages = -(-(work.total // work.pieces) // trips)
    columns = limits.warp_columns(kernel, tiles_n)
    warps_k = _even(columns, max(min(most // columns, stages), 1))
    while warps_k > 1 and not limits.affordable_buffers(fragments_m, warps_k):
        warps_k -= 1
    return warps_k


def fewest_fragments(problem: Problem, kernel: Kernel) -> int:
    """Returns the fewest 8-row fragments that give the fewest tiles along m."""
    fragments = -(-problem.m // limits.FRAGMENT_ROWS)
    known = FRAGMENTS_M[kernel]
    least = -(-fragments // -(-fragments // known[-1]))
    return next(count for count in known if count >= least)
