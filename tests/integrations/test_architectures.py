"""Each option of `optimize` with each architecture: numbers, tokens, and restoring."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import (
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)

import mlx_marlin
from mlx_marlin.lm.tracing.model_families import FAMILIES
from support.architectures import ARCHITECTURES
from support.models import assert_converted, assert_same_model
from support.profiles import sampled

pytestmark = pytest.mark.usefixtures("kernels")

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "marlin": {"layout": "marlin"},
    "join": {"join": True},
    "trace": {"trace": True},
    "invariant": {"invariant": True},
    "all": {"layout": "marlin", "join": True, "trace": True, "invariant": True},
}
FORMATS = [
    pytest.param(name, format, id=f"{name}-{'-'.join(map(str, format))}")
    for name, architecture in ARCHITECTURES.items()
    for format in architecture.formats
]
PROMPT = [17, 4, 81, 33, 60, 2, 95, 48, 12]
COUNT = 16
LATE = ([9, 2, 6], [5, 3, 5, 8, 9, 7])
"""Prompts of the streams that join a batch later."""
GATE = 2e-5
"""Largest difference of two logits, in units of the largest logit. Sums of another
order gave up to 7.4e-6, in gemma3_text."""


@dataclass(frozen=True)
class Step:
    """A token that a model chose, and the logits from which."""

    token: int
    logits: mx.array

    @property
    def scale(self) -> float:
        return float(mx.abs(self.logits).max().item())

    @property
    def lead(self) -> float:
        """How far the best logit is above the second."""
        second, best = mx.sort(self.logits)[-2:].tolist()
        return float(best - second)


Stream = list[Step]


def step(logits: mx.array) -> Step:
    return Step(int(logits.argmax().item()), logits.astype(mx.float32))


def decoded(model: nn.Module, tokens: list[int] | None = None) -> Stream:
    """Returns the steps after a prompt, each of a given token or of the best one."""
    cache = make_prompt_cache(model)
    found = [step(model(mx.array([PROMPT]), cache=cache)[0, -1])]
    for i in range(COUNT - 1):
        last = found[-1].token if tokens is None else tokens[i]
        found.append(step(model(mx.array([[last]]), cache=cache)[0, -1]))
    return found


def trimmed(model: nn.Module) -> Stream:
    """Returns steps before and after tokens are taken from the cache, if it allows."""
    cache = make_prompt_cache(model)
    found = [*model(mx.array([PROMPT[:6]]), cache=cache)[0]]
    if can_trim_prompt_cache(cache):
        assert trim_prompt_cache(cache, 4) == 4
    found += [*model(mx.array([PROMPT[6:]]), cache=cache)[0]]
    return [step(logits) for logits in found]


def batched(model: nn.Module) -> dict[int, Stream]:
    """Returns the streams of a batch; two of them join late and leave early."""
    generator = BatchGenerator(model, max_tokens=8)
    generator.insert([PROMPT[:5]])
    streams: dict[int, Stream] = {}
    for i in range(100):
        responses = generator.next_generated()
        if not responses:
            break
        for each in responses:
            found = Step(int(each.token), each.logprobs.astype(mx.float32))
            streams.setdefault(each.uid, []).append(found)
        if i == 1:
            generator.insert([*LATE], max_tokens=[2, 4])
    return streams


@cache
def of_stock(name: str, format: tuple[str, int, int]) -> tuple[Any, ...]:
    model = ARCHITECTURES[name].model(*format)
    return decoded(model), trimmed(model), batched(model)


def assert_close(ours: Stream, stock: Stream) -> None:
    """Checks logits of the same tokens, and choices that differ without being ties."""
    for actual, expected in zip(ours, stock, strict=True):
        largest = mx.abs(actual.logits - expected.logits).max().item()
        assert largest <= GATE * expected.scale
        assert_same_choice(actual, expected)


def assert_same_choice(actual: Step, expected: Step) -> bool:
    """Returns whether two tokens are equal; they may differ in a tie only."""
    if actual.token == expected.token:
        return True
    tie = 2 * GATE * expected.scale
    assert expected.lead <= tie, f"{actual.token} instead of {expected.token}, no tie"
    print(f"tie: {actual.token} and {expected.token}, {expected.lead} apart")
    return False


def assert_same_up_to_a_tie(ours: Stream, stock: Stream) -> None:
    """Checks a stream whose tokens are its own input up to the first tie."""
    assert len(ours) == len(stock)
    for actual, expected in zip(ours, stock, strict=True):
        assert_close([actual], [expected])
        if actual.token != expected.token:
            return


@sampled(1, 6)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("name", "format"), FORMATS)
def test_a_converted_model_answers_as_stock_and_is_restored(
    name: str, format: tuple[str, int, int], options: str
) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.model(*format)
    given = OPTIONS[options]
    stream, after_trim, batch = of_stock(name, format)

    can_trace = architecture.family in FAMILIES
    told = (
        pytest.warns(RuntimeWarning, match="trace=True traces none")
        if given.get("trace") and not can_trace
        else nullcontext()
    )

    with told:
        mlx_marlin.optimize(model, **given)

    assert_converted(model, given, can_trace=can_trace, can_join=architecture.joined)
    assert_close(decoded(model, [each.token for each in stream]), stream)
    assert_close(trimmed(model), after_trim)
    found = batched(model)
    assert found.keys() == batch.keys() == {0, 1, 2}
    for uid, expected in batch.items():
        assert_same_up_to_a_tie(found[uid], expected)
    assert_same_model(mlx_marlin.restore(model), architecture.model(*format))


def test_tokens_may_differ_in_a_tie_only() -> None:
    apart, tied = step(mx.array([0.0, 1.0, 0.5])), step(mx.array([0.0, 1.0, 1 - GATE]))
    other = Step(2, tied.logits)

    assert assert_same_choice(tied, tied)
    assert not assert_same_choice(other, tied)
    with pytest.raises(AssertionError, match="2 instead of 1, no tie"):
        assert_same_choice(other, apart)
    with pytest.raises(AssertionError):
        assert_close([tied], [apart])
