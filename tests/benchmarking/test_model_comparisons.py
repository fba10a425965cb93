"""Generations of settings and of stock MLX in turns, and a process for each value."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm import decoding
from mlx_marlin.lm.decoding import Decoded, Prompts
from mlx_marlin.lm.fusions import FUSIONS
from mlx_marlin.lm.model_tuning import environment, equal_tokens
from mlx_marlin.lm.model_tuning.environment import Job, Run, Value, Values
from mlx_marlin.lm.model_tuning.generations import Generations
from mlx_marlin.lm.tracing.block import TracedBlock
from mlx_marlin.lm.tuned_models.settings import DEFAULTS, ModelSettings
from support.choose import Choose
from support.models import tiny_llama

VARIABLE = environment.VARIABLE


class FakeClock:
    """Stands in for generation: the machine slows down, and our model has a speed."""

    def __init__(self, speed: float, slowing: float = 1.05) -> None:
        self.speed, self.slowing = speed, slowing
        self.calls: list[tuple[str, int]] = []
        self.tokens = {"stock": 1, "ours": 1}

    def __call__(self, model: nn.Module, prompts: Prompts, new: int) -> Decoded:
        is_ours = any(isinstance(each, MarlinLinear) for each in model.modules())
        name = "ours" if is_ours else "stock"
        self.calls.append((name, len(prompts)))
        seconds = self.slowing ** len(self.calls) / (self.speed if is_ours else 1.0)
        return Decoded(
            tokens=[[self.tokens[name]] * len(prompts)] * new,
            prompt_seconds=seconds,
            step_seconds=seconds,
        )


@pytest.mark.parametrize("speed", [0.8, 1.0, 1.2])
def test_a_machine_that_slows_down_does_not_change_the_ratio(
    backend: Choose, speed: float
) -> None:
    backend("metal")
    clock = FakeClock(speed)
    generations = Generations(
        load=tiny_llama, streams=(1, 4), decode=clock, rounds=4, new=3
    )

    found = generations.compare(DEFAULTS)

    assert found.excluded is None
    # Half of the pairs begin with each arm, so the factors 1.05 and 1 / 1.05 balance.
    for ratios in (found.speedups, found.prompts):
        assert [*ratios] == [1, 4]
        assert [*ratios.values()] == pytest.approx([speed, speed], rel=0.002)
    a, b = "stock", "ours"
    one = [a, b, a, b, b, a, a, b, b, a]  # the first pair compares tokens
    assert clock.calls == [(name, count) for count in (1, 4) for name in one]


def test_the_settings_reach_the_model(backend: Choose) -> None:
    backend("metal")
    seen: list[nn.Module] = []
    clock = FakeClock(1.0)

    def decode(model: nn.Module, prompts: Prompts, new: int) -> Decoded:
        seen.append(model)
        return clock(model, prompts, new)

    generations = Generations(load=tiny_llama, streams=(1,), decode=decode)
    found = generations.compare(ModelSettings(join=True, trace=True))

    assert found.excluded is None
    assert seen[0] is generations.stock
    assert "joined" in seen[1].layers[0].self_attn.q_proj
    assert isinstance(seen[1].layers[0], TracedBlock)
    assert not any(isinstance(m, MarlinLinear) for m in generations.stock.modules())


def test_other_tokens_exclude_settings(backend: Choose) -> None:
    backend("metal")
    clock = FakeClock(2.0)
    clock.tokens["ours"] = 2

    found = Generations(load=tiny_llama, streams=(1,), decode=clock).compare(DEFAULTS)

    assert not found.is_harmless
    assert found.excluded is not None
    assert "token 1 of stream 1 differs from stock MLX's" in found.excluded
    assert len(clock.calls) == 2  # nothing was timed


def test_a_failure_excludes_settings(backend: Choose) -> None:
    backend("metal")
    clock = FakeClock(1.0)

    def decode(model: nn.Module, prompts: Prompts, new: int) -> Decoded:
        if clock.calls:
            raise RuntimeError("no such kernel")
        return clock(model, prompts, new)

    found = Generations(load=tiny_llama, decode=decode).compare(DEFAULTS)

    assert found.excluded == "RuntimeError: no such kernel"


def test_packed_weights_must_fit_the_memory_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generations = Generations(load=tiny_llama, streams=(1,))
    for memory, layouts in ((0, 2), (10**9, 2), (1000, 1)):
        monkeypatch.setattr(
            mx, "device_info", lambda *_, memory=memory: {"memory_size": memory}
        )
        assert len(generations.layouts()) == layouts


@pytest.mark.usefixtures("stock")
def test_real_generations_are_compared() -> None:
    sizes = {"streams": (1, 3), "prompt": 5, "new": 4, "rounds": 2}

    found = Generations(load=tiny_llama, **sizes).compare(DEFAULTS)
    assert found.excluded is None
    assert [*found.speedups] == [*found.prompts] == [1, 3]
    assert min(*found.speedups.values(), *found.prompts.values()) > 0

    stock = tiny_llama()
    expected = decoding.decode(stock, [[1, 2]], 4).tokens
    other = [[(token + 1) % 100 for token in step] for step in expected]
    assert equal_tokens.difference(stock, [[1, 2]], expected, expected) is None
    reason = equal_tokens.difference(stock, [[1, 2]], expected, other)
    assert "token 1 of stream 1 differs" in str(reason)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_our_kernels_give_the_tokens_of_stock_mlx() -> None:
    everything = ModelSettings(join=True, trace=True, fuse=(*FUSIONS,))
    generations = Generations(
        load=tiny_llama, streams=(1, 3), prompt=6, new=5, rounds=1
    )

    assert generations.compare(everything).excluded is None


def fixed(logits: list[float]) -> Any:
    """Returns a model that gives the same logits everywhere."""
    return lambda tokens: mx.broadcast_to(
        mx.array(logits), (*tokens.shape, len(logits))
    )


def test_a_tie_of_the_logits_is_no_difference() -> None:
    prompts = [[1, 2], [3, 4]]  # of two streams
    expected, actual = [[0, 0], [0, 0], [0, 0]], [[0, 0], [0, 1], [0, 2]]
    limit = equal_tokens.ULPS * equal_tokens.LEAST_PRECISION * 16.0

    def difference(gap: float) -> str | None:
        logits = [16.0, 16.0 - gap, 0.0]
        return equal_tokens.difference(fixed(logits), prompts, expected, actual)

    assert difference(0.0) is None
    assert difference(limit / 2) is None  # what follows a tie does not count
    assert difference(limit * 2) is not None
    assert "token 2 of stream 2 differs" in str(difference(1.0))
    assert difference(float("nan")) is not None
    same = equal_tokens.difference(fixed([1.0, 0.0]), prompts, expected, expected)
    assert same is None


def test_the_first_other_token_is_judged_by_what_precedes_it() -> None:
    seen: list[list[int]] = []

    def model(tokens: mx.array) -> mx.array:
        seen.append(tokens[0].tolist())
        return mx.zeros((*tokens.shape, 9), dtype=mx.bfloat16)

    actual = [[7], [8], [5]]
    assert equal_tokens.difference(model, [[1, 2]], [[7], [6], [5]], actual) is None
    assert seen == [[1, 2, 7]]


def job(streams: tuple[int, ...] = (1, 4)) -> Job:
    return Job(load=tiny_llama, settings=DEFAULTS, streams=streams, prompt=5, new=4)


def measured(
    speeds: dict[Value, float], calls: list[Value], slowing: float = 1.1
) -> Callable[[Job, Value], Run]:
    def measure(of: Job, value: Value) -> Run:
        calls.append(value)
        step = slowing ** len(calls) / speeds.get(value, 1.0)
        steps = dict.fromkeys(of.streams, step)
        return Run(value=str(value), steps=steps, prompts=steps, tokens=[[[1]]])

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
        run = own(of, value)
        return replace(run, tokens=[[[9]]]) if value == 200 else run

    values = Values(job=job(), measure=measure)

    assert [*values.run()] == calls
    assert calls.count(100) == 1
    assert values.best == 400
    reasons = [each.excluded for each in values.comparisons.values()]
    assert reasons[0] == "the process ended"
    assert reasons[1] == "the tokens differ from those with MLX's own value"
    assert reasons[2] is None


@pytest.mark.slow
@pytest.mark.usefixtures("stock")
def test_each_value_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "77")
    stock = replace(job((1,)), settings=None)

    found = environment.measure(stock, 200)

    assert found.value == "200"
    assert os.environ[VARIABLE] == "77"
    assert found.steps[1] > 0
    prompts = decoding.random_prompts(1, 5, 100)
    assert found.tokens == [decoding.decode(tiny_llama(), prompts, 4).tokens]


def test_mlx_has_its_own_value_in_a_process_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "77")
    with environment._environment(None):
        assert VARIABLE not in os.environ
    with environment._environment(5):
        assert os.environ[VARIABLE] == "5"
    assert os.environ[VARIABLE] == "77"


def fail() -> nn.Module:
    os._exit(3)


def test_a_process_that_dies_is_reported() -> None:
    with pytest.raises(RuntimeError, match=f"a process with {VARIABLE}=100 ended"):
        environment.measure(replace(job(), load=fail), 100)
