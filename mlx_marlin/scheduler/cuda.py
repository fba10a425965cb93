"""Plans for CUDA devices: candidates of all CUDA's kernels, and the best of them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf
from typing import Any, cast

from mlx_marlin import mma, staged_x
from mlx_marlin.cuda_device import CudaDevice
from mlx_marlin.dense_plan import DensePlan, dense_plan
from mlx_marlin.formats import TILE_N
from mlx_marlin.kernels import OF_CUDA, PADDED_COLUMNS, Kernel, Reduction, k_tile
from mlx_marlin.plan import Plan
from mlx_marlin.problem import Problem
from mlx_marlin.scheduler import decompositions
from mlx_marlin.scheduler.candidates import INVARIANT_ROWS, Wishes
from mlx_marlin.scheduler.choice import Candidate, Choice
from mlx_marlin.scheduler.cost import Prediction
from mlx_marlin.scheduler.cuda_cost import MOST_WARPS, Way, prediction
from mlx_marlin.scheduler.decompositions import Space
from mlx_marlin.work import STRATEGIES, Tile, Work, data_parallel

MOST_ROWS = {"mlx": 5, "marlin": 128}
"""Rows up to which our kernels serve, by layout; beyond, stock MLX does, or a plain
product of a packed weight that is decoded once. Ours is not timed yet in MLX's layout:
there it has few rows, for which stock MLX takes longer than for 8 (docs/cuda.md)."""
FRAGMENTS_M: dict[str, tuple[int, ...]] = {
    "mma": mma.FRAGMENTS_M,
    **{kernel: traits.fragments_m for kernel, traits in staged_x.KERNELS.items()},
}
LEAST_ROWS = 9
"""Rows from which kernels with stages of x are compared: for 8, "mma" reads about as
fast as memory is."""
MODEL_ERROR = 0.06
"""What a split must gain more, as on Apple's devices."""

SCHEDULERS = 4
"""Of a multiprocessor (NVIDIA, CUDA C++ Programming Guide): warps that they share
evenly waste no registers."""
MOST_SLICES = 16
"""Warps that share a tile's k: the best number where one tile has a whole block
(measured, docs/cuda.md, 4096→4096)."""
LEAST_K_TILES = 2
"""K tiles that a warp's slice should have."""
EVEN_ENOUGH = 0.9
"""Mean load over the fullest multiprocessor's with which whole tiles are not split."""
MOST_MULTIPLIERS: dict[str, dict[int, int]] = {
    "mma_staged": {1: 28, 2: 28, 3: 24, 4: 20},
    "wgmma": {2: 24, 3: 16, 4: 16, 6: 8, 8: 8},
}
"""Warps that multiply out of stages, by fragments_m: as many as leave each the
registers for its sums (measured, docs/cuda.md)."""
FEW_MULTIPLIERS = {"mma_staged": 20, "wgmma": 8}
"""Likewise where words of more than 4 bits take twice the registers (a guess)."""
BUFFER_BYTES, MOST_BUFFERS = 96 * 1024, 12
"""What stages of x may take, and how many there are: 12 of up to 32 rows, 8 of 48, 6 of
64 (measured: more were no faster, docs/cuda.md), and more only where slices of k need
them."""
MOST_BUFFER_BYTES = 128 * 1024
"""What these may take: the sums of a block's warps and other blocks want room too."""


def make(problem: Problem, device: CudaDevice, wishes: Wishes) -> Plan:
    """Returns the best plan that has the wished fields.

    Raises:
        ValueError: If no plan has these fields.
    """
    if problem.invariant and problem.m != INVARIANT_ROWS:
        of_all = make(replace(problem, m=INVARIANT_ROWS), device, wishes)
        return _with_rows(of_all, problem, device, wishes)
    _check(problem, device, wishes)
    best: Way | None = None
    least: tuple[float, ...] = (inf,)
    for way in _ways(problem, device, wishes):
        rank = _rank(problem, way, device)
        if rank < least:
            best, least = way, rank
    if best is None:
        raise ValueError(
            f"reduction={wishes.get('reduction')!r} fits none of the plans that are "
            f"worth comparing; name a strategy too, such as 'split_k'"
        )
    return _plan(problem, best, device, wishes)


def compare(problem: Problem, device: CudaDevice, wishes: Wishes) -> Choice:
    """Returns what `make` would, with all that it was compared to."""
    chosen = make(problem, device, wishes)
    plans = {chosen: None}
    if not problem.invariant:
        for way in _ways(problem, device, wishes):
            plans[_plan(problem, way, device, wishes)] = None
    compared = [
        Candidate(plan=each, prediction=predict(each, device)) for each in plans
    ]
    # The chosen one first: the others were ranked before their plans were made.
    others = sorted(compared[1:], key=lambda each: each.seconds)
    return Choice(
        plan=chosen,
        device=device,
        prediction=compared[0].prediction,
        stock=None,
        reason=handover(problem, device),
        candidates=(compared[0], *others),
    )


def handover(problem: Problem, device: CudaDevice) -> str | None:
    """Says why stock MLX should serve a product for speed; None if ours should."""
    most = MOST_ROWS[problem.layout]
    if problem.invariant or problem.m <= most or dense(problem) is not None:
        return None
    return (
        f"{problem.m} rows on {device.variant}: our CUDA kernels serve up to {most} "
        f"with weights in the layout {problem.layout!r}"
    )


def dense(problem: Problem) -> DensePlan | None:
    """Returns the plain product of a weight decoded once, where that is faster."""
    if problem.layout == "mlx" or problem.batch > 1 or problem.invariant:
        return None
    return dense_plan(problem) if problem.m > MOST_ROWS[problem.layout] else None


def predict(plan: Plan, device: CudaDevice) -> Prediction:
    """Returns what the model says about a plan."""
    way = Way(
        plan.kernel,
        plan.fragments_m,
        plan.work,
        plan.simdgroups_n,
        plan.simdgroups_k,
    )
    return prediction(plan.problem, way, device)


def _rank(problem: Problem, way: Way, device: CudaDevice) -> tuple[float, ...]:
    """Returns what ways are compared by: time first, then the simpler one.

    Where a product leaves multiprocessors idle, others that do not wait for it fill
    them, such as those of q, k and v: a time counts half as it is and half as the share
    of the device that it takes.
    """
    found = prediction(problem, way, device)
    busy = way.work.threadgroups - way.work.idle
    share = min(busy / device.multiprocessors, 1.0)
    return (
        found.seconds * (1 + share) / 2 * (1 + MODEL_ERROR * way.work.is_split),
        found.memory,
        OF_CUDA.index(way.kernel),
        STRATEGIES.index(way.work.strategy),
        way.across,
    )


def _kernels(problem: Problem, device: CudaDevice, wishes: Wishes) -> Iterator[Kernel]:
    if "kernel" in wishes:
        yield wishes["kernel"]
        return
    yield "mma"
    here = device.capability == staged_x.CAPABILITY and problem.m >= LEAST_ROWS
    room = device.shared_bytes - staged_x.BARRIER_BYTES
    if not here or room < MOST_BUFFER_BYTES or staged_x.why_not(problem):
        return
    for kernel in OF_CUDA[1:]:
        if _fits_stages(problem, kernel, wishes):
            yield kernel


def _fits_stages(problem: Problem, kernel: Kernel, wishes: Wishes) -> bool:
    """Returns whether such a kernel could have what is wished of any kernel."""
    traits = staged_x.KERNELS[kernel]
    fragments_m = wishes.get("fragments_m", _fragments_m(problem, kernel))
    if fragments_m not in traits.fragments_m or {"buffers", "loaders"} & wishes.keys():
        return False
    across, along = wishes.get("simdgroups_n", 1), wishes.get("simdgroups_k", 1)
    warps = staged_x.simdgroups(kernel, across, along)
    return warps <= traits.most_simdgroups and bool(_stages(fragments_m, along))


def _ways(problem: Problem, device: CudaDevice, wishes: Wishes) -> Iterator[Way]:
    """Yields the ways to cut a problem that have the wished fields."""
    for kernel in _kernels(problem, device, wishes):
        fragments_m = wishes.get("fragments_m", _fragments_m(problem, kernel))
        for across in _widths(problem, kernel, wishes):
            for work in _works(problem, fragments_m, across, device, wishes):
                if not _can_meet(work, wishes):
                    continue
                along = wishes.get("simdgroups_k")
                if along is None:
                    if kernel == "mma":
                        along = _slices(problem, fragments_m, across, work, device)
                    else:
                        along = _staged_slices(
                            problem, kernel, fragments_m, across, work
                        )
                yield Way(kernel, fragments_m, work, across, along)


def _widths(problem: Problem, kernel: Kernel, wishes: Wishes) -> Iterable[int]:
    if "simdgroups_n" in wishes:
        return (wishes["simdgroups_n"],)
    along = wishes.get("simdgroups_k", 1)
    room = mma.MOST_SIMDGROUPS // along
    if kernel in staged_x.KERNELS:
        traits = staged_x.KERNELS[kernel]
        multipliers = traits.most_simdgroups - staged_x.LOADERS
        # One at least, whose plan says what is wrong.
        room = traits.together * max(multipliers // traits.together // along, 1)
    most = min(mma.MOST_SIMDGROUPS_N, -(-problem.n // TILE_N), room)
    return range(1, most + 1)


def _works(
    problem: Problem, fragments_m: int, across: int, device: CudaDevice, wishes: Wishes
) -> Iterator[Work]:
    rows = mma.FRAGMENT_ROWS * fragments_m
    space = Space(
        m_tiles=-(-problem.m // rows),
        n_tiles=-(-problem.n // (TILE_N * across)),
        batch=problem.batch,
        k_tiles=-(-problem.k // k_tile(problem.group_size)),
        trips=k_tile(problem.group_size) // 64,
        cores=device.multiprocessors,
        widest=1,  # no wide tiles beside narrow ones
        x_bytes=problem.activation_bytes,
    )
    named = {name: wish for name, wish in wishes.items() if name != "simdgroups_n"}
    if named.keys() & decompositions.WORK_WISHES:
        yield from (work for work, _ in decompositions.works(space, named))
        return
    yield from _worth_comparing(space, problem)


def _worth_comparing(space: Space, problem: Problem) -> Iterator[Work]:
    """Yields whole tiles, and splits where those leave multiprocessors idle."""
    tiles, cores = space.tiles, space.cores
    yield data_parallel(tiles, space.k_tiles)
    if tiles >= EVEN_ENOUGH * cores * -(-tiles // cores):
        return
    most = space.k_tiles // LEAST_K_TILES
    slices = min(cores // tiles, most)
    if slices > 1:
        yield Work(
            strategy="split_k",
            tiles=tiles,
            k_tiles=space.k_tiles,
            threadgroups=tiles * slices,
            slices=slices,
        )
    total = tiles * space.k_tiles
    if problem.invariant or total < 2 * LEAST_K_TILES * cores:
        return
    yield Work(
        strategy="stream_k",
        tiles=tiles,
        k_tiles=space.k_tiles,
        threadgroups=cores,
        slices=space.k_tiles,
        minimum=min(LEAST_K_TILES, space.k_tiles),
    )


def _slices(
    problem: Problem, fragments_m: int, across: int, work: Work, device: CudaDevice
) -> int:
    """Returns as many warps along k as a block has room for and k tiles to give."""
    most = MOST_WARPS[-1 if problem.invariant else fragments_m - 1]
    sums = across * mma.FRAGMENT_ROWS * fragments_m * PADDED_COLUMNS * 4
    shared = min(device.shared_bytes, mma.SHARED_LIMIT) // sums
    mean = work.total // work.pieces
    along = max(min(most // across, MOST_SLICES, shared, mean // LEAST_K_TILES), 1)
    return _even(across, along)


def _even(across: int, along: int) -> int:
    """Returns one slice fewer where all schedulers then have as many warps.

    Not where that is many fewer.
    """
    fewer = along - 1
    if across * along % SCHEDULERS and not across * fewer % SCHEDULERS:
        return fewer if fewer >= 0.75 * along else along
    return along


def _staged_slices(
    problem: Problem, kernel: Kernel, fragments_m: int, across: int, work: Work
) -> int:
    """Returns as many slices of k as a block has room for and stages."""
    few = problem.bits > 4
    most = FEW_MULTIPLIERS[kernel] if few else MOST_MULTIPLIERS[kernel][fragments_m]
    trips = staged_x.STAGE_K // k_tile(problem.group_size)
    stages = -(-(work.total // work.pieces) // trips)
    columns = staged_x.columns(kernel, across)
    along = _even(columns, max(min(most // columns, stages), 1))
    while along > 1 and not _stages(fragments_m, along):
        along -= 1
    return along


def _stages(fragments_m: int, along: int) -> list[int]:
    """Returns how many stages of x slices of k may have, as far as there is memory."""
    each = staged_x.stage_bytes(mma.FRAGMENT_ROWS * fragments_m)
    fitting = staged_x.buffers_of(fragments_m, along)
    return [count for count in fitting if count * each <= MOST_BUFFER_BYTES]


def _buffers(fragments_m: int, along: int) -> int:
    """Returns the stages: as many as may be and are worth their memory."""
    each = staged_x.stage_bytes(mma.FRAGMENT_ROWS * fragments_m)
    fitting = staged_x.buffers_of(fragments_m, along)
    worth = (count for count in fitting if count * each <= BUFFER_BYTES)
    least = next(iter(fitting), 0)  # none: the plan says why
    return max((count for count in worth if count <= MOST_BUFFERS), default=least)


def _fragments_m(problem: Problem, kernel: Kernel) -> int:
    """Returns the fewest fragments of 8 rows with the fewest tiles down the rows."""
    fragments = -(-problem.m // mma.FRAGMENT_ROWS)
    known = FRAGMENTS_M[kernel]
    least = -(-fragments // -(-fragments // known[-1]))
    return next(each for each in known if each >= least)


def _can_meet(work: Work, wishes: Wishes) -> bool:
    """Returns whether a work's splits, if it has any, can meet as wished."""
    wished = "reduction" in wishes and "strategy" not in wishes
    return not wished or work.is_split == (wishes["reduction"] != "none")


def _check(problem: Problem, device: CudaDevice, wishes: Wishes) -> None:
    """Refuses a problem and wishes that are other kernels'."""
    reason = mma.why_not(problem)
    if reason is not None:
        raise ValueError(reason)
    kernel = wishes.get("kernel", "mma")
    if kernel not in OF_CUDA:
        raise ValueError(f"kernel={kernel!r} is not one of CUDA's, {OF_CUDA}")
    of_x = (
        {"loaders": staged_x.LOADERS}
        if kernel in staged_x.KERNELS
        else {"buffers": 0, "loaders": 0}
    )
    expected: dict[str, Any] = {"simdgroups_m": 1, "subtract": False, **of_x}
    given = cast(dict[str, Any], wishes)
    for name, value in expected.items():
        if given.get(name, value) != value:
            raise ValueError(
                f"{name}={given[name]!r}, expected {value!r} on a CUDA device"
            )
    if wishes.get("strategy") == "hytis":
        raise ValueError(
            f"strategy='hytis' has tiles of two widths, which {kernel} has not"
        )
    across, along = wishes.get("simdgroups_n", 1), wishes.get("simdgroups_k", 1)
    if min(across, along) < 1 or across * along > mma.MOST_SIMDGROUPS:
        raise ValueError(
            f"simdgroups_n={across} x simdgroups_k={along}, expected 1 to "
            f"{mma.MOST_SIMDGROUPS} simdgroups"
        )
    known = FRAGMENTS_M[kernel]
    if wishes.get("fragments_m", known[0]) not in known:
        raise ValueError(f"fragments_m={wishes['fragments_m']} is not one of {known}")
    if kernel in staged_x.KERNELS:
        _check_device(kernel, device)


def _check_device(kernel: Kernel, device: CudaDevice) -> None:
    if device.capability != staged_x.CAPABILITY:
        needed = ".".join(map(str, staged_x.CAPABILITY))
        raise ValueError(
            f"kernel={kernel!r} needs compute capability {needed}, and {device.name} "
            f"has {'.'.join(map(str, device.capability))}"
        )


def _plan(problem: Problem, way: Way, device: CudaDevice, wishes: Wishes) -> Plan:
    work, fragments_m = way.work, way.fragments_m
    natural: Reduction = "workspace" if work.is_split else "none"
    staged = way.kernel in staged_x.KERNELS
    buffers = wishes.get("buffers", _buffers(fragments_m, way.along)) if staged else 0
    plan = Plan(
        problem=problem,
        kernel=way.kernel,
        tile=Tile(
            m=mma.FRAGMENT_ROWS * fragments_m,
            n=TILE_N * way.across,
            k=k_tile(problem.group_size),
        ),
        fragments_m=fragments_m,
        simdgroups_n=way.across,
        simdgroups_k=way.along,
        work=work,
        reduction=wishes.get("reduction", natural),
        buffers=buffers,
        loaders=staged_x.LOADERS if staged else 0,
    )
    if plan.threadgroup_bytes > device.shared_bytes:
        raise ValueError(
            f"simdgroups_n={way.across}, simdgroups_k={way.along}, "
            f"fragments_m={fragments_m}, buffers={buffers} "
            f"need {plan.threadgroup_bytes} bytes of shared memory, more than the "
            f"{device.shared_bytes} of {device.name}"
        )
    return plan


def _with_rows(
    plan: Plan, problem: Problem, device: CudaDevice, wishes: Wishes
) -> Plan:
    """Returns an invariant plan for another number of rows: k is cut as it was."""
    fragments_m = wishes.get("fragments_m", _fragments_m(problem, "mma"))
    m_tiles = -(-problem.m // (mma.FRAGMENT_ROWS * fragments_m))
    tiles = problem.batch * m_tiles * plan.n_tiles
    work = data_parallel(tiles, plan.k_tiles)
    if plan.work.strategy == "split_k":
        slices = plan.work.slices
        work = replace(
            plan.work, tiles=tiles, threadgroups=tiles * slices, slices=slices
        )
    way = Way("mma", fragments_m, work, plan.simdgroups_n, plan.simdgroups_k)
    return _plan(problem, way, device, wishes)
