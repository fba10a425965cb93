"""The choice of arms, measurement, and the choice of the winner."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_marlin import emulator
from mlx_marlin.backends import launch, planner, selection
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal import cost
from mlx_marlin.backends.metal.device import DEFAULT, Device
from mlx_marlin.emulator.counters import Counters, Operation, Traffic
from mlx_marlin.planning.measurement import STOCK, label
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.tuning import (
    counting,
    layers,
    operands,
    timing,
    tuner,
)
from mlx_marlin.tuning.operands import Operands
from mlx_marlin.tuning.timing import Spread
from mlx_marlin.tuning.tuner import Arm, Clock
from mlx_marlin.weights.formats import DTYPE_BYTES, LAYOUTS, format_of
from support import oracles
from support.models import Layers, tiny_llama

M3_MAX = Device.named("M3 Max")
SMALL = Problem(m=4, n=64, k=256)
LARGE = Problem(m=8, n=4096, k=4096)


def spreads(**medians: float) -> dict[str, Spread]:
    """Returns spreads with a range of 1."""
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
    # Two outliers of nine change neither.
    spread = Spread.of([5.0, 3.0, 4.0, 1000.0, 1.0, 2.0, 6.0, 7.0, 900.0])

    assert spread == Spread(median=5.0, range=4.0, samples=9)
    assert Spread.of([2.5]) == Spread(median=2.5, range=0.0, samples=1)


class Stopwatch:
    """A clock that the test advances."""

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
    ("seconds", "rounds"),
    [(0.0, timing.ROUNDS), (40.0, 20), (1e9, timing.MOST_ROUNDS)],
)
def test_rounds_fill_the_time_that_is_given(seconds: float, rounds: int) -> None:
    now = Stopwatch()

    def sample() -> float:
        now.time += 1.0
        return 1.0

    measured = timing.interleaved({"a": sample, "b": sample}, seconds=seconds, now=now)

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


def test_each_product_of_a_chain_needs_the_result_before_it() -> None:
    x = mx.array([[1.0, 2.0, 3.0]])
    given: list[mx.array] = []

    def product(x: mx.array, *_: mx.array) -> mx.array:
        given.append(x)
        return mx.full((1, 5), float(len(given)))

    timing.chain(product, x, cycle([(x, x, x)]), 4)

    # Not a sum that grows: result i, added to the same x each time.
    expected = [x, x + 1, x + 2, x + 3]
    assert [each.tolist() for each in given] == [each.tolist() for each in expected]


def test_mlx_cannot_drop_a_product_of_a_chain() -> None:
    w = mx.array([[0.5]])
    x = mx.array([[1.0]])

    def product(x: mx.array, w: mx.array, *_: mx.array) -> mx.array:
        return x * w

    latest: list[mx.array] = []

    def recorded(x: mx.array, *weight: mx.array) -> mx.array:
        latest.append(x)
        return product(x, *weight)

    timing.chain(recorded, x, cycle([(w, w, w)]), 4)

    # 1 + half of what came before, as one rounds by hand.
    assert [each.item() for each in latest] == [1, 1.5, 1.75, 1.875]


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
    for _ in range(3):  # a chain continues with the weight after the last chain's
        timing.chain(product, mx.array([[1.0]]), turns, 4)

    assert taken == [i % 5 for i in range(12)]


@pytest.mark.parametrize(
    ("each", "seconds", "length"),
    [(1e-3, 0.05, 50), (1.0, 0.01, timing.SHORTEST), (1e-9, 1, timing.LONGEST)],
)
def test_a_chain_is_as_long_as_its_time(
    each: float, seconds: float, length: int
) -> None:
    assert timing.chain_length(each, seconds) == length


@pytest.mark.parametrize("chip", ["M1", "M3 Max", "M2 Ultra", "NVIDIA H200"])
@pytest.mark.parametrize("size", [1024, 4096, 16384])
def test_weights_are_larger_than_the_cache_together(chip: str, size: int) -> None:
    problem = Problem(m=1, n=size, k=size)
    cache = (64 if chip in ("M1", "M3 Max") else 128) * 2**20

    count = operands.weight_count(problem, named(chip))

    assert count * problem.weight_bytes > cache
    # And not much larger: memory is the user's.
    assert (count - 1) * problem.weight_bytes <= cache


def test_small_weights_do_not_become_thousands_of_arrays() -> None:
    assert (
        operands.weight_count(Problem(m=1, n=32, k=64), M3_MAX) == operands.MOST_WEIGHTS
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_chains_of_our_operands_stay_finite(dtype: str, layout: str) -> None:
    problem = Problem(
        m=2, n=40, k=2048, dtype=dtype, scale_dtype=dtype, group_size=128, layout=layout
    )
    given = operands.operands(replace(problem, layout="mlx"), 3)
    largest: list[float] = []
    stock = operands.stock_product(problem)

    def product(x: mx.array, *weight: mx.array) -> mx.array:
        y = stock(x, *weight)
        largest.append(float(mx.abs(y).max().item()))
        return y

    timing.chain(product, given.x, cycle(given.weights), 60)

    assert max(largest) < 100
    assert min(largest) > 0.1
    laid_out = operands.operands(problem, 2).weights
    assert len(laid_out) == 2
    assert not mx.array_equal(laid_out[0][0], laid_out[1][0])


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

    stays = planner.stock_reason(problem, M3_MAX) is not None
    assert arms[0] == (None if stays else planner.choose(problem, M3_MAX))
    assert arms.count(None) == 1
    assert len({tuner.name(arm) for arm in arms}) == len(arms)


def test_stock_is_no_choice_for_a_packed_weight_or_without_its_time() -> None:
    packed = replace(LARGE, layout="marlin")

    assert None not in tuner.arms(packed, M3_MAX, times_stock=True)
    assert None not in tuner.arms(LARGE, M3_MAX, times_stock=False)


def test_operands_and_products_of_every_dtype_and_layout_are_right(
    kernels: None,
) -> None:
    for dtype in DTYPE_BYTES:
        for layout in LAYOUTS:
            for m in (1, 12):
                problem = Problem(
                    m=m, n=40, k=256, dtype=dtype, scale_dtype=dtype, layout=layout
                )
                given = operands.operands(problem, 1)
                product = launch.product(planner.choose(problem, DEFAULT))

                assert operands.is_right(product, given), (dtype, layout, m)


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [
        ("affine", 3, 32),
        ("symmetric", 4, 64),
        ("zero_point", 5, 128),
        ("mxfp4", 4, 32),
        ("mxfp8", 8, 32),
        ("nvfp4", 4, 16),
    ],
)
@pytest.mark.parametrize("on", ["kernels", "on_cpu"])
def test_operands_of_every_scheme_are_right_and_a_wrong_product_is_told(
    on: str, mode: str, bits: int, group_size: int, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(on)  # on_cpu: the CUDA kernels
    target = named("NVIDIA A100") if on == "on_cpu" else DEFAULT
    for layout in format_of(mode, bits).layouts:
        problem = problem_of(
            8, 40, 256, mode=mode, bits=bits, group_size=group_size, layout=layout
        )
        given = operands.operands(problem, 1)
        product = launch.product(planner.choose(problem, target))

        assert operands.is_right(product, given), layout
        assert not operands.is_right(
            lambda *arrays, product=product: 1.05 * product(*arrays), given
        )


def exact_product(given: Operands) -> mx.array:
    y = oracles.product(given.x, *given.native, group_size=given.problem.group_size)
    return mx.array(y.astype(np.float32)).astype(getattr(mx, given.problem.dtype))


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_one_wrong_element_makes_a_product_wrong(dtype: str) -> None:
    problem = Problem(m=8, n=512, k=512, dtype=dtype, scale_dtype=dtype)
    given = operands.operands(problem, 1)
    y = exact_product(given)
    assert operands.is_right(lambda *_: y, given)

    half = mx.array(y)
    half[3, 77] = y[3, 77] / 2 if abs(y[3, 77].item()) > 0.1 else 1
    not_a_number = mx.array(y)
    not_a_number[7, 511] = float("nan")
    for wrong in (half, not_a_number, mx.zeros_like(y), y[:, :-1], y[::-1]):
        assert not operands.is_right(lambda *_, wrong=wrong: wrong, given)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    """Returns a clock with given times of all arms. Products are exact."""

    def product(plan: Plan) -> launch.Product:
        given = operands.operands(plan.problem, 1)
        return lambda *_: exact_product(given)

    monkeypatch.setattr(launch, "product", product)

    def clock(time: Callable[[Arm], float], noise: float = 0.1e-6) -> Clock:
        return Clock(
            name="fake",
            measure=lambda products, _: {
                arm: Spread(median=time(arm), range=noise)
                # Not in the order in which they are given.
                for arm in reversed([*products])
            },
            weights=lambda _: 1,
            times_stock=True,
        )

    return clock


def second_plan(problem: Problem) -> Plan:
    arms = tuner.arms(problem, M3_MAX, times_stock=True)
    return [arm for arm in arms if arm is not None][1]


def test_without_a_clear_winner_the_models_answer_stays(
    fake: Callable[..., Clock],
) -> None:
    for m in (1, 8):  # the model: stock, ours
        problem = replace(SMALL, m=m, n=2048, k=2048)
        falling = iter(np.linspace(20e-6, 19.1e-6, 100))
        clock = fake(lambda _, times=falling: float(next(times)), noise=1e-6)

        outcome = tuner.tune(problem, M3_MAX, clock)

        assert outcome.result is not None
        stays = planner.stock_reason(problem, M3_MAX) is not None
        assert outcome.result.stock == stays
        assert outcome.result.plan == planner.choose(problem, M3_MAX)


def test_a_clear_winner_replaces_the_models_plan(fake: Callable[..., Clock]) -> None:
    best = second_plan(LARGE)
    times = {best: 10e-6, None: 15e-6}

    result = tuner.tune(LARGE, M3_MAX, fake(lambda arm: times.get(arm, 20e-6))).result

    assert result is not None
    assert (result.plan, result.stock, result.reason) == (best, False, None)
    assert result.medians_us[label(best)] == 10
    assert result.medians_us[STOCK] == 15
    assert {*result.medians_us.values()} == {10, 15, 20}
    assert result.clock == "fake"


def test_stock_that_is_faster_serves_and_our_best_is_kept_beside_it(
    fake: Callable[..., Clock],
) -> None:
    best = second_plan(LARGE)
    times = {best: 10e-6, None: 8e-6}

    result = tuner.tune(LARGE, M3_MAX, fake(lambda arm: times.get(arm, 20e-6))).result

    assert result is not None
    assert (result.plan, result.stock) == (best, True)
    assert result.reason == "measured here: stock MLX took 8.0 us, our best 10.0 us"


def test_a_plan_whose_product_is_wrong_never_wins(
    fake: Callable[..., Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, right = second_plan(LARGE), launch.product
    monkeypatch.setattr(
        launch,
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
    assert outcome.result is not None
    assert outcome.result.plan == planner.choose(LARGE, M3_MAX)


def test_nothing_is_kept_if_no_product_is_right(
    fake: Callable[..., Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "product", lambda _: lambda x, *_: mx.zeros_like(x))

    outcome = tuner.tune(LARGE, M3_MAX, fake(lambda _: 1e-6))

    assert outcome.result is None
    assert {*outcome.wrong} == {arm for arm in outcome.arms if arm is not None}


def test_wall_time_measures_every_arm_on_all_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "LONGEST", 4)
    given = operands.operands(SMALL, 3)
    stock, used = operands.stock_product(SMALL), Counter[int]()

    def counted(x: mx.array, w: mx.array, *rest: mx.array) -> mx.array:
        used[[id(each[0]) for each in given.weights].index(id(w))] += 1
        return stock(x, w, *rest)

    plan = planner.choose(SMALL, M3_MAX)
    measured = tuner.wall_time({None: stock, plan: counted}, given, seconds=0.01)

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

    rates = cost.rates_of(DEFAULT)
    slots = rates.matrix_slots * 1000 + rates.exposed * (7 + 3 + 20 + 10)
    issue = slots / (4 * DEFAULT.cores * DEFAULT.clock_ghz * 1e9)
    bandwidth = rates.bandwidth * DEFAULT.bandwidth_gbs * 1e9

    few = [launched("few", 40, 1000)]
    many = [launched("many", 2**20, 2**22), launched("reduce", 2**20, 0)]

    assert counting.counted_seconds(few, DEFAULT) == pytest.approx(issue)
    expected = 2 * (2**20 + 60) / bandwidth + 1.6e-6
    assert counting.counted_seconds(many, DEFAULT) == pytest.approx(expected)


@pytest.mark.skipif(
    emulator.unavailable() is not None, reason="no compiler for Metal kernels"
)
def test_the_emulator_counts_the_same_every_time(
    backend: Callable[[str | None], None],
) -> None:
    backend("emulator")
    clock = tuner.clock(DEFAULT)

    first, second = (tuner.tune(SMALL, DEFAULT, clock) for _ in range(2))

    assert clock.name == "emulator counters"
    assert first == second
    assert first.result is not None
    # Splitting a product this small takes a second launch, by any account.
    medians = {arm: each.median for arm, each in first.arms.items() if arm is not None}
    split = [median for arm, median in medians.items() if arm.is_split]
    whole = [median for arm, median in medians.items() if not arm.is_split]
    assert min(split) - max(whole) > 1e-6


def test_there_is_nothing_to_tune_without_our_kernels(
    backend: Callable[[str | None], None],
) -> None:
    backend("stock")

    with pytest.raises(ValueError, match="there is nothing to tune"):
        tuner.clock(DEFAULT)


@pytest.mark.parametrize(("on", "chip"), [("metal", "M3 Max"), ("cuda", "NVIDIA H200")])
def test_on_a_gpu_the_clock_is_the_wall_and_times_stock(
    on: str,
    chip: str,
    backend: Callable[[str | None], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend(on)
    monkeypatch.setattr(selection, "missing", lambda: None)

    clock = tuner.clock(named(chip))

    assert (clock.name, clock.times_stock) == ("wall time", True)
    assert clock.weights(LARGE) == operands.weight_count(LARGE, named(chip))


def test_a_models_products_are_found_once_each() -> None:
    found = layers.find(tiny_llama(tied=False))

    sizes = {(each.n, each.k) for each in found.problems}
    # Queries and output, keys and values, gate and up, down, head.
    assert sizes == {(64, 64), (32, 64), (160, 64), (64, 160), (100, 64)}
    assert len(found.problems) == 5
    assert found.others == 0
    assert {each.group_size for each in found.problems} == {32}
    assert {each.dtype for each in found.problems} == {"float32"}


def test_a_tied_head_multiplies_by_the_table_as_it_lies() -> None:
    untied = layers.find(tiny_llama(tied=False), ["marlin"])
    tied = layers.find(tiny_llama(tied=True), ["marlin"])

    def layouts(found: layers.Found) -> dict[int, str]:
        return {each.n: each.layout for each in found.problems}

    assert layouts(untied)[100] == "marlin"
    assert layouts(tied)[100] == "mlx"
    assert layouts(tied)[160] == "marlin"


def linear(k: int = 128, **format: Any) -> nn.QuantizedLinear:
    return nn.QuantizedLinear(k, 96, bias=False, **format)


def test_layers_keep_their_formats_and_those_that_are_not_ours_are_counted() -> None:
    model = Layers(
        linear(bits=4),
        linear(bits=3, group_size=32),
        linear(mode="mxfp4"),
        linear(mode="mxfp8"),
        linear(mode="nvfp4"),
        linear(96, mode="nvfp4"),  # k is no multiple of 64
        nn.Linear(8, 8),
    )

    found = layers.find(model)

    assert found.others == 1
    assert {(each.mode, each.bits, each.group_size) for each in found.problems} == {
        ("affine", 4, 64),
        ("affine", 3, 32),
        ("mxfp4", 4, 32),
        ("mxfp8", 8, 32),
        ("nvfp4", 4, 16),
    }
    assert {each.scale_dtype for each in found.problems} == {"float32", "uint8"}
    assert {each.dtype for each in found.problems} == {"float32"}


def test_without_any_float_bytes_meet_what_mlx_decodes_them_to() -> None:
    model = Layers(linear(mode="mxfp4"))
    found = layers.find(model, LAYOUTS)

    assert {(each.dtype, each.layout) for each in found.problems} == {
        ("bfloat16", "mlx"),
        ("bfloat16", "marlin"),
    }
    model.norm = nn.RMSNorm(8)
    model.norm.weight = model.norm.weight.astype(mx.float16)
    assert {each.dtype for each in layers.find(model).problems} == {"float16"}


def test_rows_multiply_problems_and_none_comes_twice() -> None:
    several = layers.with_rows([SMALL, LARGE, replace(SMALL, m=9)], (1, 8, 1))

    assert several == [replace(each, m=m) for each in (SMALL, LARGE) for m in (1, 8)]
