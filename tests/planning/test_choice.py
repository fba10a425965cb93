"""The scheduler's choice is valid, explained, cached and keeps the user's wishes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stock.prediction import stock_prediction
from mlx_marlin.backends import planner, registry
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal import backend as metal
from mlx_marlin.backends.metal.candidates import plans as plans_of
from mlx_marlin.backends.metal.choice import candidates
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.kernel_limits import (
    GEMV_ROWS,
    default_kernel,
    operand_of,
    product_registers,
)
from mlx_marlin.backends.metal.main_loop import level_seconds
from mlx_marlin.planning import search
from mlx_marlin.planning.explicit import ACCEPTED, PlanOverrides
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.work import PARTITIONS, STRATEGIES, Strategy
from support.processes import run_python
from support.profiles import sampled
from support.strategies import ANY_FORMAT, KNOWN_DEVICES, devices, plans, problems

M3_MAX = Device.named("Apple M3 Max")
LARGE = problems(max_m=300, max_n=40_000, max_k=30_000, formats=ANY_FORMAT)
STREAMS = ("stream_k", "hybrid")


@sampled(9)
@pytest.mark.parametrize("chip", KNOWN_DEVICES, ids=lambda chip: chip.variant)
@given(problem=LARGE)
def test_every_chip_gets_a_plan_for_every_problem(
    chip: Device, problem: Problem
) -> None:
    plan = planner.choose(problem, chip)

    assert plan.problem == problem
    assert plan.work.idle == 0
    assert plan.reduction != "atomic"
    few = problem.m <= GEMV_ROWS[problem.dtype]
    operand = operand_of(problem, chip, 0)
    fits = product_registers(problem, 0, operand) <= chip.core.thread_registers
    assert (plan.kernel == "gemv") == (few and fits)


@given(LARGE, devices())
def test_the_choice_is_cheapest_and_a_split_gains_more_than_the_models_error(
    problem: Problem, chip: Device
) -> None:
    def doubted(plan: Plan) -> float:
        margins = plan.is_split + plan.has_tensor_operations
        return planner.predict(plan, chip).seconds * (1 + search.MODEL_ERROR) ** margins

    chosen = doubted(planner.choose(problem, chip))
    compared = (each.plan for each in candidates(problem, chip, {}))
    cheapest = min(map(doubted, compared))

    assert chosen == pytest.approx(cheapest, rel=1e-9)


@given(LARGE, devices())
def test_candidates_are_different_plans_of_all_fitting_strategies(
    problem: Problem, chip: Device
) -> None:
    compared = list(plans_of(problem, chip, default_kernel(problem, chip)))

    assert len({*compared}) == len(compared) <= 40
    first, limit = compared[0], chip.core.thread_registers
    taken = product_registers(problem, first.fragments_m, first.operand, True)
    ranges = ["stripe"] * (taken <= limit)
    assert {"data_parallel", *ranges} <= {plan.strategy for plan in compared}


@given(LARGE, devices())
def test_a_mean_split_has_a_trip_for_each_simdgroup(
    problem: Problem, chip: Device
) -> None:
    plan = planner.choose(problem, chip)

    trips = -(-problem.k // 64) * plan.work.tiles
    along_k = plan.simdgroups_k // plan.simdgroups_n
    assert trips >= plan.work.pieces * along_k


@given(plans(of=problems(formats=ANY_FORMAT)), devices())
def test_cores_are_no_less_busy_than_predicted(plan: Plan, chip: Device) -> None:
    loads = []
    for threadgroup in range(plan.num_threadgroups):
        splits = [*plan.work.splits(threadgroup)]
        loads.append(
            sum(
                split.k_tile_count * plan.columns_of(split.tile) // 32
                for split in splits
            )
        )
    working = [load for load in loads if load]
    dealt = [sum(working[core :: chip.cores]) for core in range(chip.cores)]

    predicted = planner.predict(plan, chip).busy

    assert 0 < predicted <= 1 + 1e-9
    assert predicted <= sum(loads) / chip.cores / max(dealt) + 1e-9


SHAPES = [(17408, 5120), (9728, 2560), (11008, 2048), (11008, 4096)]
"""k, n of layers whose tiles do not divide by the cores of most chips."""


@pytest.mark.parametrize("chip", ["Apple M3 Max", "Apple M4 Pro"])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_awkward_shapes_keep_nine_tenths_of_the_cores_busy(
    k: int, n: int, chip: str
) -> None:
    device = Device.named(chip)
    for group_size in (32, 64, 128):
        problem = Problem(m=16, n=n, k=k, group_size=group_size)

        plan = planner.choose(problem, device)

        assert planner.predict(plan, device).busy >= 0.9
        ranges = (plan.work.range(index) for index in range(plan.num_threadgroups))
        lengths = [end - begin for begin, end in ranges]
        dealt = [sum(lengths[core :: device.cores]) for core in range(device.cores)]
        assert sum(dealt) / len(dealt) / max(dealt) >= 0.9


def test_a_small_product_is_not_split_for_less_than_the_error_of_the_model() -> None:
    choice = planner.compare(Problem(m=16, n=896, k=3584, group_size=64), device=M3_MAX)
    split = min(choice.candidates, key=lambda candidate: candidate.seconds)

    # 28 tiles leave 12 of 40 cores idle; a second dispatch takes as long as they save.
    assert (choice.plan.dispatches, choice.prediction.busy) == (1, 0.7)
    assert split.plan.dispatches == 2
    assert split.prediction.busy > 0.9
    assert split.seconds > choice.prediction.seconds / (1 + search.MODEL_ERROR)


@given(plans(of=problems(formats=ANY_FORMAT)), devices())
def test_a_prediction_counts_dispatches_and_is_never_faster_than_memory(
    plan: Plan, chip: Device
) -> None:
    prediction = planner.predict(plan, chip)

    hidden = prediction.seconds - prediction.independent_seconds
    assert hidden == pytest.approx(plan.dispatches * level_seconds(chip))
    assert prediction.seconds > plan.problem.bytes / (chip.bandwidth_gbs * 1e9)
    assert prediction.stretch >= 1 - 1e-9
    assert prediction.bound in {"memory", "issue", "loads"}
    assert f"{prediction.seconds * 1e6:.1f} us in a chain" in prediction.explain()
    assert "us independently (model, not measured)" in prediction.explain()


@pytest.mark.parametrize(
    ("rows", "tile_m", "fragments_m", "simdgroups_m"),
    [
        (6, 8, 1, 1),
        (9, 16, 2, 1),
        (16, 16, 2, 1),
        (17, 32, 2, 2),
        (33, 48, 2, 3),
        (65, 64, 2, 4),
        (1000, 64, 2, 4),
    ],
)
def test_rows_choose_the_tile(
    rows: int, tile_m: int, fragments_m: int, simdgroups_m: int
) -> None:
    plan = planner.choose(Problem(m=rows, n=4096, k=4096), M3_MAX)

    assert plan.kernel == "gemm_register"
    assert plan.tile.m == tile_m
    assert (plan.fragments_m, plan.simdgroups_m) == (fragments_m, simdgroups_m)
    assert plan.operand == ("least_offset" if fragments_m == 2 else "offset")


@pytest.mark.parametrize(
    ("m", "n", "k", "is_split"),
    [
        (4, 10240, 4096, False),  # plenty of tiles are computed whole
        (16, 256, 16384, True),  # few tiles and a long k: split over the cores
        (8, 576, 576, False),  # a second dispatch would take as long as it saves
    ],
)
def test_few_tiles_and_a_long_k_are_split(
    m: int, n: int, k: int, is_split: bool
) -> None:
    plan = planner.choose(Problem(m=m, n=n, k=k), M3_MAX)

    assert plan.is_split == is_split
    assert plan.dispatches == 1 + is_split
    assert not is_split or plan.num_threadgroups >= 40


WISHED = {
    "strategy": "strategy",
    "partition": "partition",
    "k_parallel": "slices",
    "num_threadgroups": "threadgroups",
    "whole": "whole",
    "minimum": "minimum",
    "groups": "groups",
}
"""Fields of `PlanOverrides` that are those of `Work`, by their names there."""


def field_of(plan: Plan, wish: str) -> object:
    return getattr(plan.work, WISHED[wish]) if wish in WISHED else getattr(plan, wish)


@given(problems(formats=ANY_FORMAT), devices(), st.sampled_from(STRATEGIES))
def test_every_strategy_can_be_had(
    problem: Problem, chip: Device, strategy: Strategy
) -> None:
    one_tile = planner.make(problem, strategy="data_parallel").work.tiles == 1
    columns = -(-problem.n // 32)
    if (strategy == "hybrid" and one_tile) or (strategy == "hytis" and columns < 3):
        with pytest.raises(ValueError, match=rf"{strategy}|simdgroups_n|whole"):
            planner.make(problem, device=chip, strategy=strategy)
        return

    plan = planner.make(problem, device=chip, strategy=strategy)

    assert plan.strategy == strategy


@st.composite
def _overrides(draw: st.DrawFn) -> tuple[Problem, PlanOverrides]:
    """Draws a problem and some fields of one of its plans."""
    problem = draw(problems(formats=ANY_FORMAT))
    plan = draw(plans(of=st.just(problem)))
    fields = draw(st.sets(st.sampled_from(["operand"])))
    if draw(st.booleans()):
        fields |= {"kernel", "fragments_m", "simdgroups_m", "simdgroups_k"}
        if draw(st.booleans()):  # counts of tiles make sense for these tiles only
            fields |= {"strategy", "reduction", *ACCEPTED[plan.work.strategy]}
    return problem, {name: field_of(plan, name) for name in fields}  # type: ignore[return-value]


@given(_overrides(), devices())
def test_wishes_are_kept(asked: tuple[Problem, PlanOverrides], chip: Device) -> None:
    problem, overrides = asked
    plan = planner.make(problem, device=chip, **overrides)

    assert {name: field_of(plan, name) for name in overrides} == overrides


@pytest.mark.parametrize(
    ("overrides", "strategies"),
    [
        ({"partition": "ceil"}, {"stripe"}),
        ({"k_parallel": 3}, {"stripe", "split_k"}),
        ({"num_threadgroups": 7}, {"stripe", "stream_k", "hybrid"}),
        ({"minimum": 2}, {"stream_k", "hybrid"}),
        ({"groups": 2, "num_threadgroups": 8}, {"stream_k"}),
        ({"whole": 2, "groups": 1}, {"hybrid"}),
        ({"simdgroups_n": 2}, {"hytis"}),
        ({"groups": 4}, {"stream_k", "hybrid"}),
        ({"minimum": 16}, {"stream_k", "hybrid"}),
    ],
)
def test_a_wish_alone_leaves_the_strategies_that_take_it(
    overrides: PlanOverrides, strategies: set[str]
) -> None:
    problem = Problem(m=8, n=256, k=1024)

    for chip in ("Apple M1", "Apple M3 Max"):
        plan = planner.make(problem, device=Device.named(chip), **overrides)

        assert plan.strategy in strategies
        assert {name: field_of(plan, name) for name in overrides} == overrides


def test_a_wish_is_kept_where_one_of_the_strategies_cannot_have_it() -> None:
    # 20 tiles on 8 cores: `hybrid` would begin with 8 whole ones.
    problem = Problem(m=8, n=640, k=1024)

    plan = planner.make(problem, device=Device.named("Apple M1"), num_threadgroups=7)

    assert plan.num_threadgroups == 7


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_wished_partition_reaches_the_plan(partition: str) -> None:
    plan = planner.make(
        Problem(m=8, n=224, k=64),
        strategy="stripe",
        partition=partition,  # type: ignore[arg-type]
        num_threadgroups=5,
    )

    counts = [end - begin for begin, end in map(plan.work.range, range(5))]
    expected = {"balanced": [1, 1, 2, 1, 2], "ceil": [2, 2, 2, 1, 0]}
    assert counts == expected[partition]


@pytest.mark.parametrize("strategy", STREAMS)
def test_streams_have_eight_trips_a_split_whatever_the_group_is(strategy: str) -> None:
    for group_size, k_tiles in ((32, 8), (64, 8), (128, 4)):
        problem = Problem(m=8, n=1024, k=8192, group_size=group_size)

        plan = planner.make(problem, strategy=strategy)  # type: ignore[arg-type]

        assert plan.work.minimum == k_tiles


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"kernel": "gemv"}, "at most 5 rows"),
        ({"reduction": "workspace", "strategy": "data_parallel"}, "are not split"),
        ({"simdgroups_m": 0}, "m >= 1"),
        ({"simdgroups_k": 0}, "simdgroups_k=0"),
        ({"strategy": "diagonal"}, "strategy='diagonal'"),
        ({"k_parallel": 0}, "k_parallel=0"),
        ({"num_threadgroups": 0}, "num_threadgroups=0"),
        ({"strategy": "stream_k", "groups": 3}, "groups=3"),
        ({"k_parallel": 99}, "k_parallel=99"),
        ({"strategy": "data_parallel", "num_threadgroups": 3}, "num_threadgroups=3"),
        ({"strategy": "data_parallel", "k_parallel": 2}, "k_parallel=2"),
        ({"strategy": "stream_k", "k_parallel": 2}, "does not take k_parallel=2"),
        ({"strategy": "stripe", "groups": 2}, "does not take groups=2"),
        ({"k_parallel": 2, "minimum": 3}, "no strategy takes all of k_parallel, min"),
        ({"strategy": "hybrid", "whole": 8}, "whole=8"),
        ({"simdgroups_n": 8}, "whole=1 tiles of simdgroups_n=8 leave no narrow ones"),
        ({"simdgroups_n": 2, "simdgroups_k": 1}, "simdgroups_n=2"),
        ({"simdgroups_n": 0}, "simdgroups_n=0 must be at least 1"),
    ],
)
def test_an_impossible_wish_is_refused_with_its_value(
    overrides: PlanOverrides, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        planner.make(Problem(m=8, n=256, k=512), **overrides)


@pytest.mark.parametrize("chip", ["Apple M1", "NVIDIA H200"])
def test_more_whole_tiles_than_there_are_leave_nothing_to_group(chip: str) -> None:
    with pytest.raises(ValueError, match="whole=16 is not between"):
        planner.make(Problem(m=300, n=32, k=1024), device=named(chip), whole=16)


@pytest.mark.parametrize(("bits", "first"), [(4, 5), (8, 6)])
@pytest.mark.parametrize(("n", "k"), [(17408, 5120), (5120, 17408)])
def test_our_kernels_serve_from_the_rows_that_won_on_the_measured_chip(
    bits: int, first: int, n: int, k: int
) -> None:
    chip = Device.named("M4 Pro")
    served = [
        m
        for m in range(1, 17)
        if not metal.handover(Problem(m=m, n=n, k=k, bits=bits), chip)
    ]

    assert served == [*range(first, 17)]


@pytest.mark.parametrize("name", ["M5", "M5 Pro", "M5 Max"])
@pytest.mark.parametrize(("rows", "least"), [(5, 1.15), (6, 1.4), (8, 1.65), (12, 1.5)])
def test_rows_that_stock_has_no_tensor_kernel_for_are_served_on_m5(
    name: str, rows: int, least: float
) -> None:
    choice = planner.compare(
        Problem(m=rows, n=17408, k=5120), device=Device.named(name)
    )

    assert choice.reason is None
    stock = stock_prediction(choice.plan.problem, choice.device)
    assert least < stock.seconds / choice.prediction.seconds < 2.6


@given(problems(formats=ANY_FORMAT), devices())
def test_packed_weights_and_invariant_products_are_never_handed_over(
    problem: Problem, chip: Device
) -> None:
    if problem.layout == "marlin":
        assert metal.handover(problem, chip) is None
    assert metal.handover(replace(problem, invariant=True), chip) is None


@given(LARGE, devices())
def test_a_comparison_begins_with_the_choice(problem: Problem, chip: Device) -> None:
    choice = planner.compare(problem, device=chip)

    assert choice.plan == choice.candidates[0].plan == planner.choose(problem, chip)
    compared = [*candidates(problem, chip, {})]
    assert len(choice.candidates) == len(compared)
    assert choice.reason == metal.handover(problem, chip)


@pytest.mark.parametrize("chip", [None, "M3 Max", "H200"])
@pytest.mark.parametrize("overrides", [{}, {"strategy": "stream_k"}])
def test_a_comparison_tells_whom_it_compared_for_what(
    chip: str | None, overrides: dict[str, Any]
) -> None:
    problem = Problem(m=9, n=4096, k=512)
    device = None if chip is None else named(chip)

    choice = planner.compare(problem, device=device, **overrides)

    chosen_for = device or registry.default_device()
    assert choice.device == chosen_for
    assert choice.plan == planner.make(problem, device=device, **overrides)
    assert choice.prediction == planner.predict(choice.plan, chosen_for)
    seconds = [each.prediction.seconds for each in choice.candidates]
    assert len(seconds) > 1
    assert seconds == pytest.approx(sorted(seconds))
    strategies = {each.plan.work.strategy for each in choice.candidates}
    assert strategies == {"stream_k"} or not overrides


def test_a_plan_is_for_all_that_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "current", lambda: Device.named("M2"))
    given: dict[str, Any] = {"group_size": 32, "bits": 8, "dtype": "bfloat16"}
    asked = Problem(m=3, n=128, k=256, **given, scale_dtype="bfloat16", batch=2)

    choice = planner.plan(3, 128, 256, **given, batch=2)

    assert (choice.plan.problem, choice.device.name) == (asked, "Apple M2")
    packed = planner.plan(
        3, 128, 256, **given, layout="marlin", chip="M3 Max, 30 cores"
    )
    assert packed.plan.problem == replace(asked, batch=1, layout="marlin")
    assert packed.device == Device.named("M3 Max", 30)
    with pytest.raises(ValueError, match="chip=3, expected a name such as 'Apple M3 M"):
        planner.plan(3, 128, 256, chip=3)  # type: ignore[arg-type]


def test_planning_needs_neither_mlx_nor_numpy() -> None:
    program = """
import sys
sys.modules["mlx"] = sys.modules["numpy"] = None
from mlx_marlin.backends import planner, registry
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal import device
from mlx_marlin.planning.problem import Problem
print(planner.choose(Problem(m=8, n=512, k=512), device.Device.named("M1")).explain())
"""
    answer = run_python(program)

    assert answer.stdout.startswith("gemm_register 8x32x64"), answer.stderr


def test_streams_come_in_groups_where_activations_do_not_stay_near() -> None:
    fields = {"strategy": "stream_k", "num_threadgroups": 160}
    small, large = (
        planner.make(Problem(m=m, n=4096, k=14336), device=M3_MAX, **fields)
        for m in (8, 48)
    )

    assert small.problem.activation_bytes <= 256 * 1024 < large.problem.activation_bytes
    assert (small.work.groups, large.work.groups) == (1, 8)


@pytest.mark.parametrize(
    ("asked", "bits", "group_size", "scales"),
    [
        ({}, 4, 64, "bfloat16"),
        ({"bits": 6, "group_size": 32}, 6, 32, "bfloat16"),
        ({"mode": "mxfp8"}, 8, 32, "uint8"),
        ({"mode": "nvfp4"}, 4, 16, "uint8"),
        ({"mode": "zero_point", "layout": "marlin"}, 4, 64, "bfloat16"),
    ],
)
def test_a_plan_is_made_for_the_format_that_is_asked_for(
    asked: dict[str, Any], bits: int, group_size: int, scales: str
) -> None:
    choice = planner.plan(8, 4096, 4096, dtype="bfloat16", chip="M3", **asked)

    problem = choice.plan.problem
    assert (problem.bits, problem.group_size) == (bits, group_size)
    assert (problem.dtype, problem.scale_dtype) == ("bfloat16", scales)
    assert problem.mode == asked.get("mode", "affine")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mode='q4_0' is not one of \('affine', "):
        planner.plan(8, 64, 64, mode="q4_0")


def test_a_batch_has_no_experiments() -> None:
    """`gemm_staged` takes one weight."""
    several = Problem(m=128, n=4096, k=1024, batch=3)
    assert list(planner.experiments(several, Device.named("M3 Max"))) == []
    assert planner.experiments(replace(several, batch=1), Device.named("M3 Max"))
