"""Who gets plans of kernels with stages of x."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.backends import planner
from mlx_marlin.backends.cuda import candidates, device
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import Kernel
from support.cuda_strategies import H200

STAGED: tuple[Kernel, ...] = ("mma_staged", "wgmma")
LARGE = Problem(m=64, n=28672, k=8192, group_size=128, layout="marlin")


def kernels(problem: Problem, gpu: CudaDevice = H200, **overrides: Any) -> set[str]:
    """Returns the kernels that plans are compared of."""
    compared = planner.compare(problem, device=gpu, **overrides).candidates
    return {each.plan.kernel for each in compared}


ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_100", "sm_103", "sm_120")


@pytest.mark.parametrize(
    "gpu",
    [*device.gpus().values(), *(replace(H200, arch=arch) for arch in ARCHITECTURES)],
    ids=lambda gpu: f"{gpu.name} {gpu.arch}",
)
def test_only_hopper_has_them(gpu: CudaDevice) -> None:
    has = gpu.arch == "sm_90"
    assert kernels(LARGE, gpu) == ({*OF_CUDA} if has else {"mma"})
    digits = f"{gpu.arch[3:-1]}.{gpu.arch[-1]}"
    for kernel in STAGED:
        if has:
            assert planner.make(LARGE, device=gpu, kernel=kernel).kernel == kernel
            continue
        words = rf"compute capability 9\.0, and {gpu.name} has {digits}"
        with pytest.raises(ValueError, match=words):
            planner.make(LARGE, device=gpu, kernel=kernel)


OTHERS = {
    "few rows": {"m": candidates.LEAST_ROWS - 1},
    "layout": {"layout": "mlx"},
    "invariant": {"invariant": True},
}


@pytest.mark.parametrize("other", OTHERS)
def test_they_are_offered_for_packed_weights_whose_sums_may_vary(other: str) -> None:
    assert kernels(replace(LARGE, m=candidates.LEAST_ROWS)) == {*OF_CUDA}
    problem = replace(LARGE, **OTHERS[other])
    assert kernels(problem) == {"mma"}
    for kernel in STAGED if other != "few rows" else ():
        with pytest.raises(ValueError, match=r"packed weights|another order"):
            planner.make(problem, device=H200, kernel=kernel)


@pytest.mark.parametrize("kernel", OF_CUDA)
@pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 24, 25, 32, 33, 48, 49, 64, 65, 128])
def test_either_kernel_can_be_asked_for_and_has_the_fewest_fragments(
    m: int, kernel: Kernel
) -> None:
    problem = replace(LARGE, m=m)

    plan = planner.make(problem, device=H200, kernel=kernel)

    assert kernels(problem, kernel=kernel) == {plan.kernel} == {kernel}
    known = candidates.FRAGMENTS_M[kernel]
    tiles = -(-m // (8 * known[-1]))
    assert plan.m_tiles == tiles
    fewer = [each for each in known if each < plan.fragments_m]
    assert all(-(-m // (8 * each)) > tiles for each in fewer)


@given(
    st.sampled_from([9, 16, 32, 48, 64]),
    st.sampled_from([(28672, 8192), (512, 1024)]),
    st.fixed_dictionaries(
        {},
        optional={
            "simdgroups_n": st.integers(1, 8),
            "simdgroups_k": st.integers(1, 28),
            "fragments_m": st.integers(1, 4),
            "buffers": st.just(0),
            "loaders": st.just(0),
        },
    ).filter(
        lambda overrides: (
            overrides.get("simdgroups_n", 1) * overrides.get("simdgroups_k", 1) <= 28
        )
    ),
)
def test_what_it_cannot_have_it_is_not_compared_with(
    m: int, sides: tuple[int, int], overrides: dict[str, Any]
) -> None:
    problem = replace(LARGE, m=m, n=sides[0], k=sides[1])

    compared = planner.compare(problem, device=H200, **overrides).candidates

    for each in compared:
        assert {name: getattr(each.plan, name) for name in overrides} == overrides
