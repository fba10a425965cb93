"""The traffic of our kernels is the one that their plans promise."""

from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import strategies as st

from metal_emulator import Counters, emulated, trace
from mlx_marlin.backends import graph, planner
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import Reduction
from mlx_marlin.weights.formats import FORMATS
from support import drawn_arrays, format_cases, strategies
from support.finished_products import EVERYTHING
from support.parts_of_plans import corner
from support.profiles import drawn, sampled
from support.ragged_problems import RAGGED_BATCHES
from support.trace_mode import emulator_only

pytestmark = emulator_only


def counters(plan: Plan) -> Counters:
    """The counters of the plan's first dispatch; no access may be wrong."""
    problem = plan.problem
    x = format_cases.activations(problem.m, problem.k, dtype=problem.dtype, seed=1)
    weight = drawn_arrays.weight_of(problem, seed=0)
    arguments = format_cases.arguments(weight, problem.layout)
    product = graph.product(plan)
    return trace(lambda: mx.eval(product(x, *arguments)))[0]


def chosen(m: int, n: int = 256, k: int = 512) -> Plan:
    plan = planner.choose(Problem(m=m, n=n, k=k), strategies.KNOWN_DEVICES[0])
    assert plan.kernel == "gemm_register"
    return plan


@sampled(2, 4)
@pytest.mark.parametrize(
    ("m", "k", "times"),
    [(8, 512, 1), (9, 512, 1), (16, 512, 1), (32, 512, 2), (16, 2048, 1)],
)
def test_each_row_of_simdgroups_reads_and_multiplies_once(
    m: int, k: int, times: int
) -> None:
    plan = chosen(m, k=k)
    problem = plan.problem
    groups_bytes = 2 * problem.n * problem.groups

    found = counters(plan)

    assert plan.m_tiles * plan.simdgroups_m == times
    assert found.of("w").read_bytes == times * problem.n * problem.k // 2
    assert found.of("w").repeated_read_bytes == 0
    assert found.of("scales").read_bytes == times * groups_bytes
    assert found.of("biases").read_bytes == times * groups_bytes
    # One product of matrices for every 8 by 8 by 8.
    assert found.count("matrix") == -(-m // 8) * (problem.n // 8) * (problem.k // 8)
    assert found.count("matrix memory") == found.count("simdgroup barrier") == 0
    # Barriers come with splits and not with k.
    assert found.count("barrier") == barriers(plan)
    assert found.threadgroup_bytes == plan.threadgroup_bytes
    scratch = found.of("scratch")
    assert scratch.bank_cycles == scratch.accesses


COUNTED = (
    ("affine", 4, 64),
    ("affine", 1, 32),
    ("affine", 3, 64),
    ("affine", 6, 128),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
    ("symmetric", 5, 32),
    ("zero_point", 8, 64),
)
"""Every kind of codes, one plane and two, lanes with eight and with sixteen codes."""


@sampled(3, 8)
@pytest.mark.parametrize("m", [8, 13, 16])
@pytest.mark.parametrize(
    ("mode", "bits", "group_size", "layout"),
    [
        (mode, bits, group_size, layout)
        for mode, bits, group_size in COUNTED
        for layout in FORMATS[mode, bits].layouts
    ],
)
def test_no_format_reads_weights_twice_or_needs_more_products_barriers_or_memory(
    mode: str, bits: int, group_size: int, layout: str, m: int
) -> None:
    """The product ends inside a tile of k, if groups allow."""
    packed = layout == "marlin"
    problem = Problem(
        m=m,
        n=75 if packed or m == 13 else 64,
        k=7 * FORMATS[mode, bits].k_multiple(group_size),
        group_size=group_size,
        bits=bits,
        mode=mode,
        scale_dtype=FORMATS[mode, bits].scale_dtype("float16"),
        layout=layout,
    )
    plan = planner.choose(problem, strategies.KNOWN_DEVICES[0])
    assert plan.kernel == "gemm_register"

    found = counters(plan)

    # Tiles are stored whole along n; the last one is read to the end of k.
    words = found.of("w")
    if packed or problem.n == 64:
        assert words.read_bytes == (96 if packed else 64) * problem.k * bits // 8
        assert words.repeated_read_bytes == 0
    assert not packed or words.read_bytes / (128 * words.lines_128) >= 0.95
    # 75 columns are ten row fragments of w: those past the last are left out.
    assert found.count("matrix") == -(-m // 8) * -(-problem.n // 8) * (problem.k // 8)
    assert found.count("matrix memory") == 0
    assert found.count("barrier") == barriers(plan)
    assert found.threadgroup_bytes == plan.threadgroup_bytes


LANE_BYTES = {2: 1.8, 3: 2.3, 4: 2.8, 5: 3.3, 8: 1.3, 16: 1.8, 32: 3.5}
"""Most bytes that lanes may receive for a weight, by rows."""


@sampled(1)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("m", LANE_BYTES)
def test_lanes_receive_few_bytes_for_a_weight(m: int, layout: str) -> None:
    problem = Problem(m=m, n=256, k=512, layout=layout)
    plan = planner.choose(problem, strategies.KNOWN_DEVICES[0])

    found = counters(plan)

    scales = ["scales"] if layout == "marlin" else ["scales", "biases"]
    received = found.of("w").read_bytes
    # Four lanes have the same row of w; of x, where it is no matrix, eight the same k.
    received += 4 * sum(found.of(name).read_bytes for name in scales)
    received += (8 if plan.kernel == "gemv" else 1) * found.of("x").read_bytes
    assert all(found.of(name).repeated_read_bytes == 0 for name in ("w", "x", *scales))
    assert received / (problem.n * problem.k) <= LANE_BYTES[m]


def splits(plan: Plan) -> int:
    return sum(
        len([*plan.work.splits(threadgroup)])
        for threadgroup in range(plan.num_threadgroups)
    )


def barriers(plan: Plan) -> int:
    """One before a split is stored; one after it, but for a threadgroup's only tile."""
    return splits(plan) * (1 if plan.is_whole else 2)


def traffic_of_results(plan: Plan) -> int:
    """Returns the bytes that the splits of all tiles write."""
    problem = plan.problem
    elements = 0
    for threadgroup in range(plan.num_threadgroups):
        for split in plan.work.splits(threadgroup):
            row, col = corner(plan, split.tile)
            rows = min(plan.tile.m, problem.m - row)
            elements += rows * min(plan.columns_of(split.tile), problem.n - col)
    return elements * (4 if plan.is_split else 2)


@drawn(
    4,
    plan=strategies.runnable_plans(max_k=256, formats=strategies.ANY_FORMAT),
    seed=st.integers(0, 99),
    workers=st.integers(1, 2),
)
def test_no_plan_races_or_strays(plan: Plan, seed: int, workers: int) -> None:
    problem = plan.problem
    x = format_cases.activations(problem.m, problem.k, dtype=problem.dtype, seed=seed)
    weight = drawn_arrays.weight_of(problem, seed=seed)

    with emulated(seed=seed, workers=workers, trace=True):
        format_cases.run(plan, x, weight)


RAGGED = {
    "gemv": Problem(m=2, n=100, k=448),
    "gemv, packed": Problem(m=3, n=70, k=11 * 32, group_size=32, layout="marlin"),
    "gemm": Problem(m=11, n=100, k=448, dtype="bfloat16", scale_dtype="bfloat16"),
    "gemm, packed": Problem(m=9, n=70, k=640, group_size=128, layout="marlin"),
}


@sampled(1)
@pytest.mark.parametrize("reduction", ["workspace", "atomic"])
@pytest.mark.parametrize(
    "problem",
    [*RAGGED.values(), *RAGGED_BATCHES.values()],
    ids=[*RAGGED, *RAGGED_BATCHES],
)
def test_no_strategy_races_or_strays(problem: Problem, reduction: Reduction) -> None:
    """In trace mode; what a reduce reads is checked too."""
    x, native = drawn_arrays.arrays(problem, seed=4)
    finish = drawn_arrays.finish_arrays(problem, seed=5)
    for i, asked in enumerate((problem, replace(problem, epilogue=EVERYTHING))):
        plans = list(strategies.one_of_each(asked, reduction=reduction))
        for plan in plans[i::2]:  # each strategy once, with and without in turn
            with emulated(trace=True):
                drawn_arrays.run(plan, x, native, *finish)


@pytest.mark.slow
@pytest.mark.parametrize("m", [3, 11])
def test_every_strategy_reads_each_weight_once_for_each_row_of_tiles(m: int) -> None:
    problem = Problem(m=m, n=160, k=512)
    for plan in strategies.one_of_each(problem):
        found = counters(plan)

        assert plan.m_tiles == (1 if m == 3 else 2)
        assert found.of("w").read_bytes == plan.m_tiles * problem.code_bytes
        assert found.count("barrier") == barriers(plan)
        assert found.of("out").written_bytes == traffic_of_results(plan)
