"""The traffic of our kernels is the one that their plans promise."""

import mlx.core as mx
import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_marlin import launch, scheduler
from mlx_marlin.emulator import Counters, emulated, trace
from mlx_marlin.packing import pack
from mlx_marlin.plan import Plan
from mlx_marlin.problem import Problem

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


@pytest.mark.parametrize("m", [8, 16, 32])
@pytest.mark.parametrize("k", [512, 2048])
def test_barriers_come_with_units_and_not_with_k(m: int, k: int) -> None:
    plan = chosen(m, k=k)

    found = counters(plan)

    assert found.count("barrier") == 2 * plan.units
    assert found.count("simdgroup barrier") == 0
    assert found.threadgroup_bytes == plan.threadgroup_bytes


def test_epilogues_have_no_bank_conflicts() -> None:
    plan = chosen(8)

    scratch = counters(plan).of("scratch")

    assert scratch.bank_cycles == scratch.accesses


@given(case=strategies.cases(), seed=st.integers(0, 99), workers=st.integers(1, 2))
@settings(max_examples=12)
def test_no_plan_races_or_strays(
    case: strategies.Case, seed: int, workers: int
) -> None:
    plan, x, weight = case
    if plan.problem.layout == "marlin":
        packed = pack(*weight, group_size=plan.problem.group_size)
        weight = (packed.words, packed.scales, packed.scales)

    with emulated(seed=seed, workers=workers, trace=True):
        mx.eval(launch.product(plan)(x, *weight))
