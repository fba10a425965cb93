"""What kernels with stages of x refuse, and who gets plans of them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.backends import planner
from mlx_marlin.backends.cuda import candidates, device, pipelined
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.decompositions import data_parallel
from mlx_marlin.planning.work.tiles import Kernel, Tile
from mlx_marlin.planning.work.work import Work

H200 = CudaDevice.named("NVIDIA H200")
STAGED: tuple[Kernel, ...] = ("mma_staged", "wgmma")
PACKED = Problem(m=32, n=128, k=1024, layout="marlin")


def plan_of(**fields: Any) -> Plan:
    """Returns a plan of 32 x 64 columns, two tiles side by side, fields replaced."""
    defaults = {
        "problem": PACKED,
        "kernel": "wgmma",
        "tile": Tile(m=32, n=64),
        "fragments_m": 4,
        "simdgroups_n": 2,
        "simdgroups_k": 1,
        "work": data_parallel(2, 16),
        "buffers": 2,
        "loaders": 4,
    }
    return CudaPlan(**{**defaults, **fields})


SPLIT = Work(strategy="split_k", tiles=2, k_tiles=16, threadgroups=4, slices=2)
HYTIS = replace(data_parallel(2, 16), strategy="hytis", whole=1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"problem": replace(PACKED, layout="mlx")}, "packed weights, and layout is m"),
        ({"problem": replace(PACKED, invariant=True)}, "another order than mma's"),
        ({"problem": replace(PACKED, dtype="float32")}, "and dtype is float32"),
        ({"problem": replace(PACKED, scale_dtype="float32")}, "scales in float32"),
        ({"problem": replace(PACKED, group_size=16)}, "no groups of 16 integers"),
        ({"fragments_m": 1, "tile": Tile(m=8, n=64)}, "fragments_m=1 is not one of"),
        ({"fragments_m": 5, "tile": Tile(m=40, n=64)}, "fragments_m=5 is not one of"),
        ({"loaders": 0}, "loaders=4, got .*loaders=0"),
        ({"loaders": 8}, "loaders=4, got .*loaders=8"),
        ({"buffers": 0}, "buffers=0 is not one of .2, 4, 6, 8, .* fragments_m=4"),
        ({"buffers": 3}, "buffers=3 is not one of"),
        ({"buffers": 34}, "buffers=34 is not one of"),
        (
            {"fragments_m": 3, "tile": Tile(m=24, n=64)},
            "buffers=2 is not one of .4, 8, 12, .*32. for fragments_m=3",
        ),
        ({"simdgroups_k": 2}, "buffers=2 is not one of .4, 6, .* simdgroups_k=2"),
        ({"simdgroups_k": 3, "buffers": 8}, "is not one of .6, 12, .*simdgroups_k=3"),
        ({"simdgroups_k": 0}, "simdgroups_k=0 at least 1"),
        ({"simdgroups_n": 0}, "simdgroups_n=0 must be 1 to 8"),
        ({"simdgroups_n": 9, "tile": Tile(m=32, n=288)}, "simdgroups_n=9 must be 1"),
        (
            {"simdgroups_k": 7, "buffers": 8},
            "simdgroups_n=2 x simdgroups_k=7 make 32 simdgroups .* at most 28",
        ),
        (
            {"simdgroups_n": 5, "simdgroups_k": 4, "buffers": 6},
            "simdgroups_n=5 x simdgroups_k=4 make 36 simdgroups",
        ),
        ({"tile": Tile(m=16, n=64)}, "makes tiles of 32 rows, got tile.m=16"),
        ({"tile": Tile(m=32, n=32)}, "tile.n and tile.k are 64 and 64"),
        ({"tile": Tile(m=32, n=64, k=128)}, "64 and 64 for groups of 64"),
        ({"work": data_parallel(4, 16)}, "2 tiles of 16 k tiles"),
        ({"work": HYTIS}, "wgmma has tiles of one width"),
        ({"work": SPLIT, "reduction": "atomic"}, "wgmma has no atomic sums"),
        ({"work": SPLIT}, "are split"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(
    fields: dict[str, Any], words: str
) -> None:
    assert plan_of().kernel == "wgmma"
    with pytest.raises(ValueError, match=words):
        plan_of(**fields)


@pytest.mark.parametrize(
    ("fields", "simdgroups"),
    [
        ({}, 4 + 4),
        (
            {"simdgroups_n": 1, "tile": Tile(m=32, n=32), "work": data_parallel(4, 16)},
            8,
        ),
        ({"simdgroups_k": 3, "buffers": 6}, 12 + 4),
        (
            {
                "simdgroups_n": 5,
                "tile": Tile(m=32, n=160),
                "work": data_parallel(1, 16),
            },
            12,
        ),
    ],
)
def test_warps_are_whole_warpgroups_and_loaders(
    fields: dict[str, Any], simdgroups: int
) -> None:
    assert plan_of(**fields).simdgroups == simdgroups


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 512 + 2 * 32 * 128 * 2),
        ({"buffers": 8}, 512 + 8 * 32 * 128 * 2),
        # The sums take the stages' place, here more than that.
        ({"simdgroups_k": 5, "buffers": 10}, 512 + 10 * 32 * 128 * 2),
        (
            {
                "simdgroups_n": 8,
                "simdgroups_k": 3,
                "buffers": 6,
                "tile": Tile(m=32, n=256),
                "work": data_parallel(1, 16),
            },
            512 + 8 * 3 * 32 * 36 * 4,
        ),
    ],
)
def test_sums_and_stages_take_turns_in_shared_memory(
    fields: dict[str, Any], size: int
) -> None:
    assert plan_of(**fields).threadgroup_bytes == size


HAVE = {gpu for gpu in device.gpus().values() if gpu.arch == "sm_90"}
LARGE = Problem(m=64, n=28672, k=8192, group_size=128, layout="marlin")


def kernels(problem: Problem, gpu: CudaDevice = H200, **overrides: Any) -> set[str]:
    """Returns the kernels that plans are compared of."""
    compared = planner.compare(problem, device=gpu, **overrides).candidates
    return {each.plan.kernel for each in compared}


@pytest.mark.parametrize("gpu", device.gpus().values(), ids=lambda gpu: gpu.name)
def test_only_hopper_has_it(gpu: CudaDevice) -> None:
    has = gpu in HAVE
    assert kernels(LARGE, gpu) == ({*OF_CUDA} if has else {"mma"})
    for kernel in STAGED:
        if has:
            assert planner.make(LARGE, device=gpu, kernel=kernel).kernel == kernel
            continue
        with pytest.raises(ValueError, match=r"compute capability 9\.0, and .* has"):
            planner.make(LARGE, device=gpu, kernel=kernel)


@pytest.mark.parametrize(
    "arch", ["sm_80", "sm_86", "sm_89", "sm_100", "sm_103", "sm_120"]
)
def test_neither_older_nor_newer_devices_have_it(arch: str) -> None:
    gpu = replace(H200, arch=arch)

    assert kernels(LARGE, gpu) == {"mma"}
    assert planner.choose(LARGE, gpu).kernel == "mma"
    digits = f"{arch[3:-1]}.{arch[-1]}"
    for kernel in STAGED:
        with pytest.raises(ValueError, match=f"NVIDIA H200 has {digits}"):
            planner.make(LARGE, device=gpu, kernel=kernel)


OTHERS = {
    "few rows": {"m": candidates.LEAST_ROWS - 1},
    "layout": {"layout": "mlx"},
    "invariant": {"invariant": True},
}


@pytest.mark.parametrize("other", OTHERS)
def test_they_are_offered_for_packed_weights_whose_sums_may_vary(other: str) -> None:
    assert kernels(replace(LARGE, m=candidates.LEAST_ROWS)) == {*OF_CUDA}
    assert kernels(replace(LARGE, **OTHERS[other])) == {"mma"}


@pytest.mark.parametrize("kernel", STAGED)
@pytest.mark.parametrize(
    ("other", "words"),
    [("layout", "packed weights, and layout is mlx"), ("invariant", "another order")],
)
def test_asked_for_one_says_why_it_cannot(
    other: str, words: str, kernel: Kernel
) -> None:
    with pytest.raises(ValueError, match=words):
        planner.make(replace(LARGE, **OTHERS[other]), device=H200, kernel=kernel)


@pytest.mark.parametrize("kernel", OF_CUDA)
@pytest.mark.parametrize("m", [1, 8, 9, 33, 64, 100])
def test_either_kernel_can_be_asked_for(kernel: Kernel, m: int) -> None:
    problem = replace(LARGE, m=m)

    assert kernels(problem, kernel=kernel) == {kernel}
    assert planner.make(problem, device=H200, kernel=kernel).kernel == kernel


@pytest.mark.parametrize("kernel", STAGED)
@pytest.mark.parametrize("m", [9, 16, 17, 24, 25, 32, 33, 48, 49, 64, 65, 96, 128])
def test_tiles_have_the_fewest_fragments_that_need_no_more_of_them(
    m: int, kernel: Kernel
) -> None:
    plan = planner.make(replace(LARGE, m=m), device=H200, kernel=kernel)

    known = pipelined.KERNELS[kernel].fragments_m
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


@pytest.mark.parametrize("kernel", STAGED)
@pytest.mark.parametrize("warps_k", [1, 2, 3, 4, 6])
def test_wished_slices_leave_room_for_the_others(warps_k: int, kernel: Kernel) -> None:
    plan = planner.make(
        replace(LARGE, m=16), device=H200, kernel=kernel, simdgroups_k=warps_k
    )

    assert plan.simdgroups_k == warps_k
    assert plan.simdgroups <= pipelined.KERNELS[kernel].most_simdgroups


@pytest.mark.parametrize("m", [1, 16, 32, 64])
@pytest.mark.parametrize("size", [(4096, 4096), (28672, 8192), (17408, 5120)])
def test_little_shared_memory_leaves_other_plans(m: int, size: tuple[int, int]) -> None:
    gpu = replace(H200, shared_bytes=48 * 1024)

    plan = planner.choose(replace(LARGE, m=m, n=size[0], k=size[1]), gpu)

    assert plan.threadgroup_bytes <= gpu.shared_bytes


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"kernel": "wgmma", "loaders": 2}, "loaders=2, expected 4"),
        ({"kernel": "mma", "loaders": 4}, "loaders=4, expected 0"),
        ({"kernel": "mma", "buffers": 4}, "buffers=4, expected 0"),
        ({"buffers": 4}, "buffers=4, expected 0"),
        ({"kernel": "wgmma", "buffers": 3}, "buffers=3 is not one of"),
        ({"kernel": "wgmma", "fragments_m": 1}, "fragments_m=1 is not one of"),
        ({"kernel": "mma_staged", "fragments_m": 6}, "fragments_m=6 is not one of"),
        ({"kernel": "mma_staged", "buffers": 3}, "buffers=3 is not one of"),
        ({"kernel": "mma_staged", "loaders": 0}, "loaders=0, expected 4"),
        ({"kernel": "mma_staged", "strategy": "hytis"}, "which mma_staged has not"),
        ({"kernel": "mma", "fragments_m": 6}, "fragments_m=6 is not one of"),
        ({"kernel": "wgmma", "simdgroups_m": 2}, "simdgroups_m=2, expected 1"),
        ({"kernel": "wgmma", "strategy": "hytis"}, "which wgmma has not"),
        ({"kernel": "wgmma", "simdgroups_k": 7}, "simdgroups_k=7|at most 28"),
        (
            {"kernel": "wgmma", "simdgroups_n": 5, "simdgroups_k": 4},
            "make 36 simdgroups",
        ),
    ],
)
def test_wishes_that_it_cannot_have_are_refused(
    overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        planner.make(LARGE, device=H200, **overrides)


def test_buffers_can_be_asked_for() -> None:
    for buffers in pipelined.buffers_of(8, 1)[:6]:
        plan = planner.make(
            LARGE, device=H200, kernel="wgmma", buffers=buffers, simdgroups_k=1
        )
        assert plan.buffers == buffers
