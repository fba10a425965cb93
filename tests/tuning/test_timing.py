"""Samples of times, and the clocks: order, chains, noise, who is the fastest."""

from collections import Counter
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_marlin.backends import planner, selection
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal.device import DEFAULT
from mlx_marlin.measure import clocks, operands, timing, tuner
from mlx_marlin.measure.timing import Spread
from support.choose import Choose
from support.marks import needs_emulator
from support.timed_products import LARGE, M3_MAX, SMALL


def spreads(**medians: float) -> dict[str, Spread]:
    """Returns spreads with a noise of 1."""
    return {name: Spread(median=each, range=1.0) for name, each in medians.items()}


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (spreads(model=10, other=10), "model"),
        (spreads(model=10, other=9), "model"),  # just the noise
        (spreads(model=10, other=8.9), "other"),
        (spreads(model=10, other=5, third=4.5), "other"),  # equal: the first of them
        (spreads(model=10, other=5.6, third=4.5), "third"),
        (spreads(model=4, other=9), "model"),
        (spreads(model=4), "model"),
    ],
)
def test_the_first_that_nothing_beats_by_more_than_the_noise_wins(
    measured: dict[str, Spread], expected: str
) -> None:
    assert timing.winner(measured) == expected


@pytest.mark.parametrize("noisy", ["faster", "slower"])
def test_the_noise_of_either_side_is_doubted(noisy: str) -> None:
    noise = {"faster": 0.1, "slower": 0.1} | {noisy: 3.0}
    faster = Spread(median=8, range=noise["faster"])
    slower = Spread(median=10, range=noise["slower"])

    assert not faster.beats(slower)
    assert faster.beats(replace(slower, median=11.5))


def test_counters_that_differ_at_all_differ() -> None:
    assert Spread(median=9.99).beats(Spread(median=10))
    assert not Spread(median=10).beats(Spread(median=10))


def test_a_spread_is_the_median_and_the_range_of_the_middle_half() -> None:
    # Two outliers of nine move neither.
    spread = Spread.of([5.0, 3.0, 4.0, 1000.0, 1.0, 2.0, 6.0, 7.0, 900.0])

    assert spread == Spread(median=5.0, range=4.0, samples=9)
    assert Spread.of([2.5]) == Spread(median=2.5, range=0.0, samples=1)


class Stopwatch:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def test_every_round_samples_each_arm_once_in_an_order_of_its_own() -> None:
    seen: list[str] = []
    names = "abcd"
    arms = {name: lambda name=name: seen.append(name) or 1.0 for name in names}

    timing.interleaved(arms, seconds=0.0, now=Stopwatch())

    rounds = ["".join(seen[i : i + 4]) for i in range(0, len(seen), 4)]
    assert len(rounds) == timing.ROUNDS
    assert all(sorted(each) == [*names] for each in rounds)
    assert len(set(rounds)) > 2
    first, seen[:] = [*seen], []
    timing.interleaved(arms, seconds=0.0, now=Stopwatch())
    assert seen == first
    seen[:] = []
    timing.interleaved(arms, seconds=0.0, seed=1, now=Stopwatch())
    assert seen != first


@pytest.mark.parametrize(
    ("seconds", "rounds", "least"),
    [
        (0.0, timing.ROUNDS, timing.ROUNDS),
        (0.0, 3, 3),
        (40.0, 20, 3),
        (1e9, timing.MOST_ROUNDS, 3),
    ],
)
def test_rounds_fill_the_time_that_is_given(
    seconds: float, rounds: int, least: int
) -> None:
    now = Stopwatch()

    def sample() -> float:
        now.time += 1.0
        return 1.0

    measured = timing.interleaved(
        {"a": sample, "b": sample}, seconds=seconds, least=least, now=now
    )

    assert {each.samples for each in measured.values()} == {rounds}


def test_a_chip_that_slows_down_slows_all_alike() -> None:
    taken = 0

    def sample() -> float:
        nonlocal taken
        taken += 1
        return 1.0 + taken / 100  # 3 arms x 40 rounds: the last takes twice the first

    now = Stopwatch()
    arms: dict[str, timing.Sample] = dict.fromkeys("abc", sample)
    measured = timing.interleaved(arms, seconds=1.0, now=now)

    assert timing.winner(measured) == "a"
    medians = [each.median for each in measured.values()]
    assert max(medians) - min(medians) < 0.05


def test_independent_products_have_the_same_x_and_all_are_computed() -> None:
    x, weights = mx.array([[1.0, 2.0]]), [mx.array([float(i)]) for i in range(3)]
    given: list[tuple[mx.array, mx.array]] = []
    results: list[mx.array] = []

    def product(x: mx.array, w: mx.array) -> mx.array:
        given.append((x, w))
        results.append(mx.full((1, 2), 1.0) * w)
        return results[-1]

    times = iter([10.0, 18.0])
    seconds = timing.independent(
        product, x, cycle([(w,) for w in weights]), 4, lambda: next(times)
    )

    assert seconds == 2.0
    assert all(latest is x for latest, _ in given)
    assert [w.item() for _, w in given] == [0, 1, 2, 0]


def test_drift_compares_the_later_samples_with_the_earlier() -> None:
    warmer = Spread.of([1.0, 1.0, 1.0, 5.0, 1.2, 1.2, 1.2])

    assert warmer.drift == pytest.approx(0.2)
    assert Spread.of([2.0, 2.0, 1.0, 1.0]).drift == pytest.approx(-0.5)
    assert Spread.of([3.0]).drift == 0.0


def test_each_product_of_a_chain_needs_the_result_before_it() -> None:
    w = mx.array([[0.5]])
    given: list[mx.array] = []

    def product(x: mx.array, w: mx.array, *_: mx.array) -> mx.array:
        given.append(x)
        return x * w

    timing.chain(product, mx.array([[1.0]]), cycle([(w, w, w)]), 4)

    # 1 + half of what came before, as one rounds by hand: not a sum that grows.
    assert [each.item() for each in given] == [1, 1.5, 1.75, 1.875]


def test_a_chain_is_timed_while_it_is_evaluated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = Stopwatch()

    def product(x: mx.array, *_: mx.array) -> mx.array:
        now.time += 100.0  # the host's, to build the graph
        return x

    def evaluate(_: mx.array) -> None:
        now.time += 8.0

    monkeypatch.setattr(mx, "eval", evaluate)
    x = mx.array([[1.0]])

    assert timing.chain(product, x, cycle([(x, x, x)]), 4, now) == 2.0


def test_a_weight_comes_again_only_after_all_others() -> None:
    weights = [(mx.array(float(i)),) * 3 for i in range(5)]
    taken: list[float] = []

    def product(x: mx.array, w: mx.array, *_: mx.array) -> mx.array:
        taken.append(float(w.item()))
        return x

    turns = cycle(weights)
    for _ in range(3):  # chains go on where the last one, of any arm, ended
        timing.chain(product, mx.array([[1.0]]), turns, 4)

    assert taken == [i % 5 for i in range(12)]


@pytest.mark.parametrize(
    ("each", "seconds", "length"),
    [
        (1e-3, 0.05, 50),
        (4.9e-3, 0.001, 4),  # the ends of fewer count
        (5e-3, 0.001, 1),
        (1.0, 3.5, 3),
        (1e-9, 1, 256),
        (0.0, 1, 256),
    ],
)
def test_a_chain_is_as_long_as_its_time(
    each: float, seconds: float, length: int
) -> None:
    assert timing.chain_length(each, seconds) == length


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
