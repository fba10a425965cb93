"""What the tests draw: problems, devices and plans, small and ragged sizes often."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

from hypothesis import assume
from hypothesis import strategies as st

from mlx_marlin.backends.metal import device
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.kernel_limits import (
    FRAGMENTS_M,
    GEMV_ROWS,
    MAX_SIMDGROUPS,
    THREE_FRAGMENTS_M,
)
from mlx_marlin.backends.metal.plan import BUFFERS, MetalPlan
from mlx_marlin.planning.epilogue import ACTIVATIONS, PLAIN, Epilogue
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import MOST_ELEMENTS, Problem, largest_array
from mlx_marlin.planning.work.decompositions import data_parallel
from mlx_marlin.planning.work.tiles import FRAGMENT, Kernel, Reduction, Tile, k_tile
from mlx_marlin.planning.work.work import (
    MOST_GROUPS,
    PARTITIONS,
    STRATEGIES,
    Strategy,
    Work,
)
from mlx_marlin.weights.formats import CHANNEL, DTYPE_BYTES, FORMATS, GROUPS, LAYOUTS
from support import format_cases

EDGES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128)
"""Sizes around the borders of fragments and tiles."""

TWO_TILES: tuple[Strategy, ...] = ("hybrid", "hytis")
"""Strategies that leave tiles after the whole ones."""
ONE_TILE_SIZE: tuple[Strategy, ...] = STRATEGIES[:-1]
"""All but `hytis`, whose number of tiles depends on the width of the wide ones."""

Shape = tuple[int, ...]

DTYPES = st.sampled_from([*DTYPE_BYTES])
ANY_LAYOUT = st.sampled_from(LAYOUTS)

Grouped = tuple[str, int, int]
"""A mode, the bits of a code and a group size."""
FOUR_BITS = st.sampled_from([("affine", 4, group_size) for group_size in GROUPS])
"""What most weights are; a test of all formats takes longer, and asks for them."""
ANY_FORMAT: st.SearchStrategy[Grouped] = st.sampled_from(
    sorted({mode for mode, _ in FORMATS})
).flatmap(
    lambda mode: st.sampled_from(
        [each for each in format_cases.GROUPED if each[0] == mode]
    )
)
"""Every scheme as often as the others, though some have more widths and groups."""

NO_EPILOGUE = st.just(PLAIN)
ONE_WEIGHT = st.just(1)
BATCHES = st.integers(2, 5)
EPILOGUES = st.builds(
    Epilogue,
    bias=st.booleans(),
    activation=st.sampled_from(ACTIVATIONS),
    multiply=st.booleans(),
    residual=st.booleans(),
)


def sizes(most: int) -> st.SearchStrategy[int]:
    """Draws 1 to `most`, often beside the border of a fragment or tile."""
    edges = [edge for edge in EDGES if edge <= most]
    return st.sampled_from(edges) | st.integers(1, most)


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    max_m: int = 70,
    max_n: int = 200,
    max_k: int = 2048,
    formats: st.SearchStrategy[Grouped] = FOUR_BITS,
    dtypes: st.SearchStrategy[str] = DTYPES,
    layouts: st.SearchStrategy[str] = ANY_LAYOUT,
    epilogues: st.SearchStrategy[Epilogue] = NO_EPILOGUE,
    batches: st.SearchStrategy[int] = ONE_WEIGHT,
) -> Problem:
    """Draws a problem; `max_k` is at least 256, the largest group."""
    mode, bits, group_size = draw(formats)
    known = FORMATS[mode, bits]
    possible = format_cases.layouts_of(mode, bits, group_size)
    step = format_cases.step_of(mode, bits, group_size)
    k = step * draw(sizes(max_k // step))
    dtype = draw(dtypes)
    # MLX promotes x to its scales' dtype: only float32 meets narrower ones.
    scale_dtype = draw(DTYPES) if dtype == "float32" else dtype
    m, n, batch = draw(sizes(max_m)), draw(sizes(max_n)), draw(batches)
    assume(largest_array(m, n, k, bits, batch) < MOST_ELEMENTS)
    return Problem(
        m=m,
        n=n,
        k=k,
        batch=batch,
        group_size=k if group_size == CHANNEL else group_size,
        bits=bits,
        mode=mode,
        dtype=dtype,
        scale_dtype=known.scale_dtype(scale_dtype),
        layout=draw(layouts.filter(lambda layout: layout in possible)),
        epilogue=draw(epilogues),
    )


KNOWN_DEVICES: tuple[Device, ...] = tuple(
    variant for variants in device.chips().values() for variant in variants
)
"""Every chip of the table."""


def devices() -> st.SearchStrategy[Device]:
    """Draws a known chip, the default, or one that nobody has built yet."""
    imagined = st.builds(
        Device,
        name=st.just("imagined"),
        variant=st.just("imagined"),
        generation=st.sampled_from(["unknown", "M1", "M3", "M5", "M9"]),
        tier=st.just("unknown"),
        cores=st.integers(1, 200),
        bandwidth_gbs=st.floats(10, 2000),
        clock_ghz=st.floats(0.5, 4),
    )
    return st.sampled_from((*KNOWN_DEVICES, device.DEFAULT)) | imagined


@st.composite
def works(
    draw: st.DrawFn,
    *,
    tiles: int | None = None,
    k_tiles: int | None = None,
    strategies: tuple[Strategy, ...] = STRATEGIES,
) -> Work:
    """Draws any valid way to cut tiles of k tiles, sensible or not."""
    tiles = tiles or draw(sizes(40))
    k_tiles = k_tiles or draw(sizes(64))
    several = [each for each in strategies if tiles > 1 or each not in TWO_TILES]
    strategy = draw(st.sampled_from(several))
    if strategy == "data_parallel":
        return data_parallel(tiles, k_tiles)
    if strategy == "hytis":
        whole = draw(st.integers(1, tiles - 1))
        return replace(data_parallel(tiles, k_tiles), strategy="hytis", whole=whole)
    if strategy in ("stream_k", "hybrid"):
        return draw(_streams(strategy, tiles, k_tiles))
    slices = draw(st.integers(1, k_tiles))
    units = tiles * slices
    # Also more threadgroups than units: the rest must idle.
    threadgroups = draw(st.integers(1, 2 * units + 3) | st.just(units))
    return Work(
        strategy=strategy,
        tiles=tiles,
        k_tiles=k_tiles,
        threadgroups=units if strategy == "split_k" else threadgroups,
        slices=slices,
        partition=(
            draw(st.sampled_from(PARTITIONS)) if strategy == "stripe" else "balanced"
        ),
    )


@st.composite
def _streams(draw: st.DrawFn, strategy: Strategy, tiles: int, k_tiles: int) -> Work:
    """Draws ranges that end anywhere, in groups of any number that divides them."""
    whole = draw(st.integers(1, tiles - 1)) if strategy == "hybrid" else 0
    tail = tiles - whole
    groups = draw(
        st.sampled_from(
            [each for each in range(1, MOST_GROUPS + 1) if tail % each == 0]
        )
    )
    each = draw(st.integers(1, 2 * (tail * k_tiles // groups) + 3))
    return Work(
        strategy=strategy,
        tiles=tiles,
        k_tiles=k_tiles,
        threadgroups=whole + groups * each,
        whole=whole,
        slices=k_tiles,
        minimum=draw(st.integers(1, k_tiles + 2)),
        groups=groups,
    )


@st.composite
def plans(
    draw: st.DrawFn,
    *,
    of: st.SearchStrategy[Problem] | None = None,
    atomic: bool = True,
) -> Plan:
    """Draws any valid plan of a problem, sensible or not."""
    problem = draw(problems() if of is None else of)
    fragments_m, simdgroups_m = draw(_rows(problem))
    rows = FRAGMENT * fragments_m * simdgroups_m if fragments_m else problem.m
    tile = Tile(m=rows, k=k_tile(problem.group_size))
    m_tiles, n_tiles = -(-problem.m // tile.m), -(-problem.n // tile.n)
    k_tiles = -(-problem.k // tile.k)
    along_k = MAX_SIMDGROUPS // simdgroups_m
    # First the width, or wide tiles would hardly ever be drawn.
    widths = _widths(along_k, n_tiles) if problem.batch == 1 else [1]
    width = draw(st.sampled_from(widths))
    simdgroups_k = width * draw(st.integers(1, along_k // width))
    if width > 1:
        columns = draw(st.integers(1, (n_tiles - 1) // width))
        tiles = m_tiles * (columns + n_tiles - columns * width)
        work = replace(
            data_parallel(tiles, k_tiles), strategy="hytis", whole=columns * m_tiles
        )
    else:
        tiles = problem.batch * m_tiles * n_tiles
        work = draw(works(tiles=tiles, k_tiles=k_tiles, strategies=ONE_TILE_SIZE))
    plan = MetalPlan(
        problem=problem,
        kernel="gemm_register" if fragments_m else "gemv",
        tile=tile,
        fragments_m=fragments_m,
        simdgroups_m=simdgroups_m,
        simdgroups_n=width,
        simdgroups_k=simdgroups_k,
        work=work,
        reduction=(
            draw(st.sampled_from(["workspace", "workspace", "atomic"][: 2 + atomic]))
            if work.is_split
            else "none"
        ),
        operand=draw(operands(problem, "gemm_register" if fragments_m else "gemv")),
    )
    if not fragments_m or draw(st.integers(0, 2)):
        return plan
    return draw(st.sampled_from([*stagings(plan)] or [plan]))


def operands(problem: Problem, kernel: Kernel) -> st.SearchStrategy[CodeForm]:
    """Draws a form of codes that a kernel can multiply."""
    return st.sampled_from(format_cases.operands_of(problem, kernel))


def stagings(
    plan: Plan,
    ways: Iterable[tuple[int, int]] = (*product(BUFFERS, range(MAX_SIMDGROUPS)),),
) -> Iterator[Plan]:
    """Makes plans of `gemm_staged` of one of `gemm_register`."""
    for buffers, loaders in ways:
        with suppress(ValueError):
            yield replace(plan, kernel="gemm_staged", buffers=buffers, loaders=loaders)


def _widths(along_k: int, n_tiles: int) -> list[int]:
    """Returns the widths, in tiles, that a wide tile can have; 1 is no wide tile."""
    return [1, *(each for each in (2, 4, 8) if each <= along_k and each < n_tiles)]


def _rows(problem: Problem) -> st.SearchStrategy[tuple[int, int]]:
    """Draws (fragments_m, simdgroups_m); no fragments means gemv."""
    matrices = st.tuples(st.sampled_from(FRAGMENTS_M), st.integers(1, MAX_SIMDGROUPS))
    if -(-problem.m // FRAGMENT) == THREE_FRAGMENTS_M:
        matrices |= st.just((THREE_FRAGMENTS_M, 1))
    if problem.m > GEMV_ROWS[problem.dtype]:
        return matrices
    return st.just((0, 1)) | matrices


def runnable_plans(
    *,
    max_k: int = 512,
    formats: st.SearchStrategy[Grouped] = FOUR_BITS,
    dtypes: st.SearchStrategy[str] = DTYPES,
    epilogues: st.SearchStrategy[Epilogue] = NO_EPILOGUE,
    atomic: bool = True,
    batches: st.SearchStrategy[int] = ONE_WEIGHT,
) -> st.SearchStrategy[Plan]:
    """Draws plans small enough to run by the hundred."""
    of = problems(
        max_m=70,
        max_n=100,
        max_k=max_k,
        formats=formats,
        dtypes=dtypes,
        epilogues=epilogues,
        batches=batches,
    )
    return plans(of=of, atomic=atomic)


def one_of_each(problem: Problem, *, reduction: Reduction = "workspace") -> list[Plan]:
    """Makes plans of every strategy, ragged where the strategy allows."""
    rows = problem.m if problem.m <= GEMV_ROWS[problem.dtype] else FRAGMENT
    tile = Tile(m=rows, k=k_tile(problem.group_size))
    m_tiles, n_tiles = -(-problem.m // tile.m), -(-problem.n // tile.n)
    body = MetalPlan(
        problem=problem,
        kernel="gemv" if rows == problem.m else "gemm_register",
        tile=tile,
        fragments_m=int(rows != problem.m),
        simdgroups_k=4,
        work=data_parallel(problem.batch * m_tiles * n_tiles, -(-problem.k // tile.k)),
        operand="exact",
    )
    return [
        body,
        *([_with_wide_tiles(body)] if problem.batch == 1 else []),
        *(
            replace(body, work=work, reduction=reduction if work.is_split else "none")
            for work in _cut(body.work.tiles, body.k_tiles)
        ),
    ]


def _with_wide_tiles(body: Plan) -> Plan:
    columns = (body.n_tiles - 1) // 2
    work = data_parallel(body.m_tiles * (body.n_tiles - columns), body.k_tiles)
    work = replace(work, strategy="hytis", whole=body.m_tiles * columns)
    return replace(body, work=work, simdgroups_n=2)


def _cut(tiles: int, k_tiles: int) -> list[Work]:
    """Cuts tiles of at least three k tiles in every way that splits them."""
    split_k = Work(
        strategy="split_k",
        tiles=tiles,
        k_tiles=k_tiles,
        threadgroups=3 * tiles,
        slices=3,
    )
    stripe = replace(split_k, strategy="stripe", threadgroups=tiles + 2)
    stream = replace(stripe, strategy="stream_k", slices=k_tiles)
    groups = max(each for each in range(1, MOST_GROUPS + 1) if tiles % each == 0)
    return [
        split_k,
        stripe,
        replace(stripe, partition="ceil"),
        stream,
        replace(stream, groups=groups, threadgroups=groups * (tiles // groups + 1)),
        replace(stream, minimum=2, threadgroups=2 * tiles - 1),
        replace(stream, strategy="hybrid", whole=tiles // 2),
    ]


@st.composite
def broadcast(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """Draws shapes of x without k and of w before n, in any way that MLX broadcasts."""
    rank = draw(st.integers(0, 3))
    whole = [draw(st.integers(1, 3)) for _ in range(rank)]

    def some() -> list[int]:
        shape = [draw(st.sampled_from([1, size])) for size in whole]
        return shape[draw(st.integers(0, rank)) :]

    x = some()
    if not x and draw(st.booleans()):
        return (), tuple(some())
    return (*x, draw(st.integers(1, 9))), tuple(some())
