"""The scheduler's choice is valid, explained, cached and keeps the user's wishes."""

import subprocess
import sys
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import KNOWN_DEVICES, devices, plans, problems

from mlx_marlin import scheduler
from mlx_marlin.device import DEFAULT, Device
from mlx_marlin.plan import GEMV_ROWS, PARTITIONS, Plan
from mlx_marlin.problem import Problem
from mlx_marlin.scheduler.candidates import candidates

M3_MAX = Device.named("Apple M3 Max")
LARGE = problems(max_m=300, max_n=40_000, max_k=30_000)


@pytest.mark.parametrize("chip", KNOWN_DEVICES, ids=lambda chip: chip.variant)
@given(problem=LARGE)
def test_every_chip_gets_a_plan_for_every_problem(
    chip: Device, problem: Problem
) -> None:
    plan = scheduler.choose(problem, chip)

    assert plan.problem == problem
    assert plan.idle == 0
    assert (plan.kernel == "gemv") == (problem.m <= GEMV_ROWS[problem.dtype])


@given(LARGE, devices())
def test_the_choice_is_cheapest_and_a_split_gains_more_than_the_models_error(
    problem: Problem, chip: Device
) -> None:
    def doubted(plan: Plan) -> float:
        seconds = scheduler.predict(plan, chip).seconds
        return seconds * (1 + scheduler.MODEL_ERROR) if plan.is_split else seconds

    chosen = doubted(scheduler.choose(problem, chip))
    cheapest = min(doubted(plan) for plan in candidates(problem, chip, {}))

    assert chosen == pytest.approx(cheapest, rel=1e-9)


@given(LARGE, devices())
def test_no_simdgroup_is_without_a_trip_of_its_own(
    problem: Problem, chip: Device
) -> None:
    plan = scheduler.choose(problem, chip)

    for split in range(plan.k_parallel):
        unit = plan.unit(split)
        trips = -(-(unit.k_stop - unit.k_start) // plan.tile.k)
        assert trips >= plan.simdgroups_k


@given(plans(), devices())
def test_a_prediction_is_never_faster_than_memory(plan: Plan, chip: Device) -> None:
    prediction = scheduler.predict(plan, chip)

    floor = plan.problem.bytes / (chip.bandwidth_gbs * 1e9)
    assert prediction.seconds > floor
    assert prediction.stretch >= 1 - 1e-9
    assert prediction.bound in {"memory", "issue", "loads"}
    assert "model, not measured" in prediction.explain()


@pytest.mark.parametrize(
    ("rows", "tile_m", "fragments_m", "simdgroups_m"),
    [
        (6, 8, 1, 1),
        (8, 8, 1, 1),
        (9, 16, 2, 1),
        (16, 16, 2, 1),
        (17, 32, 2, 2),
        (24, 32, 2, 2),
        (25, 32, 2, 2),
        (33, 48, 2, 3),
        (64, 64, 2, 4),
        (65, 64, 2, 4),
        (1000, 64, 2, 4),
    ],
)
def test_rows_choose_the_tile(
    rows: int, tile_m: int, fragments_m: int, simdgroups_m: int
) -> None:
    plan = scheduler.choose(Problem(m=rows, n=4096, k=4096), M3_MAX)

    assert plan.kernel == "gemm_register"
    assert plan.tile.m == tile_m
    assert (plan.fragments_m, plan.simdgroups_m) == (fragments_m, simdgroups_m)
    assert plan.subtract == (fragments_m == 2)


def test_the_model_meets_the_published_calibration_of_its_study() -> None:
    # 5120→17408 on M3 Max with perfect balance: 0.9 of the bandwidth below the
    # issue limit, 16 slots a matrix product and 0.6 of the others above it.
    few = scheduler.predict(
        scheduler.choose(Problem(m=8, n=17408, k=5120), M3_MAX), M3_MAX
    )
    many = scheduler.predict(
        scheduler.choose(Problem(m=16, n=17408, k=5120), M3_MAX), M3_MAX
    )

    assert few.bound == "memory"
    assert few.memory == pytest.approx(1.37e-4, rel=0.01)
    assert many.bound == "issue"
    assert many.issue == pytest.approx(2.38e-4, rel=0.01)


@pytest.mark.parametrize("rows", [4, 16, 64])
def test_plenty_of_tiles_are_data_parallel(rows: int) -> None:
    plan = scheduler.choose(Problem(m=rows, n=40 * 32 * 8, k=4096), M3_MAX)

    assert plan.strategy == "data_parallel"
    assert plan.dispatches == 1


def test_few_tiles_and_a_long_k_are_split_over_the_cores() -> None:
    plan = scheduler.choose(Problem(m=16, n=256, k=16384), M3_MAX)

    assert plan.m_tiles * plan.n_tiles == 8
    assert plan.strategy == "stripe"
    assert plan.units >= 40
    assert plan.dispatches == 2


def test_a_small_product_stays_in_one_dispatch() -> None:
    plan = scheduler.choose(Problem(m=8, n=576, k=576), M3_MAX)

    assert plan.dispatches == 1
    assert plan.simdgroups_k > 1


@st.composite
def _wishes(draw: st.DrawFn) -> tuple[Problem, scheduler.Wishes]:
    """Draws a problem and some fields of one of its plans."""
    problem = draw(problems())
    plan = draw(plans(of=st.just(problem)))
    fields = draw(st.sets(st.sampled_from(["subtract", "partition"])))
    if draw(st.booleans()):
        fields |= {"kernel", "fragments_m", "simdgroups_m", "simdgroups_k"}
        if draw(st.booleans()):  # counts of units make sense for these tiles only
            fields |= {"strategy", "partition", "k_parallel", "num_threadgroups"}
    return problem, {name: getattr(plan, name) for name in fields}  # type: ignore[return-value]


@given(_wishes(), devices())
def test_wishes_are_kept(asked: tuple[Problem, scheduler.Wishes], chip: Device) -> None:
    problem, wishes = asked
    plan = scheduler.make(problem, device=chip, **wishes)

    assert {name: getattr(plan, name) for name in wishes} == wishes


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_wished_partition_reaches_the_plan(partition: str) -> None:
    plan = scheduler.make(
        Problem(m=8, n=224, k=64),
        strategy="stripe",
        partition=partition,  # type: ignore[arg-type]
        num_threadgroups=5,
    )

    counts = [end - begin for begin, end in map(plan.range, range(5))]
    expected = {"balanced": [1, 1, 2, 1, 2], "ceil": [2, 2, 2, 1, 0]}
    assert counts == expected[partition]


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"kernel": "gemv"}, "at most 5 rows"),
        ({"kernel": "staged"}, "kernel='staged'"),
        ({"strategy": "diagonal"}, "strategy='diagonal'"),
        ({"fragments_m": 4}, "fragments_m=4"),
        ({"simdgroups_m": 0}, "m >= 1"),
        ({"simdgroups_k": 16}, "simdgroups_k=16"),
        ({"k_parallel": 0}, "k_parallel=0"),
        ({"k_parallel": 99}, "k_parallel=99"),
        ({"num_threadgroups": 0}, "num_threadgroups=0"),
        ({"strategy": "data_parallel", "num_threadgroups": 3}, "num_threadgroups=3"),
        ({"strategy": "data_parallel", "k_parallel": 2}, "k_parallel=2"),
    ],
)
def test_an_impossible_wish_is_refused_with_its_value(
    wishes: scheduler.Wishes, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        scheduler.make(Problem(m=8, n=256, k=512), **wishes)


def test_a_cached_choice_takes_less_than_five_microseconds() -> None:
    problem = Problem(m=8, n=4096, k=4096)
    again = Problem(m=8, n=4096, k=4096)  # equal, not identical: as in a call
    scheduler.choose(problem, M3_MAX)
    best = min(
        timeit.repeat(lambda: scheduler.choose(again, M3_MAX), number=1000, repeat=20)
    )

    assert best / 1000 < 5e-6


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (1, "1 row is bound by reading the weight, 25.6 us by the model"),
        (2, "2 rows are bound by reading the weight: on M3 stock MLX reads it once"),
        (3, "the model sees no gain"),
        (26, "26 rows are close to stock MLX's tile of 32"),
        (32, "32 rows are close to stock MLX's tile of 32"),
        (65, "65 rows are more than 64"),
    ],
)
def test_stock_serves_where_the_model_sees_no_gain(rows: int, words: str) -> None:
    reason = scheduler.stock_reason(Problem(m=rows, n=4096, k=4096), M3_MAX)

    assert reason is not None
    assert words in reason
    assert "model" in reason


@pytest.mark.parametrize("rows", [2, 3])
def test_few_rows_stay_ours_where_stock_reads_the_weight_for_each(rows: int) -> None:
    problem = Problem(m=rows, n=4096, k=4096)

    assert scheduler.stock_reason(problem, Device.named("M1 Max")) is None


@pytest.mark.parametrize("rows", [4, 8, 9, 16, 24, 25, 33, 50, 64])
def test_ours_serves_the_rows_between(rows: int) -> None:
    problem = Problem(m=rows, n=4096, k=4096)

    assert scheduler.stock_reason(problem, M3_MAX) is None
    assert scheduler.stock_reason(problem, DEFAULT) is None


def test_tensor_units_serve_from_nine_rows() -> None:
    chip = Device.named("Apple M5 Max")
    reasons = [
        scheduler.stock_reason(Problem(m=rows, n=4096, k=4096), chip)
        for rows in (4, 8, 9, 16)
    ]

    assert reasons[:2] == [None, None]
    assert all("tensor units" in (reason or "") for reason in reasons[2:])


@given(problems(layouts=st.just("marlin")), devices())
def test_a_packed_weight_is_never_handed_over(problem: Problem, chip: Device) -> None:
    assert scheduler.stock_reason(problem, chip) is None


def test_planning_needs_neither_mlx_nor_numpy() -> None:
    program = """
import sys
sys.modules["mlx"] = sys.modules["numpy"] = None
from mlx_marlin import device, scheduler
from mlx_marlin.problem import Problem
print(scheduler.choose(Problem(m=8, n=512, k=512), device.Device.named("M1")).explain())
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )

    assert answer.stdout.startswith("gemm_register 8x32x64"), answer.stderr
