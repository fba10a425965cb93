"""Predictions, choices and plans without alternatives have the figures of their rules.

The numbers are computed by hand, or by the rule that a document states.
"""

from dataclasses import replace
from typing import Any

import pytest

from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experts import MetalGatherPlan
from mlx_marlin.planning import search
from mlx_marlin.planning.block_plans import (
    AddNormPlan,
    CombinePlan,
    HeadsPlan,
    RepackPlan,
    RoutePlan,
)
from mlx_marlin.planning.dequantize_plan import DequantizePlan, dequantize_plan
from mlx_marlin.planning.device import Residency
from mlx_marlin.planning.epilogue import Epilogue, Heads, Rotation
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import Candidate, Choice, Prediction

CHAIN = Prediction(
    memory=2e-6,
    issue=5e-6,
    loads=3e-6,
    matrix=1e-6,
    busy=0.5,
    fill=0.8,
    dispatch=4e-6,
    launch=7e-6,
)
M3_MAX = Device.named("M3 Max")
PROBLEM = Problem(m=8, n=256, k=1024)


def test_a_prediction_stretches_the_longest_time_and_adds_what_waits() -> None:
    alone = replace(CHAIN, launch=0.0)

    assert CHAIN.longest == 5e-6
    assert CHAIN.stretch == pytest.approx(1 / 0.4)
    assert CHAIN.seconds == pytest.approx(12.5e-6 + 4e-6 + 7e-6)
    assert CHAIN.independent_seconds == pytest.approx(12.5e-6)
    assert alone.seconds == alone.independent_seconds == pytest.approx(16.5e-6)


@pytest.mark.parametrize("part", ["memory", "issue", "loads", "matrix"])
def test_the_longest_part_is_the_bound(part: str) -> None:
    longest = replace(CHAIN, **{part: 9e-6})

    assert (longest.bound, longest.longest) == (part, 9e-6)


def test_a_prediction_says_its_clocks_and_what_it_waits_for() -> None:
    alone = replace(CHAIN, launch=0.0, dispatch=0.0)
    words = "(model, not measured): bound by issue, x2.50 for uneven or thinly filled"

    assert CHAIN.explain() == (
        f"predicted 23.5 us in a chain, 12.5 us independently {words} cores, 4.0 us of "
        f"it for further dispatches"
    )
    assert alone.explain() == f"predicted 12.5 us {words} cores"


@pytest.mark.parametrize("least", ["registers", "threadgroup memory", "threads"])
def test_what_a_core_has_least_of_limits_its_threadgroups(least: str) -> None:
    counts = {"registers": 5, "threadgroup memory": 6, "threads": 7} | {least: 2}
    some = Residency(simdgroups=3, max_simdgroups=24, threadgroups=counts)
    none = replace(some, threadgroups=counts | {least: 0})

    assert (some.limit, some.resident, some.occupancy) == (least, 6, 0.25)
    assert (none.limit, none.resident, none.occupancy) == (least, 3, 0.125)


WHOLE, STRIPE, SPLIT = (
    planner.make(PROBLEM, device=M3_MAX, **fields)
    for fields in (
        {"strategy": "data_parallel"},
        {"strategy": "stripe", "k_parallel": 1, "num_threadgroups": 5},
        {"strategy": "split_k", "k_parallel": 2},
    )
)
BEST = Prediction(
    memory=1e-5, issue=0, loads=0, busy=0.8, fill=0.5, dispatch=1e-6, launch=2e-6
)  # 28 us


def chosen(plan: Plan = WHOLE, **changes: Any) -> Choice:
    """Returns the choice of a plan instead of one that is as fast and less simple."""
    others = [Candidate((2.0,), BEST, STRIPE), Candidate((3.0,), BEST, SPLIT)]
    fields: dict[str, Any] = {
        "plan": plan,
        "device": M3_MAX,
        "prediction": BEST,
        "reason": None,
        "candidates": (Candidate((1.0,), BEST, plan), *others),
    }
    return Choice(**fields | changes)


def test_the_figures_of_a_choice_are_those_of_its_plan_and_predictions() -> None:
    assert chosen(SPLIT).figures() == {
        "strategy": "split_k",
        "variant": SPLIT.variant,
        "tile": [8, 32, 64],
        "threadgroups": 16,
        "splits": 2,
        "busy": 0.8,
        "predicted_us": 28.0,
        "independent_us": 25.0,
        # Codes, scales and biases of groups of 64, x and the result.
        "bytes": 256 * 1024 // 2 + 2 * 2 * 256 * 16 + 2 * 8 * (1024 + 256),
        "workspace_bytes": 2 * 8 * 256 * 4,
        "dispatches": 2,
        "bound": "memory",
        "served_by": "ours",
        "reason": SPLIT.explain(),
        "device": M3_MAX.variant,
        "measured": False,
    }


def test_a_choice_for_one_clock_has_no_time_of_another() -> None:
    one_clock = replace(BEST, launch=0.0, busy=1 / 3)
    figures = chosen(prediction=one_clock, reason="it is slow").figures()

    assert (figures["predicted_us"], figures["independent_us"]) == (61.0, None)
    assert (figures["busy"], figures["splits"]) == (0.3333, 1)
    assert (figures["served_by"], figures["reason"]) == ("stock", "it is slow")


def test_a_choice_is_told_in_a_line() -> None:
    line = f"{WHOLE.explain()}; predicted 28.0 us on Apple M3 Max 40-core GPU"
    model = "(model, not measured); served by"

    assert chosen().explain() == f"{line} {model} our kernels"
    bare = chosen(reason="it is slow")
    assert bare.explain() == f"{line} {model} stock MLX"
    assert repr(bare) == f"<Choice: {bare.explain()}>"


def test_the_table_has_a_row_for_each_candidate_and_why_stock_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "aligned", lambda rows: rows)
    heads = ["strategy", "threadgroups", "simdgroups", "slots", "busy", "us"]
    figures = ["0.80", "28.0", "memory"]
    ours: list[Any] = [
        [*heads, "bound by", ""],
        ["data_parallel", "8", "1x1x8", "1", *figures, "chosen"],
        ["stripe", "5", "1x1x8", "1", *figures, "no faster, and less simple"],
        [
            *("split_k", "16", "1x1x8", "2", *figures),
            "a dispatch more, for less than the model's error",
        ],
    ]

    served, left = chosen().table(), chosen(reason="it is slow").table()

    assert served == ours
    assert left == [*ours, ["stock MLX", *[""] * 6, "it is slow"]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory": 1.005e-5}, "no faster, and less simple"),  # 28.125 us
        ({"memory": 1.006e-5}, "0.5% slower: more to read, issue or store"),  # 28.15
        ({"busy": 0.4}, "89.3% slower: cores less evenly busy"),  # 53
        ({"fill": 0.4}, "22.3% slower: too few simdgroups to hide latency"),  # 34.25
        ({"loads": 2e-5}, "89.3% slower: more to read, issue or store"),
        ({"dispatch": 8e-6}, "25.0% slower: further dispatches"),  # 35
        (
            {"dispatch": 8e-6, "busy": 0.7},  # 38.57; 8 / 7 is less than 1 + 7 / 28
            "37.8% slower: further dispatches",
        ),
        ({"memory": 5e-6}, "no faster, and less simple"),  # and ranked later
    ],
)
def test_the_verdict_names_the_greatest_cause(
    changes: dict[str, float], words: str
) -> None:
    other = Candidate((2.0,), replace(BEST, **changes), STRIPE)

    line = chosen(candidates=(other,)).table().splitlines()[1]

    assert " ".join(line.split()).endswith(f"{words}")


def test_candidates_are_ranked_and_equal_plans_are_listed_once() -> None:
    first, second, third, again = (
        Candidate(rank, replace(BEST, busy=rank[0]), plan)
        for rank, plan in (
            ((0.1, 5.0), WHOLE),
            ((0.2, 1.0), SPLIT),
            ((0.2, 2.0), STRIPE),
            ((0.3, 0.0), WHOLE),
        )
    )

    drawn = [third, first, second]

    assert search.best(drawn) is first
    assert search.ranked(drawn) == (first, second, third)
    assert [each.plan for each in search.ranked([*drawn, again])] == [
        *(WHOLE, SPLIT, STRIPE)
    ]
    assert search.split_factor(True) == pytest.approx(1.06)
    assert search.split_factor(False) == 1


def test_a_simdgroup_routes_as_many_experts_as_its_lanes_keep() -> None:
    plan = RoutePlan(7, "float16", 128, 8, of_all=False, last=False)

    def possible(experts: int, choices: int) -> bool:
        return replace(plan, experts=experts, choices=choices).is_possible

    assert (plan.threads, plan.explain()) == (7 * 32, "8 of 128 experts")
    # A lane keeps 32 logits, and each choice has a lane.
    assert [possible(n, 1) for n in (1024, 1025)] == [True, False]
    assert [possible(64, n) for n in (32, 33)] == [True, False]
    assert [possible(5, n) for n in (5, 6)] == [True, False]


@pytest.mark.parametrize(
    ("rows", "n", "threadgroup"), [(3, 2880, 64), (1, 2048, 128), (5, 33, 1)]
)
def test_sums_of_experts_have_full_threadgroups(
    rows: int, n: int, threadgroup: int
) -> None:
    plan = CombinePlan(rows, "float16", n, 4)

    assert (plan.threads, plan.threadgroup) == (rows * n, threadgroup)
    assert plan.explain() == f"4 results of {n} columns"


def test_each_head_of_q_and_k_of_each_token_has_a_simdgroup() -> None:
    heads = Heads(heads=6, kv_heads=2, features=64, columns=640)
    plan = HeadsPlan(heads, "float16", streams=3, tokens=5, per_stream=True)

    assert plan.threads == 3 * 5 * (6 + 2) * 32
    assert plan.explain() == "5 tokens, 6 + 2 heads"


@pytest.mark.parametrize(
    ("n", "threadgroup"),
    # Four values a thread and whole simdgroups; eight turns of 256 threads take 8192.
    [(1, 32), (128, 32), (129, 64), (1024, 256), (8192, 256), (8193, 512)],
)
def test_a_row_that_is_normalized_has_threads_for_its_values(
    n: int, threadgroup: int
) -> None:
    plan = AddNormPlan(3, "float16", n, 1e-6)

    assert (plan.threadgroup, plan.explain()) == (threadgroup, f"rows of {n} values")


def test_repacked_codes_are_words_of_tiles_or_of_rows() -> None:
    plan = RepackPlan(to="marlin", batch=(2, 3), n=33, k=192, bits=3, group_size=32)
    native = replace(plan, to="mlx", group_size=64)

    assert (plan.tiles, plan.weights) == ((2, 3), 6)
    assert plan.shape == (2, 3, 2, 3, 32 * 64 * 3 // 32)
    assert native.shape == (2, 3, 33, 192 * 3 // 32)
    assert plan.explain() == "3-bit codes, order k32"
    assert native.explain() == "3-bit codes, order k64"
    assert replace(plan, batch=()).weights == 1


def test_a_simdgroup_decodes_a_step_of_k_of_a_tiles_rows() -> None:
    problem = Problem(m=100, n=70, k=256, group_size=32)
    plan = DequantizePlan(problem=problem, chunk=64)
    longer = replace(plan, problem=replace(problem, group_size=64))

    assert plan.chunks == ((0, 64, 0, 256), (64, 6, 0, 256))
    assert [plan.decode_threads(block) for block in plan.chunks] == [
        (32 * 2 * 8, 128),
        (32 * 1 * 8, 128),
    ]
    assert longer.decode_threads((64, 6, 0, 128)) == (64, 64)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_only_packed_weights_that_are_not_transposed_are_decoded_in_a_batch(
    batch: int, transposed: bool, layout: str
) -> None:
    problem = Problem(m=100, n=70, k=256, layout=layout, batch=batch)
    if batch > 1 and (transposed or layout == "mlx"):
        with pytest.raises(ValueError, match="batch=3, expected one weight, or packed"):
            dequantize_plan(problem, transposed=transposed)
        return

    plan = dequantize_plan(problem, transposed=transposed)

    # Those of a batch are stacked, each with the rows of three tiles.
    assert plan.rows == (70 if batch == 1 else 3 * 96)
    assert plan.chunks == ((0, plan.rows, 0, 256),)
    assert plan.chunk == (96 if transposed else 256)


def test_a_batch_is_decoded_within_the_memory_with_the_rows_of_its_padding() -> None:
    problem = Problem(m=1, n=33, k=2**17, layout="marlin", batch=64)

    plan = dequantize_plan(problem, transposed=False)

    # 64 weights of 64 rows in 2 bytes: 2**13 bytes of a column, of 2**28.
    assert (plan.chunk, plan.temporary_bytes) == (2**15, 2**28)


def test_threadgroups_of_experts_have_threads_that_32_bits_count() -> None:
    def planned(experts: int) -> MetalGatherPlan:
        gather = GatherProblem(problem=Problem(m=9, n=64, k=64), experts=experts)
        return MetalGatherPlan(
            gather=gather,
            fragments_m=1,
            simdgroups_m=1,
            simdgroups_k=2,
            dot_rows=0,
            operand="offset",
        )

    # Two tiles of columns each, and 2**31 threads in threadgroups of 256.
    assert planned(2**22 - 1).num_threadgroups == 2**23 - 2
    with pytest.raises(ValueError, match="8388608 threadgroups, expected 1 to 8388607"):
        planned(2**22)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"experts": 0}, "experts=0, expected at least 1"),
        ({"pairs_per_row": -1}, "pairs_per_row=-1 does not divide 12 pairs"),
        ({"pairs_per_row": 5}, "pairs_per_row=5 does not divide 12 pairs"),
        ({"gate": "gelu"}, r"gate='gelu' is not None or one of \('silu', 'swiglu_oai'"),
    ],
)
def test_what_is_no_product_of_experts_is_refused(
    fields: dict[str, Any], words: str
) -> None:
    good: dict[str, Any] = {"problem": Problem(m=12, n=64, k=64), "experts": 1}
    least = GatherProblem(**good)
    assert (least.is_fused, least.weights, least.pairs_per_row) == (False, 1, 0)
    assert replace(least, pairs_per_row=12, bias=True).is_fused
    assert replace(least, gate="swiglu_oai").weights == 2

    with pytest.raises(ValueError, match=words):
        GatherProblem(**good | fields)


def test_fields_that_are_left_out_change_nothing() -> None:
    assert repr(Epilogue()) == (
        "Epilogue(bias=False, activation='none', multiply=False, residual=False, "
        "parts=(), gated=False, rotation=None)"
    )
    assert Rotation(64, 128).explain() == "rotated in heads of 64 up to column 128"
    rotation = Heads(heads=1, kv_heads=1, features=64, columns=192).rotation
    assert rotation == Rotation(64, 128, per_row=True)
    assert not Rotation(64, 128).per_row


def test_a_rotation_says_its_heads_factor_and_norm() -> None:
    rotation = Rotation(64, 128, norm=1e-6, queries=64, factor=1.25)

    assert Epilogue(bias=True, rotation=rotation, parts=(128, 64)).explain() == (
        "y + bias rotated in heads of 64 up to column 128, times 1.25, normalized "
        "before (eps 1e-06) in parts of 128, 64"
    )
