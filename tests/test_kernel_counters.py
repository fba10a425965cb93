"""The traffic of our kernels is the one that their plans promise."""

from dataclasses import replace

import mlx.core as mx
import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_marlin import launch, scheduler
from mlx_marlin.emulator import Counters, emulated, trace
from mlx_marlin.packing import pack
from mlx_marlin.plan import Plan, Reduction
from mlx_marlin.problem import Epilogue, Problem

pytestmark = pytest.mark.skipif(
    launch.backend() != "emulator", reason="the emulator does not run here"
)


def counters(plan: Plan) -> Counters:
    """The counters of the plan's first dispatch; no access may be wrong."""
    x, native = strategies.arrays(plan.problem, seed=0)
    product = launch.product(plan)
    return trace(lambda: mx.eval(product(x, *native)))[0]


def chosen(m: int, n: int = 256, k: int = 512) -> Plan:
    plan = scheduler.choose(Problem(m=m, n=n, k=k), strategies.KNOWN_DEVICES[0])
    assert plan.kernel == "gemm_register"
    return plan


@pytest.mark.parametrize(("m", "times"), [(8, 1), (12, 1), (16, 1), (32, 2)])
def test_weights_are_read_once_by_each_row_of_simdgroups(m: int, times: int) -> None:
    plan = chosen(m)
    problem = plan.problem

    found = counters(plan).of("w")

    assert plan.m_tiles * plan.simdgroups_m == times
    assert found.read_bytes == times * problem.n * problem.k // 2
    assert found.repeated_read_bytes == 0


@pytest.mark.parametrize("m", [8, 16, 32])
def test_scales_and_biases_are_read_as_often_as_weights(m: int) -> None:
    plan = chosen(m)
    problem = plan.problem
    groups_bytes = 2 * problem.n * problem.groups

    found = counters(plan)

    times = plan.m_tiles * plan.simdgroups_m
    assert found.of("scales").read_bytes == times * groups_bytes
    assert found.of("biases").read_bytes == times * groups_bytes


@pytest.mark.parametrize("m", [8, 9, 16, 32])
def test_there_is_one_matrix_product_for_every_8_by_8_by_8(m: int) -> None:
    plan = chosen(m)
    problem = plan.problem
    rows = plan.m_tiles * plan.tile.m // 8

    found = counters(plan)

    assert rows == -(-m // 8)
    assert found.count("matrix") == rows * (problem.n // 8) * (problem.k // 8)
    assert found.count("matrix memory") == 0


def splits(plan: Plan) -> int:
    return sum(
        len([*plan.work.splits(threadgroup)])
        for threadgroup in range(plan.num_threadgroups)
    )


@pytest.mark.parametrize("m", [8, 16, 32])
@pytest.mark.parametrize("k", [512, 2048])
def test_barriers_come_with_splits_and_not_with_k(m: int, k: int) -> None:
    plan = chosen(m, k=k)

    found = counters(plan)

    assert found.count("barrier") == 2 * splits(plan)
    assert found.count("simdgroup barrier") == 0
    assert found.threadgroup_bytes == plan.threadgroup_bytes


def test_epilogues_have_no_bank_conflicts() -> None:
    plan = chosen(8)

    scratch = counters(plan).of("scratch")

    assert scratch.bank_cycles == scratch.accesses


@pytest.mark.parametrize("m", [3, 11])
def test_every_strategy_reads_each_weight_once_for_each_row_of_tiles(m: int) -> None:
    problem = Problem(m=m, n=160, k=512)
    for plan in strategies.one_of_each(problem):
        found = counters(plan)

        assert plan.m_tiles == (1 if m == 3 else 2)
        assert found.of("w").read_bytes == plan.m_tiles * problem.code_bytes
        assert found.count("barrier") == 2 * splits(plan)
        slots = found.of("out").written_bytes
        assert slots == traffic_of_results(plan)


def traffic_of_results(plan: Plan) -> int:
    """Returns the bytes that the splits of all tiles write."""
    problem = plan.problem
    elements = 0
    for threadgroup in range(plan.num_threadgroups):
        for split in plan.work.splits(threadgroup):
            row, col = plan.corner(split.tile)
            rows = min(plan.tile.m, problem.m - row)
            elements += rows * min(plan.columns_of(split.tile), problem.n - col)
    return elements * (4 if plan.is_split else 2)


@given(case=strategies.cases(), seed=st.integers(0, 99), workers=st.integers(1, 2))
@settings(max_examples=12)
def test_no_plan_races_or_strays(
    case: strategies.Case, seed: int, workers: int
) -> None:
    plan, x, native = case

    with emulated(seed=seed, workers=workers, trace=True):
        mx.eval(launch.product(plan)(x, *stored(plan, native)))


RAGGED = {
    "gemv": Problem(m=2, n=100, k=448),
    "gemv, packed": Problem(m=3, n=70, k=11 * 32, group_size=32, layout="marlin"),
    "gemm": Problem(m=11, n=100, k=448, dtype="bfloat16", scale_dtype="bfloat16"),
    "gemm, packed": Problem(m=9, n=70, k=640, group_size=128, layout="marlin"),
}


@pytest.mark.parametrize("reduction", ["workspace", "atomic"])
@pytest.mark.parametrize("problem", RAGGED.values(), ids=RAGGED)
def test_no_strategy_races_or_strays(problem: Problem, reduction: Reduction) -> None:
    """In trace mode; what a reduce reads is checked too."""
    epilogue = Epilogue(bias=True, activation="silu", multiply=True, residual=True)
    x, native = strategies.arrays(problem, seed=4)
    finish = strategies.finish_arrays(problem, seed=5)
    for fused in (False, True):
        asked = replace(problem, epilogue=epilogue) if fused else problem
        for plan in strategies.one_of_each(asked, reduction=reduction):
            weight = stored(plan, native)
            with emulated(trace=True):
                y = launch.product(plan)(x, *weight, *(finish if fused else ()))
                mx.eval(y)


def stored(plan: Plan, native: strategies.Native) -> strategies.Native:
    """Packs a weight if the plan wants it so."""
    if plan.problem.layout == "mlx":
        return native
    packed = pack(*native, group_size=plan.problem.group_size)
    return packed.words, packed.scales, packed.scales
