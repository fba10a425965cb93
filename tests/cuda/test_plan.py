"""CUDA plans cover their product once, describe their block and check themselves."""

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mlx_marlin.backends import planner, result_files
from mlx_marlin.backends.cuda import candidates, device, limits
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.planning import measurement
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.decompositions import data_parallel
from mlx_marlin.planning.work.tiles import Kernel, Tile
from mlx_marlin.planning.work.work import Work
from support.cuda_strategies import H200, PLANS, covered, mma_plans, staged_plans
from support.parts_of_plans import corner
from support.profiles import drawn


@drawn(18, plan=PLANS)
def test_every_multiply_is_done_exactly_once(plan: Plan) -> None:
    problem = plan.problem

    every = product(range(problem.m), range(problem.n), range(0, problem.k, 32))
    assert covered(plan) == Counter(every)


@given(PLANS)
def test_the_splits_of_a_tile_have_slots_in_ascending_k(plan: Plan) -> None:
    found: dict[int, list[tuple[int, int]]] = {}
    for threadgroup in range(plan.num_threadgroups):
        for split in plan.work.splits(threadgroup):
            found.setdefault(split.tile, []).append((split.k_idx, split.slot))

    for splits in found.values():
        assert [slot for _, slot in sorted(splits)] == list(range(len(splits)))
        assert len(splits) <= plan.workspace_shape[0]


@given(PLANS)
def test_tiles_stand_side_by_side_and_are_of_one_width(plan: Plan) -> None:
    at = 0
    for tile in range(0, plan.m_tiles * plan.n_tiles, plan.m_tiles):
        assert corner(plan, tile) == (0, at)
        assert plan.columns_of(tile) == plan.tile.n == 32 * plan.simdgroups_n
        at += plan.tile.n

    assert plan.problem.n <= at < plan.problem.n + plan.tile.n


@given(mma_plans())
def test_a_block_of_mma_fits_and_says_what_it_is(plan: Plan) -> None:
    tiles_n, warps_k = plan.simdgroups_n, plan.simdgroups_k

    assert plan.threads == 32 * tiles_n * warps_k <= 32 * limits.MOST_SIMDGROUPS
    assert plan.threadgroup_bytes == tiles_n * warps_k * plan.tile.m * 36 * 4
    assert plan.threadgroup_bytes <= limits.SHARED_LIMIT
    assert plan.variant == f"mma {plan.tile.m} rows, 1x{tiles_n}x{warps_k} simdgroups"
    assert plan.explain().startswith(
        f"mma {plan.tile}, {tiles_n}x{warps_k} simdgroups (n x k), "
    )


@given(staged_plans())
def test_a_block_with_stages_fits_and_says_what_it_is(plan: Plan) -> None:
    tiles_n, warps_k, rows = plan.simdgroups_n, plan.simdgroups_k, plan.tile.m
    wide = plan.kernel == "wgmma"
    columns = -(-tiles_n // 4) * 4 if wide else tiles_n  # of whole warpgroups

    assert plan.threads == 32 * (columns * warps_k + 4) <= (896 if wide else 1024)
    sums, stages = tiles_n * warps_k * rows * 36 * 4, plan.buffers * rows * 128 * 2
    assert plan.threadgroup_bytes == 512 + max(sums, stages) <= limits.SHARED_LIMIT
    assert 2 * 8 * plan.buffers <= 512  # barriers
    staging = f"{plan.buffers} buffers, 4 loaders"
    block = f"{plan.kernel} {rows} rows, 1x{tiles_n}x{warps_k} simdgroups"
    assert plan.variant == f"{block}, {staging}"
    assert plan.explain().startswith(
        f"{plan.kernel} {plan.tile}, {tiles_n}x{warps_k} simdgroups (n x k), "
        f"{staging}, "
    )


@given(PLANS)
def test_a_plan_survives_json(plan: Plan) -> None:
    assume(plan.num_threadgroups <= plan.work.total and not plan.problem.invariant)
    result = measurement.Result(
        plan=plan,
        stock=False,
        medians_us={measurement.label(plan): 1.0},
        clock="wall time",
        date="2026-11-22",
    )

    kept = json.loads(json.dumps(result_files.row(result)))
    assert result_files.decoded(kept) == result


PROBLEM = Problem(m=8, n=128, k=512)
PACKED = Problem(m=32, n=128, k=1024, layout="marlin")
MMA: dict[str, Any] = {
    "problem": PROBLEM,
    "kernel": "mma",
    "tile": Tile(m=8, n=64),
    "fragments_m": 1,
    "simdgroups_n": 2,
    "simdgroups_k": 4,
    "work": data_parallel(2, 8),
}
WGMMA: dict[str, Any] = {
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
"""Of 64 columns, two tiles side by side."""
SPLIT = Work(strategy="split_k", tiles=2, k_tiles=8, threadgroups=4, slices=2)
STREAM = Work(strategy="stream_k", tiles=2, k_tiles=8, threadgroups=3, slices=8)
HYTIS = replace(data_parallel(2, 8), strategy="hytis", whole=1)
INVARIANT = replace(PROBLEM, invariant=True)


def test_plans_of_fields_are_valid() -> None:
    for fields in (MMA, WGMMA, MMA | {"problem": INVARIANT}):
        assert CudaPlan(**fields).problem == fields["problem"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fragments_m": 5, "tile": Tile(m=40, n=64)}, "fragments_m=5"),
        ({"simdgroups_k": 15}, "more than 28 simdgroups"),
        ({"simdgroups_k": 0}, "simdgroups_k=0"),
        ({"simdgroups_n": 9, "tile": Tile(m=8, n=288)}, "simdgroups_n=9 must be 1 to"),
        ({"tile": Tile(m=8, n=32)}, "tile.n and tile.k are 64 and 64"),
        ({"tile": Tile(m=16, n=64)}, "makes tiles of 8 rows, got tile.m=16"),
        ({"tile": Tile(m=8, n=64, k=128)}, "64 and 64 for groups of 64"),
        ({"buffers": 2}, "buffers=0"),
        ({"work": data_parallel(4, 8)}, "2 tiles of 8 k tiles"),
        ({"work": HYTIS}, "tiles of one width"),
        ({"work": SPLIT, "reduction": "atomic"}, "no atomic sums"),
        ({"work": SPLIT}, "are split"),
        (
            {"problem": INVARIANT, "work": STREAM, "reduction": "workspace"},
            "invariant=True needs",
        ),
        ({"problem": replace(PROBLEM, dtype="float32")}, "and dtype is float32"),
        ({"problem": replace(PROBLEM, scale_dtype="float32")}, "scales in float32"),
    ],
)
def test_what_mma_cannot_do_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CudaPlan(**MMA | fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"problem": replace(PACKED, layout="mlx")}, "packed weights, and layout is m"),
        ({"problem": replace(PACKED, invariant=True)}, "another order than mma's"),
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
        (
            {"simdgroups_k": 7, "buffers": 8},
            "simdgroups_n=2 x simdgroups_k=7 make 32 simdgroups .* at most 28",
        ),
        (
            {"simdgroups_n": 5, "simdgroups_k": 4, "buffers": 6},
            "simdgroups_n=5 x simdgroups_k=4 make 36 simdgroups",
        ),
    ],
)
def test_what_stages_cannot_do_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CudaPlan(**WGMMA | fields)


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
