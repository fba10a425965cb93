"""Drawn problems and plans for CUDA devices, and what a plan multiplies."""

from collections import Counter
from itertools import product

from hypothesis import strategies as st

from mlx_marlin.backends.cuda import device, limits
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import Kernel, Tile, k_tile
from mlx_marlin.planning.work.work import STRATEGIES, Strategy
from support.parts_of_plans import corner, k_range
from support.strategies import ANY_FORMAT, BATCHES, ONE_WEIGHT, problems, works

H200 = CudaDevice.named("NVIDIA H200")

DEVICES = st.sampled_from((*device.gpus().values(), device.DEFAULT))

OURS: tuple[Strategy, ...] = tuple(each for each in STRATEGIES if each != "hytis")

HALVES = st.sampled_from(limits.DTYPES)

SERVED = problems(
    max_m=70,
    formats=ANY_FORMAT,
    dtypes=HALVES,
    batches=ONE_WEIGHT | BATCHES,
).filter(lambda problem: limits.why_not(problem) is None)

SMALL = problems(max_m=40, max_n=300, max_k=768, dtypes=HALVES)

PACKED = problems(
    max_m=140, max_n=300, max_k=768, dtypes=HALVES, layouts=st.just("marlin")
)


@st.composite
def mma_plans(draw: st.DrawFn) -> Plan:
    """Draws any valid plan of "mma", sensible or not."""
    tiles_n = draw(st.integers(1, limits.MOST_SIMDGROUPS_N))
    fields = {
        "fragments_m": draw(st.sampled_from(limits.FRAGMENTS_M)),
        "simdgroups_n": tiles_n,
        "simdgroups_k": draw(st.integers(1, limits.MOST_SIMDGROUPS // tiles_n)),
    }
    return draw(plans_with("mma", draw(SMALL), fields))


@st.composite
def staged_plans(draw: st.DrawFn) -> Plan:
    """Draws any valid plan of a kernel with stages of x, sensible or not."""
    kernel = draw(st.sampled_from(("mma_staged", "wgmma")))
    traits = limits.PIPELINED[kernel]
    fragments_m = draw(st.sampled_from(traits.fragments_m))
    tiles_n = draw(st.integers(1, limits.MOST_SIMDGROUPS_N))
    columns = -(-tiles_n // traits.together) * traits.together
    most = (traits.most_simdgroups - 4) // columns
    room = (limits.SHARED_LIMIT - limits.BARRIER_BYTES) // limits.stage_bytes(
        8 * fragments_m
    )
    blocks = [
        (warps_k, buffers)
        for warps_k in range(1, most + 1)
        for buffers in limits.buffers_of(fragments_m, warps_k)
        if buffers <= room
    ]
    warps_k, buffers = draw(st.sampled_from(blocks))
    fields = {
        "fragments_m": fragments_m,
        "simdgroups_n": tiles_n,
        "simdgroups_k": warps_k,
        "buffers": buffers,
        "loaders": 4,
    }
    return draw(plans_with(kernel, draw(PACKED), fields))


@st.composite
def plans_with(
    draw: st.DrawFn, kernel: Kernel, problem: Problem, fields: dict[str, int]
) -> Plan:
    """Draws a plan of a kernel that has these fields, its work cut in any way."""
    tile = Tile(
        m=8 * fields["fragments_m"],
        n=32 * fields["simdgroups_n"],
        k=k_tile(problem.group_size),
    )
    m_tiles, n_tiles = -(-problem.m // tile.m), -(-problem.n // tile.n)
    work = draw(
        works(
            tiles=problem.batch * m_tiles * n_tiles,
            k_tiles=-(-problem.k // tile.k),
            strategies=OURS,
        )
    )
    return CudaPlan(
        problem=problem,
        kernel=kernel,
        tile=tile,
        work=work,
        reduction="workspace" if work.is_split else "none",
        **fields,
    )


PLANS = mma_plans() | staged_plans()


def covered(plan: Plan) -> Counter[tuple[int, int, int]]:
    """Returns how often each (row, block of 32 columns, 32 of k) is multiplied."""
    problem = plan.problem
    seen: Counter[tuple[int, int, int]] = Counter()
    for threadgroup in range(plan.num_threadgroups):
        for split in plan.work.splits(threadgroup):
            row, col = corner(plan, split.tile)
            last = min(col + plan.columns_of(split.tile), problem.n)
            seen.update(
                product(
                    range(row, min(row + plan.tile.m, problem.m)),
                    range(col, last),
                    range(*k_range(plan, split), 32),
                )
            )
    return seen
