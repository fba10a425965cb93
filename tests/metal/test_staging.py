"""Stages of `gemm_staged`: budgets, the order of loads, the plans that have them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.choice import candidates
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.kernel_limits import THREADGROUP_LIMIT
from mlx_marlin.backends.metal.plan import (
    BUFFERS,
    MetalPlan,
    buffer_bytes,
)
from mlx_marlin.measure import tuner
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.decompositions import data_parallel
from mlx_marlin.planning.work.tiles import Tile
from support import strategies

M3_MAX = Device.named("Apple M3 Max")
STAGES = st.integers(1, 40)
ANY_BUFFERS = st.sampled_from(BUFFERS)


@pytest.mark.parametrize(
    ("m", "n", "k", "element", "totals"),
    [
        (64, 64, 32, 2, [8192, 16384, 24576]),
        (48, 48, 32, 2, [6144, 12288, 18432]),
        (16, 64, 32, 2, [5120, 10240, 15360]),
        (64, 64, 16, 2, [4096, 8192, 12288]),
        (64, 32, 64, 2, [12288, 24576]),
        (32, 32, 64, 4, [16384, 32768]),
        (64, 0, 32, 2, [4096, 8192, 12288]),  # x alone
    ],
)
def test_a_plan_has_as_many_buffers_as_fit(
    m: int, n: int, k: int, element: int, totals: list[int]
) -> None:
    size = buffer_bytes(m, n, k, element)

    fitting = [count for count in BUFFERS if count * size <= THREADGROUP_LIMIT]
    assert totals == [count * size for count in fitting]


PROBLEM = Problem(m=64, n=256, k=512, group_size=32)
PLAN = MetalPlan(
    problem=PROBLEM,
    kernel="gemm_staged",
    tile=Tile(m=64),
    fragments_m=2,
    simdgroups_m=4,
    work=data_parallel(8, 8),
    buffers=2,
)


def test_a_plan_has_the_memory_of_its_buffers_or_of_the_scratch_they_share() -> None:
    assert PLAN.stage_bytes == buffer_bytes(64, 32, 32, 2) == 6144
    assert PLAN.threadgroup_bytes == 12288
    assert replace(PLAN, buffers=3).threadgroup_bytes == 18432
    # 64 rows of 36 floats.
    assert replace(PLAN, buffers=1).threadgroup_bytes == 9216
    assert replace(PLAN, simdgroups_k=2).threadgroup_bytes == 24576


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"buffers": 0}, "buffers=0 is not one of"),
        ({"buffers": 4}, "buffers=4 is not one of"),
        ({"loaders": -1}, "loaders=-1 must be at least 0"),
        ({"buffers": 1, "loaders": 1}, "loaders=1 would wait with buffers=1"),
        ({"loaders": 5}, "and loaders=5 is more than 8 simdgroups"),
        (
            {"buffers": 3, "simdgroups_k": 2},
            "buffers=3 of 12288 bytes make 36864 bytes of threadgroup memory",
        ),
        ({"kernel": "gemm_register"}, "gemm_register has buffers=0 and loaders=0"),
        (
            {"kernel": "gemm_register", "buffers": 0, "loaders": 1},
            "got buffers=0, loaders=1",
        ),
    ],
)
def test_a_plan_refuses_what_no_threadgroup_can_have(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PLAN, **fields)


def test_a_plan_says_its_buffers_and_loaders() -> None:
    assert PLAN.variant == "gemm_staged 16 rows, 4x1x1 simdgroups, 2 buffers"
    with_loader = replace(PLAN, buffers=3, loaders=1)
    assert with_loader.variant.endswith("3 buffers, 1 loader")
    assert "4x1 simdgroups (m x k), 3 buffers, 1 loader, " in with_loader.explain()
    assert with_loader.threads == 160


PROBLEMS = strategies.problems(max_m=300, max_n=4000, formats=strategies.ANY_FORMAT)


@given(PROBLEMS, strategies.devices(), ANY_BUFFERS, st.integers(0, 2))
def test_any_product_can_be_staged_on_a_wish(
    problem: Problem, chip: Device, buffers: int, loaders: int
) -> None:
    overrides = PlanOverrides(kernel="gemm_staged", buffers=buffers)
    if buffers > 1:
        overrides["loaders"] = loaders

    plan = planner.make(problem, device=chip, **overrides)

    assert (plan.kernel, plan.buffers) == ("gemm_staged", buffers)
    assert plan.loaders == (loaders if buffers > 1 else 0)
    assert planner.predict(plan, chip).seconds > 0


@given(PROBLEMS, strategies.devices())
def test_nothing_is_staged_without_a_wish(problem: Problem, chip: Device) -> None:
    kernels = {each.plan.kernel for each in candidates(problem, chip, {})}

    assert "gemm_staged" not in kernels


def test_the_tuner_tries_it_where_several_simdgroups_decode_the_same_weights() -> None:
    problem = Problem(m=64, n=4096, k=4096)
    found = planner.experiments(problem, M3_MAX)

    assert {each.kernel for each in found} == {"gemm_staged"}
    assert {each.buffers for each in found} >= {1, 2}
    assert {each.loaders for each in found} == {0, 1}
    arms = tuner.arms(problem, M3_MAX, times_stock=False)
    assert {*found} < {*arms}
    assert arms[0] == planner.choose(problem, M3_MAX)
    assert len({tuner.name(arm) for arm in arms}) == len(arms)
    for m in (1, 8, 16):
        assert not planner.experiments(replace(problem, m=m), M3_MAX)
    assert not planner.experiments(replace(problem, invariant=True), M3_MAX)


def test_the_model_charges_barriers_and_memory() -> None:
    seconds = {
        each.buffers: planner.predict(each, M3_MAX)
        for each in strategies.stagings(
            replace(PLAN, kernel="gemm_register", buffers=0)
        )
        if not each.loaders
    }

    assert seconds[1].issue > seconds[2].issue
    assert seconds[3].fill <= seconds[2].fill <= seconds[1].fill
