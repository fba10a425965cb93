"""The tuner's clocks: wall time on a GPU, counters in the emulator."""

from collections import Counter

import mlx.core as mx
import pytest

from metal_emulator.counters import Counters, Operation, Traffic
from mlx_marlin.backends import launcher, planner, selection
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal.cost import rates
from mlx_marlin.backends.metal.device import DEFAULT
from mlx_marlin.measure import clocks, counting, operands, timing, tuner
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


def test_the_emulators_clock_is_a_function_of_counters() -> None:
    def launched(kernel: str, read: int, again: int) -> Counters:
        return Counters(
            kernel=kernel,
            threadgroups=1,
            threadgroup_bytes=0,
            traffic=(
                Traffic("w", "device", "1", read + again, again, 60, 0, accesses=7),
                Traffic("sum", "threadgroup", "2", 5000, accesses=3),
            ),
            operations=(
                Operation("matrix", "multiply", "3", 1000),
                Operation("simd", "simd_sum", "4", 20),
                Operation("barrier", "threadgroup_barrier", "5", 10),
            ),
        )

    fitted = rates.rates_of(DEFAULT)
    slots = fitted.matrix_slots * 1000 + (7 + 3 + 20 + 10)
    issue = slots / (4 * DEFAULT.cores * DEFAULT.clock_ghz * 1e9)
    bandwidth = fitted.bandwidth * DEFAULT.bandwidth_gbs * 1e9

    few = [launched("few", 40, 1000)]
    many = [launched("many", 2**20, 2**22), launched("reduce", 2**20, 0)]

    level = rates.level_seconds(DEFAULT)
    assert counting.counted_seconds(few, DEFAULT) == pytest.approx(issue + level)
    expected = 2 * (2**20 + 60) / bandwidth + 2 * level
    assert counting.counted_seconds(many, DEFAULT) == pytest.approx(expected)
    overlapped = counting.counted_seconds(many, DEFAULT, overlapped=True)
    assert overlapped == pytest.approx(expected - 2 * level)


@needs_emulator
def test_the_emulator_counts_the_same_every_time(backend: Choose) -> None:
    backend("emulator")
    clock = clocks.clock_of(DEFAULT)

    first, second = (tuner.tune(SMALL, DEFAULT, clock) for _ in range(2))

    assert clock.name == "emulator counters"
    assert first == second
    assert first.result is not None
    # Splitting a product this small takes a second launch, by any account.
    medians = {arm: each.median for arm, each in first.arms.items() if arm is not None}
    split = [median for arm, median in medians.items() if arm.is_split]
    plan = next(arm for arm in medians if arm.is_split)
    inputs = operands.operands(SMALL, 1)
    independent = clock.measure_independent({plan: launcher.product(plan)}, inputs)
    assert medians[plan] - independent[plan].median == pytest.approx(
        2 * rates.level_seconds(DEFAULT)
    )
    whole = [median for arm, median in medians.items() if not arm.is_split]
    assert min(split) - max(whole) > 1e-6


@pytest.mark.parametrize(("on", "chip"), [("metal", "M3 Max"), ("cuda", "NVIDIA H200")])
def test_on_a_gpu_the_clock_is_the_wall_and_times_stock(
    on: str, chip: str, backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend(on)
    monkeypatch.setattr(selection, "missing", lambda: None)

    clock = clocks.clock_of(named(chip))

    assert (clock.name, clock.times_stock) == ("wall time", True)
    assert clock.weights(LARGE) == operands.weight_count(LARGE, named(chip))
