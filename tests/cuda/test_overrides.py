"""Plans for CUDA devices with overrides: kept, or refused with a reason."""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.backends import planner
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.cli.main import main
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import Kernel
from mlx_marlin.planning.work.work import Strategy
from support.cuda_strategies import DEVICES, H200, OURS, SERVED, SMALL, covered
from support.profiles import drawn


@given(SERVED, DEVICES, st.sampled_from(OURS))
def test_every_strategy_can_be_had(
    problem: Problem, gpu: CudaDevice, strategy: Strategy
) -> None:
    tiles = problem.batch * -(-problem.m // 32) * -(-problem.n // 256)
    if strategy == "hybrid" and tiles < 2:
        return

    plan = planner.make(problem, device=gpu, strategy=strategy)

    assert plan.strategy == strategy


def test_kernels_and_widths_with_too_few_tiles_leave_it_to_others() -> None:
    one = Problem(m=64, n=64, k=1024, layout="marlin")  # of wgmma's

    plan = planner.make(one, device=H200, strategy="hybrid")

    assert (plan.kernel, plan.n_tiles * plan.m_tiles) != ("wgmma", 1)
    with pytest.raises(ValueError, match="hybrid with 1 tiles"):
        planner.make(replace(one, n=32), device=H200, kernel="wgmma", strategy="hybrid")


@drawn(
    18,
    problem=SMALL,
    strategy=st.sampled_from(OURS),
    tiles_n=st.integers(1, 8),
    warps_k=st.integers(1, 2),
)
def test_wished_plans_cover_their_product(
    problem: Problem, strategy: Strategy, tiles_n: int, warps_k: int
) -> None:
    if strategy == "hybrid" and problem.n <= 32 * tiles_n:
        return

    plan = planner.make(
        problem,
        device=H200,
        strategy=strategy,
        simdgroups_n=tiles_n,
        simdgroups_k=warps_k,
        fragments_m=2,
    )

    assert (plan.simdgroups_n, plan.simdgroups_k) == (tiles_n, warps_k)
    assert plan.tile.m == 16
    every = product(range(problem.m), range(problem.n), range(0, problem.k, 32))
    assert covered(plan) == Counter(every)


LARGE = Problem(m=16, n=28672, k=8192, group_size=128, layout="marlin")


@pytest.mark.parametrize(
    ("kernel", "warps_k"),
    [
        *product(["mma"], [1, 3, 5, 9, 16, 28]),
        *product(["mma_staged", "wgmma"], [1, 2, 3, 4, 6]),
    ],
)
def test_wished_warps_along_k_leave_room_for_the_tiles(
    kernel: Kernel, warps_k: int
) -> None:
    plan = planner.make(LARGE, device=H200, kernel=kernel, simdgroups_k=warps_k)

    assert plan.simdgroups_k == warps_k
    assert plan.simdgroups_n >= 1
    most = {"mma": 28, "mma_staged": 32, "wgmma": 28}
    assert plan.simdgroups <= most[kernel]


def test_wishes_about_work_are_kept() -> None:
    problem = Problem(m=8, n=4096, k=4096, group_size=128)

    split = planner.make(problem, device=H200, strategy="split_k", k_parallel=4)
    stream = planner.make(
        problem, device=H200, strategy="stream_k", num_threadgroups=77
    )

    assert split.work.slices == 4
    assert stream.num_threadgroups == 77
    assert stream.needs_second_pass
    for buffers in (4, 8, 12):
        plan = planner.make(
            LARGE, device=H200, kernel="wgmma", buffers=buffers, simdgroups_k=1
        )
        assert plan.buffers == buffers


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"kernel": "gemv"}, "kernel='gemv' is not one of CUDA's"),
        ({"simdgroups_m": 2}, "simdgroups_m=2, expected 1"),
        ({"kernel": "mma", "loaders": 4}, "loaders=4, expected 0"),
        ({"kernel": "mma", "buffers": 4}, "buffers=4, expected 0"),
        ({"buffers": 4}, "buffers=4, expected 0"),
        ({"kernel": "wgmma", "loaders": 2}, "loaders=2, expected 4"),
        ({"kernel": "mma_staged", "loaders": 0}, "loaders=0, expected 4"),
        ({"strategy": "hytis"}, "two widths, which mma has not"),
        ({"kernel": "wgmma", "strategy": "hytis"}, "two widths, which wgmma has not"),
        ({"fragments_m": 8}, "fragments_m=8 is not one of"),
        ({"kernel": "mma", "fragments_m": 6}, "fragments_m=6 is not one of"),
        ({"kernel": "wgmma", "fragments_m": 1}, "fragments_m=1 is not one of"),
        ({"kernel": "mma_staged", "fragments_m": 6}, "fragments_m=6 is not one of"),
        ({"simdgroups_n": 9}, "simdgroups_n=9"),
        ({"simdgroups_n": 0}, "simdgroups_n=0"),
        ({"simdgroups_k": 0}, "simdgroups_k=0"),
        ({"simdgroups_k": 29}, "simdgroups_k=29"),
        ({"simdgroups_n": 4, "simdgroups_k": 8}, "simdgroups_n=4 x simdgroups_k=8"),
        ({"kernel": "wgmma", "simdgroups_k": 7}, "simdgroups_k=7|at most 28"),
        (
            {"kernel": "wgmma", "simdgroups_n": 5, "simdgroups_k": 4},
            "make 36 simdgroups",
        ),
        ({"kernel": "wgmma", "buffers": 3}, "buffers=3 is not one of"),
        ({"kernel": "mma_staged", "buffers": 3}, "buffers=3 is not one of"),
        ({"reduction": "atomic", "strategy": "split_k"}, "no atomic sums"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(overrides: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        planner.make(LARGE, device=H200, **overrides)


def test_apples_chips_have_no_such_kernel() -> None:
    with pytest.raises(ValueError, match="others need another device"):
        planner.make(Problem(m=8, n=512, k=1024), kernel="mma")
    with pytest.raises(ValueError, match="others need another device"):
        planner.compare(Problem(m=8, n=512, k=1024), kernel="mma")


@pytest.mark.parametrize(
    ("sizes", "name", "overrides", "found"),
    [
        ((100, 512, 512), "L40S", {"simdgroups_k": 3}, 3),
        ((64, 4096, 4096), "RTX 4090", {"simdgroups_k": 14}, 14),
        ((100, 512, 1024), "H200", {"kernel": "mma_staged", "buffers": 8}, None),
    ],
)
def test_what_one_block_has_no_room_for_another_has(
    sizes: tuple[int, int, int], name: str, overrides: dict[str, Any], found: int | None
) -> None:
    m, n, k = sizes
    asked = Problem(m=m, n=n, k=k, group_size=128, layout="marlin")
    gpu = CudaDevice.named(name)

    plan = planner.make(asked, device=gpu, **overrides)

    assert found in (None, plan.simdgroups_k)
    assert plan.buffers == overrides.get("buffers", 0)
    assert planner.compare(asked, device=gpu, **overrides).plan == plan


def test_a_block_that_a_device_has_no_memory_for_is_refused() -> None:
    problem = Problem(m=32, n=4096, k=4096, layout="marlin")
    small = CudaDevice.named("RTX 4090")

    with pytest.raises(ValueError, match=r"110592 bytes.*more than the 101376 of"):
        planner.make(problem, device=small, simdgroups_n=8, simdgroups_k=3)


def test_the_command_line_names_its_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    for kernel in OF_CUDA:
        asked = f"plan 32 4096 4096 --layout marlin --chip H200 --kernel {kernel}"
        assert main(asked.split()) == 0
        assert f"plan      {kernel} " in capsys.readouterr().out
