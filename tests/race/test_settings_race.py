"""Forward passes of settings and of stock MLX in turns; a process for each value."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_marlin.lm.layer_conversion import is_marlin_layer
from mlx_marlin.lm.measured_models import VARIABLE
from mlx_marlin.lm.module_tree import computing_layers
from mlx_marlin.lm.options import FUSIONS
from mlx_marlin.lm.race import forward_race, settings_race
from mlx_marlin.lm.race.settings import DEFAULTS, ModelSettings
from mlx_marlin.lm.race.settings_race import (
    LEAST_PRECISION,
    PASSES,
    ROUNDS,
    ULPS,
    Arms,
    Job,
    Run,
    Value,
    Values,
    contradiction,
)
from mlx_marlin.lm.tracing.block import TracedBlock
from mlx_marlin.planning.measurement import PROMPTS
from support.choose import Choose
from support.models import arrays, tiny_llama

PROMPT = PROMPTS[0]


class SlowingMachine:
    """Stands in for passes: each turn is slower, and our model has a speed."""

    def __init__(self, speed: float, slowing: float = 1.05) -> None:
        self.speed, self.slowing = speed, slowing
        self.turns: list[str] = []
        self.counts: dict[int, int] = {}
        self.models: list[nn.Module] = []

    def __call__(self, model: nn.Module, m: int, count: int) -> list[float]:
        ours = any(map(is_marlin_layer, computing_layers(model)))
        if m == 1:
            self.turns.append("ours" if ours else "stock")
            self.models.append(model)
        self.counts[m] = count
        turn = self.slowing ** len(self.turns)
        seconds = m * turn / (self.speed if ours else 1.0)
        return [99.0] + [seconds] * (count - 1)  # the first one compiles


@pytest.fixture
def agreeing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all logits agree, whose computation takes a while in the emulator."""
    monkeypatch.setattr(settings_race, "contradiction", lambda *_: None)


@pytest.mark.usefixtures("agreeing")
@pytest.mark.parametrize("speed", [0.8, 1.0, 1.2])
def test_a_machine_that_slows_down_does_not_change_the_ratio(
    backend: Choose, monkeypatch: pytest.MonkeyPatch, speed: float
) -> None:
    backend("metal")
    machine = SlowingMachine(speed)
    monkeypatch.setattr(forward_race, "passes", machine)

    found = Arms(load=tiny_llama, rows=(1, 64)).compare(DEFAULTS)

    assert found.excluded is None
    # Each arm comes first in half of the turns, so the factors balance.
    assert machine.turns == ["stock", "ours", "ours", "stock"] * (ROUNDS // 2)
    assert machine.counts == {1: 1 + PASSES, 64: 1 + PASSES, PROMPT: 2}
    assert [*found.seconds] == [1, 64, PROMPT]
    for stock, ours in found.seconds.values():
        assert stock / ours == pytest.approx(speed, rel=0.003)
    assert found.seconds[64][0] == pytest.approx(64 * found.seconds[1][0])


@pytest.mark.usefixtures("agreeing")
def test_the_settings_reach_the_model(
    backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend("metal")
    machine = SlowingMachine(1.0)
    monkeypatch.setattr(forward_race, "passes", machine)
    arms = Arms(load=tiny_llama, rows=(1,))

    found = arms.compare(ModelSettings(join=True, trace=True))

    assert found.excluded is None
    stock, ours, *_ = machine.models
    assert stock is arms.stock
    assert "joined" in ours.layers[0].self_attn.q_proj
    assert isinstance(ours.layers[0], TracedBlock)
    assert not any(map(is_marlin_layer, arms.stock.modules()))


def test_settings_that_fail_or_contradict_are_excluded_untimed(
    backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend("metal")
    machine = SlowingMachine(2.0)
    monkeypatch.setattr(forward_race, "passes", machine)
    arms = Arms(load=tiny_llama, rows=(1,))

    def fail(*_: Any) -> str:
        raise RuntimeError("no such kernel")

    for judge, reason in (
        (lambda *_: "row 1 differs", "row 1 differs"),
        (fail, "RuntimeError: no such kernel"),
    ):
        monkeypatch.setattr(settings_race, "contradiction", judge)
        found = arms.compare(DEFAULTS)
        assert found.excluded == reason
        assert not found.is_harmless
    assert machine.turns == []  # nothing was timed


def test_packed_weights_must_fit_the_memory_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arms = Arms(load=tiny_llama, rows=(1,))
    two_copies = 2 * sum(each.nbytes for each in arrays(arms.stock).values())
    least = -(-two_copies * 10 // 8)  # which leaves a fifth for the rest
    for memory, layouts in ((0, 2), (least, 2), (least - 1, 1)):
        monkeypatch.setattr(
            mx, "device_info", lambda *_, memory=memory: {"memory_size": memory}
        )
        assert arms.layouts() == ("mlx", "marlin")[:layouts]


@pytest.mark.usefixtures("stock")
def test_real_passes_are_compared() -> None:
    found = Arms(load=tiny_llama, rows=(3,)).compare(DEFAULTS)

    assert found.excluded is None
    assert [*found.seconds] == [3, PROMPT]
    assert min(min(pair) for pair in found.seconds.values()) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_the_logits_of_our_kernels_agree_with_stock_mlxs() -> None:
    arms = Arms(load=tiny_llama, rows=(1, 3))

    everything = ModelSettings(join=True, trace=True, fuse=(*FUSIONS,))

    assert contradiction(arms.stock, arms._converted(everything), (1, 3, 20)) is None


class Fixed(nn.Module):
    """Gives logits that depend on the number of rows and on the row."""

    def __init__(self, logits: Callable[[int], list[list[float]]]) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 1)
        self.layers: list[Any] = []
        self.logits, self.seen = logits, []

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        self.seen.append(tokens.tolist()[0])
        return mx.array([self.logits(tokens.shape[1])])


def test_a_tie_of_the_logits_is_no_contradiction() -> None:
    limit = ULPS * LEAST_PRECISION * 16.0

    def found(gap: float, row: int = 2, other: float = 1.0) -> str | None:
        own = [[-16.0, 2.0, 1.0], [-16.0, 2.0, 1.0], [-16.0, 2.0, 2.0 - gap]]
        theirs = [[-16.0, 2.0, 1.0]] * 2 + [[0.0, 0.0, other]]
        stock, ours = Fixed(lambda m: own[:m]), Fixed(lambda m: theirs[:m])
        return contradiction(stock, ours, (1, row + 1))

    assert found(0.0) is None
    assert found(limit / 2) is None
    assert "row 3 of 3 has another largest logit" in str(found(limit * 2))
    assert "1 apart, more than rounding (0.00195)" in str(found(1.0))
    assert found(1.0, row=1) is None  # the rows that differ are not asked for
    assert found(float("nan")) is not None
    assert found(0.0, other=float("nan")) is not None


def test_both_models_read_the_same_tokens_after_some_others() -> None:
    stock, ours = (Fixed(lambda m: [[1.0, 0.0]] * m) for _ in range(2))

    assert contradiction(stock, ours, (1, 5)) is None

    assert [*map(len, stock.seen)] == [forward_race.PREFIX, 1, forward_race.PREFIX, 5]
    assert stock.seen == ours.seen
    assert len({*stock.seen[-1]}) > 1
    assert {*stock.seen[-1]} <= {*range(9)}


def job(rows: tuple[int, ...] = (1, 4)) -> Job:
    return Job(load=tiny_llama, settings=DEFAULTS, rows=rows)


def measured(
    speeds: dict[Value, float], calls: list[Value], slowing: float = 1.1
) -> Callable[[Job, Value], Run]:
    def measure(of: Job, value: Value) -> Run:
        calls.append(value)
        step = slowing ** len(calls) / speeds.get(value, 1.0)
        samples = {m: [m * step] for m in of.rows}
        return samples, [[1]]

    return measure


@pytest.mark.parametrize(
    ("speeds", "best"),
    [({}, None), ({200: 1.3}, 200), ({100: 0.9, 200: 1.05, 400: 1.2}, 400)],
)
def test_values_are_measured_in_a_mirrored_order(
    speeds: dict[Value, float], best: Value
) -> None:
    calls: list[Value] = []
    values = Values(job=job(), measure=measured(speeds, calls, slowing=1.001))

    assert [*values.run()] == calls == [None, 100, 200, 400, 400, 200, 100, None]
    assert values.best == best
    for value, found in values.comparisons.items():
        expected = speeds.get(value, 1.0)
        assert found.speedup == pytest.approx(expected, rel=0.001)


def test_without_time_no_value_is_chosen() -> None:
    calls: list[Value] = []
    values = Values(
        job=job(), measure=measured({200: 2.0}, calls), is_over=lambda: len(calls) == 7
    )

    assert len([*values.run()]) == 7
    assert values.best is None
    assert values.comparisons == {}


def test_a_value_that_fails_or_changes_tokens_is_not_chosen() -> None:
    calls: list[Value] = []
    own = measured({100: 3.0, 200: 2.0, 400: 1.5}, calls, slowing=1.0)

    def measure(of: Job, value: Value) -> Run:
        if value == 100:
            calls.append(value)
            raise RuntimeError("the process ended")
        samples, tokens = own(of, value)
        return samples, [[9]] if value == 200 else tokens

    values = Values(job=job(), measure=measure)

    assert [*values.run()] == calls
    assert calls.count(100) == 1
    assert values.best == 400
    reasons = [each.excluded for each in values.comparisons.values()]
    assert reasons[0] == "the process ended"
    assert reasons[1] == "the logits are other than with MLX's own value"
    assert reasons[2] is None
    assert {each.settings for each in values.comparisons.values()} == {DEFAULTS}


@pytest.mark.slow
@pytest.mark.usefixtures("stock")
def test_each_value_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "77")
    stock = replace(job((1,)), settings=None)

    samples, tokens = settings_race.measure(stock, 200)

    assert os.environ[VARIABLE] == "77"
    assert [*samples] == [1, PROMPT]
    assert [*map(len, samples.values())] == [PASSES, 1]
    assert tokens == settings_race.run(stock)[1]
    assert [*map(len, tokens)] == [1, PROMPT]
    told = replace(stock, load=tell_variable)
    with pytest.raises(RuntimeError, match="the variable is 200"):
        settings_race.measure(told, 200)


def tell_variable() -> nn.Module:
    raise RuntimeError(f"the variable is {os.environ[VARIABLE]}")


def test_mlx_has_its_own_value_in_a_process_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "77")
    with settings_race.environment(None):
        assert VARIABLE not in os.environ
    with settings_race.environment(5):
        assert os.environ[VARIABLE] == "5"
    assert os.environ[VARIABLE] == "77"
    monkeypatch.delenv(VARIABLE)
    with settings_race.environment(5):
        assert os.environ[VARIABLE] == "5"
    assert VARIABLE not in os.environ


def fail() -> nn.Module:
    os._exit(3)


@pytest.mark.slow
def test_a_process_that_dies_is_reported() -> None:
    with pytest.raises(RuntimeError, match=f"a process with {VARIABLE}=100 ended"):
        settings_race.measure(replace(job(), load=fail), 100)
