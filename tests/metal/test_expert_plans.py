"""Plans of products of experts on Metal: their cost model, limits and traffic."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import metal_emulator
from mlx_marlin.backends import graph, planner
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experts import (
    MetalGatherPlan,
    choose_gather,
    expected_tiles,
    gather_seconds,
)
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products.packing import pack
from support.choose import Choose
from support.gather_calls import DEVICES, M1, K, weights
from support.profiles import sampled
from support.trace_mode import emulator_only


def of_experts(
    problem: Problem, experts: int = 128, *, is_sorted: bool = False
) -> GatherProblem:
    return GatherProblem(problem=problem, experts=experts, is_sorted=is_sorted)


@given(
    pairs=st.integers(1, 5000), experts=st.integers(1, 300), most=st.integers(1, 128)
)
def test_expected_tiles_hold_all_pairs_of_the_chosen_experts(
    pairs: int, experts: int, most: int
) -> None:
    tiles = expected_tiles(pairs, experts, most)
    by_expert = expected_tiles(pairs, experts, pairs)

    assert max(tiles) <= most
    assert sum(r * c for r, c in tiles.items()) == pytest.approx(pairs, rel=1e-6)
    chosen = of_experts(Problem(m=pairs, n=8, k=64), experts).chosen_experts
    assert sum(by_expert.values()) == pytest.approx(chosen, rel=1e-6)


def test_expected_tiles_are_those_of_many_draws() -> None:
    random = np.random.default_rng(0)
    draws = random.integers(0, 16, (20_000, 40))
    counts = np.stack([(draws == each).sum(axis=1) for each in range(16)])

    tiles = expected_tiles(40, 16, 3)

    whole, rest = counts // 3, counts % 3
    drawn = {3: whole + 0.0, 1: rest == 1, 2: rest == 2}
    for rows, found in drawn.items():
        assert tiles[rows] == pytest.approx(found.sum(axis=0).mean(), rel=0.02)


def test_experts_of_few_rows_are_priced_as_dot_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One row each: with matrices the same experts would be bound by their slots.
    gather = of_experts(Problem(m=128, n=768, k=2048), is_sorted=True)
    device = Device.named("Apple M1 Max")
    ours = gather_seconds(gather, device)

    monkeypatch.setattr("mlx_marlin.backends.metal.experts.MAX_DOT_ROWS", 0)
    choose_gather.cache_clear()
    with_matrices = gather_seconds(gather, device)
    choose_gather.cache_clear()

    assert with_matrices > 1.2 * ours


@given(
    pairs=st.integers(1, 5000),
    experts=st.integers(1, 300),
    n=st.integers(1, 5000),
    device=DEVICES,
)
@settings(max_examples=200)
def test_a_plan_fits_the_hardware_and_says_itself(
    pairs: int, experts: int, n: int, device: Device
) -> None:
    plan = planner.choose_gather(
        of_experts(Problem(m=pairs, n=n, k=64), experts), device
    )

    assert plan.threads <= 256
    assert plan.threadgroup_bytes <= 32768
    assert plan.num_threadgroups == experts * -(-n // 32)
    assert f"{pairs} pairs over {experts} experts" in plan.explain()


@pytest.mark.parametrize("pairs", [64, 512, 4096])
@pytest.mark.parametrize("chip", ["Apple M1", "Apple M1 Max"])
def test_dot_products_and_two_fragments_of_native_codes_are_too_much_code_for_an_m1(
    chip: str, pairs: int
) -> None:
    problem, m1 = Problem(m=pairs, n=768, k=2048), Device.named(chip)

    m2 = Device.named("Apple M2")
    assert planner.choose_gather(of_experts(problem, 8), m1).fragments_m == 1
    assert planner.choose_gather(of_experts(problem, 8), m2).fragments_m == 2
    for other in (replace(problem, layout="marlin"), replace(problem, invariant=True)):
        assert planner.choose_gather(of_experts(other, 8), m1).fragments_m == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"experts": 0}, "experts=0"),
        ({"dot_rows": 3}, "dot_rows=3"),
        ({"fragments_m": 3}, "fragments_m=3"),
        ({"simdgroups_m": 4, "simdgroups_k": 4}, "simdgroups_m=4"),
        ({"fragments_m": 2, "simdgroups_m": 8, "simdgroups_k": 2}, "simdgroups_m=8"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(fields: dict[str, int], words: str) -> None:
    sound = {
        "experts": 4,
        "fragments_m": 1,
        "simdgroups_m": 1,
        "simdgroups_k": 4,
        "dot_rows": 2,
    }

    changed = sound | fields
    experts = changed.pop("experts")

    def planned() -> MetalGatherPlan:
        gather = of_experts(Problem(m=9, n=40, k=64), experts)
        return MetalGatherPlan(gather=gather, operand="offset", **changed)

    with pytest.raises(ValueError, match=words):
        planned()


@sampled(2, 4)
@emulator_only
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize(("simdgroups_m", "simdgroups_k"), [(1, 4), (2, 2)])
@pytest.mark.parametrize("dot_rows", [0, 1, 2])
def test_a_weight_is_read_once_for_the_rows_that_chose_it_few_by_dot_products(
    dot_rows: int, simdgroups_m: int, simdgroups_k: int, layout: str
) -> None:
    native = weights(4, 64, "affine", 4, 64, mx.bfloat16)
    problem = Problem(
        m=6, n=64, k=K, layout=layout, dtype="bfloat16", scale_dtype="bfloat16"
    )
    plan = MetalGatherPlan(
        gather=GatherProblem(problem=problem, experts=4),
        fragments_m=1,
        simdgroups_m=simdgroups_m,
        simdgroups_k=simdgroups_k,
        dot_rows=dot_rows,
        operand="exact",
    )
    packed = pack(*native)
    stored = (packed.words, packed.scales, packed.scales)
    weight = native if layout == "mlx" else stored
    x = mx.random.normal((6, K)).astype(mx.bfloat16)
    # Three experts, that one row chose, two rows and three, and one of nobody's.
    pairs = mx.array([1, 2, 0, 2, 1, 2], mx.uint32), mx.arange(6, dtype=mx.uint32)

    (found, *_) = metal_emulator.trace(graph.gather_product(plan), x, *weight, *pairs)

    assert found.of("w").read_bytes == 3 * 64 * K // 2
    assert found.of("w").repeated_read_bytes == 0
    scales = 3 * 64 * (K // 64) * 2
    assert found.of("scales").read_bytes == scales * (1 + (layout == "marlin"))
    assert found.count("matrix") == (3 - dot_rows) * (64 // 8) * (K // 8)


def test_a_packed_call_is_one_dispatch_on_metal(backend: Choose) -> None:
    packed = pack(*weights(4, 40, "affine", 4, 64, mx.float32))
    backend("metal")
    names: list[str] = []

    def collect(record: dict[str, Any]) -> None:
        if record.get("type") == "primitive":
            names.append(record["name"])

    problem = Problem(m=64, n=40, k=K, layout="marlin")
    product = graph.gather_product(planner.choose_gather(of_experts(problem, 4), M1))
    pairs = mx.zeros(64, mx.uint32)
    x = mx.zeros((64, K), mx.float16)
    scales = packed.scales.astype(mx.float16)
    mx.export_function(collect, product, x, packed.words, scales, scales, pairs, pairs)

    assert names == ["CustomKernel"]
