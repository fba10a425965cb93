"""The clocks of products: wall time on a GPU, the cost model in the emulator."""

from collections import Counter

import mlx.core as mx
import pytest

from mlx_marlin.backends import planner, selection
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal.device import DEFAULT
from mlx_marlin.measure import clocks, operands, timing, tuner
from support.choose import Choose
from support.marks import needs_emulator
from support.timed_products import LARGE, M3_MAX, SMALL


@pytest.mark.parametrize("sampler", [timing.chain, timing.independent])
def test_wall_time_measures_every_arm_on_all_weights(
    sampler: clocks.Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "LONGEST", 4)
    given = operands.operands(SMALL, 3)
    stock, used = operands.stock_product(SMALL), Counter[int]()

    def counted(x: mx.array, w: mx.array, *rest: mx.array) -> mx.array:
        used[[id(each[0]) for each in given.weights].index(id(w))] += 1
        return stock(x, w, *rest)

    plan = planner.choose(SMALL, M3_MAX)
    measured = clocks.wall_time(
        {None: stock, plan: counted}, given, seconds=0.01, sampler=sampler
    )

    assert [*measured] == [None, plan]
    assert all(each.median > 0 for each in measured.values())
    assert all(each.samples >= timing.ROUNDS for each in measured.values())
    assert {*used} == {0, 1, 2}


@needs_emulator
def test_in_the_emulator_the_clock_is_the_cost_model(backend: Choose) -> None:
    backend("emulator")
    clock = clocks.clock_of(DEFAULT)

    first = tuner.tune(SMALL, DEFAULT, clock)

    assert (clock.name, clock.times_stock) == ("cost model", False)
    assert first == tuner.tune(SMALL, DEFAULT, clock)
    plans = {arm: each.median for arm, each in first.arms.items() if arm is not None}
    inputs = operands.operands(SMALL, 1)
    overlapped = clock.measure_independent(dict.fromkeys(plans, min), inputs)
    for plan, seconds in plans.items():
        predicted = planner.predict(plan, DEFAULT)
        assert seconds == predicted.seconds
        assert overlapped[plan].median == predicted.independent_seconds < seconds


@pytest.mark.parametrize(("on", "chip"), [("metal", "M3 Max"), ("cuda", "NVIDIA H200")])
def test_on_a_gpu_the_clock_is_the_wall_and_times_stock(
    on: str, chip: str, backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend(on)
    monkeypatch.setattr(selection, "missing", lambda: None)

    clock = clocks.clock_of(named(chip))

    assert (clock.name, clock.times_stock) == ("wall time", True)
    assert clock.weights(LARGE) == operands.weight_count(LARGE, named(chip))
