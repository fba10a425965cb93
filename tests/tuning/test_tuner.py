"""Which plan the tuner keeps, and which plans it measures."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from itertools import count, pairwise, product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin import guard
from mlx_marlin.backends import graph, planner
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal import backend as metal
from mlx_marlin.measure import rows, tuner
from mlx_marlin.measure.clocks import Clock
from mlx_marlin.measure.rows import ProductRow
from mlx_marlin.measure.timing import Spread
from mlx_marlin.measure.tuner import Arm, Outcome
from mlx_marlin.planning.measurement import STOCK, label
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from support.timed_products import LARGE, M3_MAX, SMALL, exact_product_of


@pytest.mark.parametrize(
    ("chip", "m", "kinds"), [("M3 Max", 8, 4), ("NVIDIA H200", 16, 6)]
)
def test_the_shortlist_has_the_first_ones_and_every_kinds_first(
    chip: str, m: int, kinds: int
) -> None:
    problem = replace(LARGE, m=m, layout="marlin")
    candidates = planner.compare(problem, device=named(chip)).candidates
    firsts: dict[str, Plan] = {}
    for each in candidates:
        firsts.setdefault(each.plan.strategy, each.plan)
        firsts.setdefault(each.plan.kernel, each.plan)

    plans = tuner.shortlist(candidates, best=2)

    assert plans[:2] == [each.plan for each in candidates[:2]]
    assert len(firsts) >= kinds
    assert {plans[0], plans[1], *firsts.values()} == {*plans}
    order = [each.plan for each in candidates]
    assert all(order.index(a) < order.index(b) for a, b in pairwise(plans))


@pytest.mark.parametrize("m", [1, 4, 8, 20, 30, 48])
def test_the_models_answer_stands_first(m: int) -> None:
    problem = replace(LARGE, m=m)

    arms = tuner.arms(problem, M3_MAX, times_stock=True)

    stays = metal.handover(problem, M3_MAX) is not None
    assert arms[0] == (None if stays else planner.choose(problem, M3_MAX))
    assert arms.count(None) == 1
    assert len({tuner.name(arm) for arm in arms}) == len(arms)


def test_stock_is_no_choice_for_a_packed_weight_or_without_its_time() -> None:
    packed = replace(LARGE, layout="marlin")

    assert None not in tuner.arms(packed, M3_MAX, times_stock=True)
    assert None not in tuner.arms(LARGE, M3_MAX, times_stock=False)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    """Makes a clock that knows every arm's time; products are exact and instant."""

    def product(plan: Plan) -> graph.Product:
        return lambda *_: exact_product_of(plan.problem)

    monkeypatch.setattr(graph, "product", product)

    def clock(time: Callable[[Arm], float], noise: float = 0.1e-6) -> Clock:
        def measure(products: Mapping[Arm, object], _: object) -> dict[Arm, Spread]:
            # Not in the order in which they are given.
            return {
                arm: Spread(median=time(arm), range=noise)
                for arm in reversed([*products])
            }

        return Clock(
            name="wall time",
            measure=measure,
            measure_independent=measure,
            weights=lambda _: 1,
            times_stock=True,
        )

    return clock


def second_plan(problem: Problem) -> Plan:
    arms = tuner.arms(problem, M3_MAX, times_stock=True)
    return [arm for arm in arms if arm is not None][1]


def test_without_a_clear_winner_stock_and_the_models_plan_stay(
    fake: Callable[..., Clock],
) -> None:
    for m in (1, 8):  # the model: stock, ours
        problem = replace(SMALL, m=m, n=2048, k=2048)
        falling = iter(np.linspace(20e-6, 19.5e-6, 100))
        clock = fake(lambda _, times=falling: float(next(times)), noise=1e-6)

        outcome = tuner.tune(problem, M3_MAX, clock)

        assert outcome.result is not None
        assert outcome.result.stock  # a draw
        assert outcome.result.plan == planner.choose(problem, M3_MAX)


@pytest.mark.parametrize(
    ("stock_us", "reason"),
    [(15, None), (8, "measured here: stock MLX took 8.0 us, our best 10.0 us")],
)
def test_a_clear_winner_serves_and_our_best_is_kept(
    fake: Callable[..., Clock], stock_us: int, reason: str | None
) -> None:
    best = second_plan(LARGE)
    times = {best: 10e-6, None: stock_us * 1e-6}

    result = tuner.tune(LARGE, M3_MAX, fake(lambda arm: times.get(arm, 20e-6))).result

    assert result is not None
    assert (result.plan, result.stock) == (best, reason is not None)
    assert result.reason == reason
    assert result.medians_us[label(best)] == 10
    assert result.medians_us[STOCK] == stock_us
    assert {*result.medians_us.values()} == {10, stock_us, 20}
    assert result.clock == "wall time"


def test_a_plan_whose_product_is_wrong_never_wins(
    fake: Callable[..., Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, right = second_plan(LARGE), graph.product
    condemned: list[Any] = []
    monkeypatch.setattr(guard, "condemn", lambda plan, why: condemned.append(plan))
    monkeypatch.setattr(
        graph,
        "product",
        lambda plan: (
            (lambda x, *_: mx.zeros((LARGE.m, LARGE.n), x.dtype))
            if plan == wrong
            else right(plan)
        ),
    )

    outcome = tuner.tune(
        LARGE, M3_MAX, fake(lambda arm: 1e-6 if arm == wrong else 20e-6)
    )

    assert outcome.wrong == (wrong,)
    assert condemned == [wrong]
    assert outcome.result is not None
    assert outcome.result.plan == planner.choose(LARGE, M3_MAX)


def test_each_step_of_tuning_is_told(fake: Callable[..., Clock]) -> None:
    clock, ticks = fake(lambda arm: 20e-6), count()

    tuner.tune(LARGE, M3_MAX, clock, lambda: next(ticks))

    assert next(ticks) == tuner.steps(LARGE, M3_MAX, clock) > 2


def test_nothing_is_kept_if_no_product_is_right(
    fake: Callable[..., Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "product", lambda _: lambda x, *_: mx.zeros_like(x))

    outcome = tuner.tune(LARGE, M3_MAX, fake(lambda _: 1e-6))

    assert outcome.result is None
    assert {*outcome.wrong} == {arm for arm in outcome.arms if arm is not None}


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("stock_us", [None, 9.0, 10.3, 10.31, 20.0])
def test_stock_serves_unless_ours_is_faster_beyond_draw_and_noise(
    layout: str, stock_us: float | None
) -> None:
    ours, other = [
        each.plan
        for each in planner.compare(replace(SMALL, layout=layout)).candidates[:2]
    ]
    for noisy, is_stock_noisy, is_final in product((False, True), repeat=3):
        medians = {ours: 10.0, other: 33.123456} | (
            {None: stock_us} if stock_us else {}
        )
        ranges = {ours: 0.11 if noisy else 0.09, None: 0.11 if is_stock_noisy else 0.09}
        spreads = {
            arm: Spread(median=us * 1e-6, range=us * 1e-6 * ranges.get(arm, 9.0))
            for arm, us in medians.items()
        }

        result = tuner.verdict(ours, spreads, "a clock", is_final)

        is_noise = noisy or (is_stock_noisy and stock_us is not None)
        if is_noise and not is_final:
            assert result is None
            continue
        assert result is not None
        faster = not is_noise and stock_us in (10.31, 20.0)  # by 3 percent
        assert result.stock == (layout == "mlx" and stock_us is not None and not faster)
        assert result.medians_us == {label(ours): 10.0, label(other): 33.1235} | (
            {STOCK: stock_us} if stock_us else {}
        )
        assert (result.plan, result.clock) == (ours, "a clock")
        assert result.date == date.today().isoformat()


def test_an_outcome_has_a_row_of_each_arm_whose_product_was_right(
    fake: Callable[..., Clock],
) -> None:
    right, wrong = [each.plan for each in planner.compare(SMALL).candidates[:2]]
    arms: dict[Arm, Spread] = {
        arm: Spread(median=i, range=i / 8, samples=i + 10, drift=i / 4)
        for i, arm in enumerate((right, None, wrong), 1)
    }
    outcome = Outcome(arms=arms, wrong=(wrong,), result=None)

    assert outcome.rows(SMALL, fake(lambda _: 0.0)) == [
        ProductRow(
            problem=SMALL,
            arm=name,
            clock=rows.CHAIN,
            timing=rows.Timing(
                seconds=i, method="wall time", range=i / 8, samples=i + 10, drift=i / 4
            ),
            plan=arm,
        )
        for i, name, arm in (
            (1, f"{rows.CANDIDATE}: {label(right)}", right),
            (2, rows.STOCK, None),
        )
    ]
    kept = tuner.verdict(right, {right: Spread(median=1.0)}, "")
    assert outcome.is_noisy
    assert not replace(outcome, result=kept).is_noisy
    assert not replace(outcome, wrong=(right, wrong)).is_noisy
