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
from mlx_marlin.backends.metal.cost.rates import memory_seconds
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experts.plan import MetalGatherPlan
from mlx_marlin.backends.metal.experts.search import (
    choose_gather,
    expected_tiles,
    gather_handover,
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


@pytest.mark.parametrize("chip", ["Apple M1 Max", "Apple M3 Max"])
def test_the_model_leaves_stock_where_rows_share_experts(chip: str) -> None:
    device = Device.named(chip)

    def reason(pairs: int) -> str | None:
        problem = Problem(m=pairs, n=768, k=2048)
        return gather_handover(of_experts(problem), device)

    assert "times stock MLX's speed" in str(reason(8))
    assert reason(256) is None


@pytest.mark.parametrize(
    ("pairs", "by_stock"), [(16, False), (64, True), (128, True), (1024, True)]
)
def test_on_m5_sorted_pairs_have_tensor_units_in_stock(
    pairs: int, by_stock: bool
) -> None:
    """Mixtral, which chooses 2 of 8 experts; mlx-lm sorts 64 pairs and more."""
    problem = Problem(m=pairs, n=14336, k=4096)
    gather = of_experts(problem, 8, is_sorted=pairs >= 64)
    m5, older = Device.named("Apple M5 Max"), Device.named("Apple M4 Max")

    reason = gather_handover(gather, m5)

    assert (reason is not None) == by_stock
    if pairs == 1024:
        stock, ours = gather_seconds(gather, m5)
        assert stock < ours / 2
        assert gather_seconds(gather, older)[0] > 3 * stock


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
    stock, ours = gather_seconds(gather, device)

    monkeypatch.setattr("mlx_marlin.backends.metal.experts.search.MAX_DOT_ROWS", 0)
    choose_gather.cache_clear()
    with_matrices = gather_seconds(gather, device)
    choose_gather.cache_clear()

    assert with_matrices[0] == stock
    assert with_matrices[1] > 1.2 * ours


def leaves(chip: str, pairs: int, k: int = 2048, **form: Any) -> bool:
    """Whether a product of unsorted pairs over 128 experts leaves stock MLX."""
    problem = Problem(m=pairs, n=768, k=k, **form)
    return not gather_handover(of_experts(problem), Device.named(chip))


@pytest.mark.parametrize(
    ("chip", "form", "least"),
    [
        ("Apple M3 Max", {}, 1.1),
        ("Apple M4 Pro", {"dtype": "bfloat16", "scale_dtype": "bfloat16"}, 1.1),
        ("Apple M4 Pro", {"bits": 6}, 1.3),
        ("Apple M1 Max", {}, 1.3),
    ],
)
def test_the_margin_is_small_where_times_of_one_row_were_fitted(
    chip: str, form: dict[str, Any], least: float
) -> None:
    def ratio(pairs: int) -> float:
        problem = Problem(m=pairs, n=768, k=2048, **form)
        stock, ours = gather_seconds(of_experts(problem), Device.named(chip))
        return stock / ours

    for pairs in range(8, 129, 8):
        assert leaves(chip, pairs, **form) == (ratio(pairs) >= least)
    assert ratio(8) < 1.1 < ratio(64) < 1.3 < ratio(128)


@given(pairs=st.integers(1, 512), k=st.sampled_from([64, 128, 256, 768, 2048]))
@settings(max_examples=60)
def test_where_the_margin_is_small_caches_would_not_make_stock_win(
    pairs: int, k: int
) -> None:
    chip = "Apple M4 Pro"
    problem, device = Problem(m=pairs, n=768, k=k), Device.named(chip)
    stock, ours = gather_seconds(of_experts(problem), device)

    if leaves(chip, pairs, k) and stock / ours < 1.3:
        once = of_experts(problem).chosen_experts * problem.weight_bytes
        assert ours <= 1.01 * memory_seconds(round(once), device)


def test_few_k_are_not_left_to_the_small_margin() -> None:
    # What surrounds the main loop counts more than reading the weights.
    problem, device = Problem(m=64, n=768, k=256), Device.named("Apple M4 Pro")
    stock, ours = gather_seconds(of_experts(problem), device)

    assert 1.1 < stock / ours < 1.3
    assert not leaves("Apple M4 Pro", 64, 256)


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


@sampled(3)
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
