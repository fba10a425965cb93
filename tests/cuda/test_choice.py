"""The plan that is chosen for a CUDA device."""

from dataclasses import replace

import pytest
from hypothesis import given

from mlx_marlin.backends import planner
from mlx_marlin.backends.cuda import candidates, limits
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.planning.problem import Problem
from support.cuda_strategies import DEVICES, H200, SERVED


@given(SERVED, DEVICES)
def test_the_chosen_plan_is_right_for_the_device(
    problem: Problem, gpu: CudaDevice
) -> None:
    plan = planner.choose(problem, gpu)

    assert plan.problem == problem
    assert plan.kernel in OF_CUDA
    assert plan.threadgroup_bytes <= gpu.shared_bytes
    assert planner.predict(plan, gpu).seconds > 0
    warps_k, k_tiles = plan.simdgroups_k, plan.work.total // plan.work.pieces
    if plan.kernel == "mma":
        assert k_tiles // warps_k >= candidates.LEAST_K_TILES or warps_k == 1
    else:
        assert warps_k <= -(-k_tiles * plan.tile.k // limits.STAGE_K)


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("m", [1, 8, 16, 32, 64])
def test_little_shared_memory_leaves_other_plans(m: int, layout: str) -> None:
    gpu = replace(H200, shared_bytes=48 * 1024)  # what every CUDA device has

    for n, k in ((4096, 4096), (28672, 8192), (17408, 5120)):
        plan = planner.choose(Problem(m=m, n=n, k=k, layout=layout), gpu)
        assert plan.threadgroup_bytes <= gpu.shared_bytes


@pytest.mark.parametrize(
    ("k", "n", "best"),
    [(8192, 28672, (7, 4)), (5120, 17408, (5, 4)), (4096, 4096, (1, 16))],
)
@pytest.mark.parametrize("m", [1, 8])
def test_few_rows_have_the_blocks_that_were_measured_to_be_best(
    m: int, k: int, n: int, best: tuple[int, int]
) -> None:
    problem = Problem(m=m, n=n, k=k, group_size=128, layout="marlin")

    plan = planner.choose(problem, H200)

    assert plan.strategy == "data_parallel"
    assert (plan.simdgroups_n, plan.simdgroups_k) == best


def test_few_columns_of_long_k_are_split() -> None:
    problem = Problem(m=8, n=1024, k=57344, group_size=128, layout="marlin")

    plan = planner.choose(problem, H200)

    assert plan.is_split
    assert plan.num_threadgroups > 100


@given(SERVED, DEVICES)
def test_an_invariant_product_is_cut_alike_for_any_rows(
    problem: Problem, gpu: CudaDevice
) -> None:
    asked = replace(problem, invariant=True)
    cuts = set()
    for m in (1, 8, 9, 24, 33, 64):
        plan = planner.choose(replace(asked, m=m), gpu)
        assert plan.problem.m == m
        work = plan.work
        splits = [
            (split.k_idx, split.k_tile_count, split.slot)
            for group in range(plan.num_threadgroups)
            for split in work.splits(group)
            if split.tile % plan.m_tiles == 0 and split.tile < plan.m_tiles
        ]
        cuts.add((plan.simdgroups_n, plan.simdgroups_k, *sorted(splits)))

    assert len(cuts) == 1


def test_a_comparison_begins_with_the_choice_and_can_be_shown() -> None:
    problem = Problem(m=32, n=17408, k=5120, group_size=128, layout="marlin")

    choice = planner.compare(problem, device=H200)

    assert choice.plan == planner.choose(problem, H200)
    assert choice.candidates[0].plan == choice.plan
    assert len({each.plan for each in choice.candidates}) == len(choice.candidates)
    assert "NVIDIA H200 (model, not measured); served by our" in choice.explain()
    assert choice.table().count("chosen") == 1
