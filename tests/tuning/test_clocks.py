"""The clocks of products: wall time on a GPU, the cost model in the emulator."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

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


@pytest.mark.parametrize(
    ("seconds_each", "seconds", "tried", "length"),
    [((2e-3, 1e-3), 0.4, [1, 4], 20), ((0.02, 0.01), 1.0, [1], 5)],
)
def test_the_quickest_product_says_how_long_all_chains_are(
    seconds_each: tuple[float, float],
    seconds: float,
    tried: list[int],
    length: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [(mx.zeros(1),), (mx.ones(1),)]
    inputs: Any = SimpleNamespace(x=mx.zeros(1), weights=weights)
    products: dict[str, Any] = dict(zip("ab", seconds_each, strict=True))
    taken: list[tuple[float, int]] = []

    def sampler(product: Any, x: mx.array, weights: Any, length: int) -> float:
        assert x is inputs.x
        taken.append((product, length))
        return float(product)

    def interleaved(samples: dict[str, timing.Sample], **given: Any) -> Any:
        assert given == {"seconds": seconds, "least": 10}
        return {arm: timing.Spread(median=each()) for arm, each in samples.items()}

    monkeypatch.setattr(timing, "interleaved", interleaved)
    measured = clocks.wall_time(products, inputs, seconds, sampler, rounds=10)

    assert {arm: each.median for arm, each in measured.items()} == products
    one, two = seconds_each
    assert taken == [
        *((one, 1), (two, 1)),  # compiles
        *((each, count) for each in seconds_each for count in tried),
        *((one, length), (two, length)),
    ]


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
