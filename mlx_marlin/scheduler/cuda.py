"""Plans for CUDA devices: candidates of the kernel "mma", what each should cost.

A model, with constants out of the study that docs/cuda.md has: one NVIDIA H200, 4-bit
weights with groups of 128. A plan takes the longest of three times (memory traffic as
far as its warps can ask for it, what a warp issues and waits for, matrix products), and
a price for each piece of work and each further launch. Other devices are scaled by
multiprocessors, bandwidth and matrix units alone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf
from typing import Any, cast

from mlx_marlin import mma
from mlx_marlin.cuda_device import CudaDevice
from mlx_marlin.dense_plan import DensePlan, dense_plan
from mlx_marlin.formats import TILE_N
from mlx_marlin.plan import PADDED_COLUMNS, Plan, Reduction, k_tile
from mlx_marlin.problem import Problem
from mlx_marlin.scheduler import decompositions
from mlx_marlin.scheduler.candidates import INVARIANT_ROWS, Wishes
from mlx_marlin.scheduler.choice import Candidate, Choice
from mlx_marlin.scheduler.cost import Prediction
from mlx_marlin.scheduler.decompositions import Space
from mlx_marlin.work import STRATEGIES, Tile, Work, data_parallel

MOST_ROWS = {"mlx": 5, "marlin": 128}
"""Rows up to which "mma" serves, by layout; beyond, stock MLX does, or a plain product
of a packed weight that is decoded once. Ours is not timed yet in MLX's layout: there it
has few rows, for which stock MLX takes longer than for 8 (docs/cuda.md)."""

STATED_BANDWIDTH = 1.13
"""Bandwidth in the stated one's terms that any number of warps would reach, and what
one warp of a multiprocessor can have: fitted to five times that reading 117 MB took
with 8 to 32 warps, within 8 % (measured, docs/cuda.md)."""
WARP_BANDWIDTH = 3.7e9
"""Bytes a second of one warp: the second half of that fit."""
STEP_SECONDS = (450e-9, 730e-9, 880e-9, 1030e-9)
"""What a warp takes for 32 columns and 64 of k, by fragments_m: instructions and waits
for its own products (measured, docs/cuda.md: 45.8 us for 16 rows and 66.3 us for 32
with 14 warps and 64 steps each; the first is a guess, because there memory takes
longer, and the third lies between its neighbours)."""
PIECE_SECONDS = 2.5e-6
"""To begin and end a piece of work: first loads, and the sums of a block's warps (a
guess)."""
FURTHER_LAUNCH = 8e-6
"""Seconds for each launch after the first: 6 us of MLX's own (measured, docs/cuda.md)
and 2 of the device (a guess)."""
MODEL_ERROR = 0.06
"""What a split must gain more, as on Apple's devices."""

MOST_WARPS = (28, 20, 16, 16)
"""Warps of a block by fragments_m, unless others are asked for: more warps hide more
waits, until their registers do not hold the sums (measured, docs/cuda.md)."""
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
WEIGHTS = TILE_N * 64
"""Weights of a step."""

Way = tuple[Work, int, int]
"""Work, simdgroups_n and simdgroups_k."""


def make(problem: Problem, device: CudaDevice, wishes: Wishes) -> Plan:
    """Returns the best plan that has the wished fields.

    Raises:
        ValueError: If no plan has these fields.
    """
    if problem.invariant and problem.m != INVARIANT_ROWS:
        of_all = make(replace(problem, m=INVARIANT_ROWS), device, wishes)
        return _with_rows(of_all, problem, device, wishes)
    _check(problem, wishes)
    fragments_m = wishes.get("fragments_m", _fragments_m(problem))
    best: Way | None = None
    least: tuple[float, ...] = (inf,)
    for way in _ways(problem, fragments_m, device, wishes):
        rank = _rank(problem, fragments_m, way, device)
        if rank < least:
            best, least = way, rank
    if best is None:
        raise ValueError(
            f"reduction={wishes.get('reduction')!r} fits none of the plans that are "
            f"worth comparing; name a strategy too, such as 'split_k'"
        )
    return _plan(problem, fragments_m, best, device, wishes)


def compare(problem: Problem, device: CudaDevice, wishes: Wishes) -> Choice:
    """Returns what `make` would, with all that it was compared to."""
    chosen = make(problem, device, wishes)
    plans = {chosen: None}
    if not problem.invariant:
        fragments_m = chosen.fragments_m
        for way in _ways(problem, fragments_m, device, wishes):
            plans[_plan(problem, fragments_m, way, device, wishes)] = None
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
    """Returns what the model says about a plan of "mma"."""
    way = plan.work, plan.simdgroups_n, plan.simdgroups_k
    return _prediction(plan.problem, plan.fragments_m, way, device)


def _prediction(
    problem: Problem, fragments_m: int, way: Way, device: CudaDevice
) -> Prediction:
    work, across, along = way
    longest = work.longest  # where a minimum moves cuts, all of them are looked at
    busy = work.threadgroups - work.idle
    each = -(-busy // device.multiprocessors)  # of the fullest multiprocessor
    resident = max(min(each, MOST_WARPS[fragments_m - 1] // (across * along)), 1)
    turns = -(-each // resident)
    trips = k_tile(problem.group_size) // 64
    step_bytes = problem.weight_bytes / (problem.batch * problem.n * problem.k)
    read = each * across * longest * trips * WEIGHTS * step_bytes
    share = STATED_BANDWIDTH * device.bandwidth_gbs * 1e9 / device.multiprocessors
    rate = 1 / (1 / share + 1 / (resident * across * along * WARP_BANDWIDTH))
    steps = -(-longest // along) * trips
    # All times are a mean multiprocessor's, which the fullest one's stretch.
    mean = work.total / (device.multiprocessors * each * longest)
    sums = 8 * problem.batch * problem.m * problem.n * work.pieces / work.tiles
    met = work.is_split * sums / (device.bandwidth_gbs * 1e9)
    columns = (
        work.tiles
        // -(-problem.m // (mma.FRAGMENT_ROWS * fragments_m))
        * across
        * TILE_N
    )
    rows = -(-problem.m // mma.FRAGMENT_ROWS) * mma.FRAGMENT_ROWS
    pieces = -(-work.pieces // busy)
    return Prediction(
        memory=mean * (read / rate + met),
        issue=mean * turns * steps * STEP_SECONDS[fragments_m - 1],
        loads=0.0,
        matrix=2 * rows * columns * problem.k / (device.tflops * 1e12),
        busy=mean,
        fill=1.0,
        dispatch=turns * pieces * PIECE_SECONDS + FURTHER_LAUNCH * work.is_split,
    )


def _rank(
    problem: Problem, fragments_m: int, way: Way, device: CudaDevice
) -> tuple[float, ...]:
    """Returns what ways are compared by: time first, then the simpler one."""
    work, across, _ = way
    found = _prediction(problem, fragments_m, way, device)
    return (
        found.seconds * (1 + MODEL_ERROR * work.is_split),
        found.memory,
        STRATEGIES.index(work.strategy),
        across,
    )


def _ways(
    problem: Problem, fragments_m: int, device: CudaDevice, wishes: Wishes
) -> Iterator[Way]:
    """Yields the ways to cut a problem that have the wished fields."""
    columns = -(-problem.n // TILE_N)
    room = mma.MOST_SIMDGROUPS // wishes.get("simdgroups_k", 1)
    most = min(mma.MOST_SIMDGROUPS_N, columns, room)
    widths: Iterable[int] = range(1, most + 1)
    if "simdgroups_n" in wishes:
        widths = (wishes["simdgroups_n"],)
    for across in widths:
        for work in _works(problem, fragments_m, across, device, wishes):
            if not _can_meet(work, wishes):
                continue
            along = wishes.get("simdgroups_k")
            if along is None:
                along = _slices(problem, fragments_m, across, work, device)
            yield work, across, along


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
    fewer = along - 1
    # One fewer, where all schedulers then have as many warps, and not many fewer.
    if across * along % SCHEDULERS and not across * fewer % SCHEDULERS:
        return fewer if fewer >= 0.75 * along else along
    return along


def _fragments_m(problem: Problem) -> int:
    """Returns the fewest fragments of 8 rows with the fewest tiles down the rows."""
    fragments = -(-problem.m // mma.FRAGMENT_ROWS)
    tiles = -(-fragments // mma.FRAGMENTS_M[-1])
    return -(-fragments // tiles)


def _can_meet(work: Work, wishes: Wishes) -> bool:
    """Returns whether a work's splits, if it has any, can meet as wished."""
    wished = "reduction" in wishes and "strategy" not in wishes
    return not wished or work.is_split == (wishes["reduction"] != "none")


def _check(problem: Problem, wishes: Wishes) -> None:
    """Refuses a problem and wishes that are other kernels'."""
    reason = mma.why_not(problem)
    if reason is not None:
        raise ValueError(reason)
    expected: dict[str, Any] = {
        "kernel": "mma",
        "simdgroups_m": 1,
        "subtract": False,
        "buffers": 0,
        "loaders": 0,
    }
    given = cast(dict[str, Any], wishes)
    for name, value in expected.items():
        if given.get(name, value) != value:
            raise ValueError(
                f"{name}={given[name]!r}, expected {value!r} on a CUDA device"
            )
    if wishes.get("strategy") == "hytis":
        raise ValueError("strategy='hytis' has tiles of two widths, which mma has not")
    across, along = wishes.get("simdgroups_n", 1), wishes.get("simdgroups_k", 1)
    if min(across, along) < 1 or across * along > mma.MOST_SIMDGROUPS:
        raise ValueError(
            f"simdgroups_n={across} x simdgroups_k={along}, expected 1 to "
            f"{mma.MOST_SIMDGROUPS} simdgroups"
        )
    if wishes.get("fragments_m", 1) not in mma.FRAGMENTS_M:
        raise ValueError(
            f"fragments_m={wishes['fragments_m']} is not one of {mma.FRAGMENTS_M}"
        )


def _plan(
    problem: Problem,
    fragments_m: int,
    way: Way,
    device: CudaDevice,
    wishes: Wishes,
) -> Plan:
    work, across, along = way
    natural: Reduction = "workspace" if work.is_split else "none"
    plan = Plan(
        problem=problem,
        kernel="mma",
        tile=Tile(
            m=mma.FRAGMENT_ROWS * fragments_m,
            n=TILE_N * across,
            k=k_tile(problem.group_size),
        ),
        fragments_m=fragments_m,
        simdgroups_n=across,
        simdgroups_k=along,
        work=work,
        reduction=wishes.get("reduction", natural),
    )
    if plan.threadgroup_bytes > device.shared_bytes:
        raise ValueError(
            f"simdgroups_n={across}, simdgroups_k={along}, fragments_m={fragments_m} "
            f"need {plan.threadgroup_bytes} bytes of shared memory, more than the "
            f"{device.shared_bytes} of {device.name}"
        )
    return plan


def _with_rows(
    plan: Plan, problem: Problem, device: CudaDevice, wishes: Wishes
) -> Plan:
    """Returns an invariant plan for another number of rows: k is cut as it was."""
    fragments_m = wishes.get("fragments_m", _fragments_m(problem))
    m_tiles = -(-problem.m // (mma.FRAGMENT_ROWS * fragments_m))
    tiles = problem.batch * m_tiles * plan.n_tiles
    work = data_parallel(tiles, plan.k_tiles)
    if plan.work.strategy == "split_k":
        slices = plan.work.slices
        work = replace(
            plan.work, tiles=tiles, threadgroups=tiles * slices, slices=slices
        )
    way = work, plan.simdgroups_n, plan.simdgroups_k
    return _plan(problem, fragments_m, way, device, wishes)
