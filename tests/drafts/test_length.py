"""The length of a draft has the most expected tokens a second."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.lm.drafts import pass_cost
from mlx_marlin.lm.drafts.draft_length import Acceptance, best_length
from mlx_marlin.lm.drafts.pass_cost import PassCost, cost_of
from mlx_marlin.lm.race.forward_race import FORWARDS
from mlx_marlin.planning.measurement import Forwards
from support.models import tiny_llama

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


@given(
    st.lists(st.floats(0.001, 0.1), min_size=len(ROWS), max_size=len(ROWS)),
    st.lists(st.floats(0, 1), max_size=20),
    st.integers(1, 4),
    st.floats(0, 0.01),
    st.floats(0, 0.01),
)
def test_no_other_length_is_better(
    seconds: list[float],
    probabilities: list[float],
    waiting: int,
    each: float,
    begun: float,
) -> None:
    cost = PassCost(dict(zip(ROWS, seconds, strict=True)), "test")

    def rate(length: int) -> float:
        product, expected = 1.0, 1.0
        for probability in probabilities[:length]:
            product *= probability
            expected += product
        drafting = begun + length * each if length else 0.0
        return expected / (cost.seconds(waiting + length) + drafting)

    best = best_length(
        probabilities,
        cost,
        waiting=waiting,
        seconds_of_draft=begun,
        seconds_of_token=each,
    )

    lengths = range(min(len(probabilities), 16 - waiting) + 1)
    assert best.length in lengths
    assert rate(best.length) == pytest.approx(max(map(rate, lengths)))
    assert best.rate == pytest.approx(rate(best.length))


def test_seconds_are_known_between_and_what_is_observed_counts_for_all() -> None:
    cost = PassCost({1: 1.0, 2: 1.5, 4: 2.0, 8: 4.0}, "test")
    assert [cost.seconds(m) for m in (1, 2, 3, 4, 6, 8)] == [1, 1.5, 1.75, 2, 3, 4]
    assert cost.seconds(16) == 8.0
    for _ in range(100):
        cost.observe(2.0)
    assert cost.seconds(1) == pytest.approx(2.0)
    assert cost.seconds(8) == pytest.approx(5.0)
    for _ in range(100):
        cost.observe(0.5)
    assert cost.seconds(1) == pytest.approx(0.5, rel=1e-3)
    assert cost.seconds(8) == pytest.approx(2.0, rel=1e-3)
    assert cost.seconds(16) == pytest.approx(4.0, rel=1e-3)


def test_acceptance_is_learned_and_the_assumption_comes_back() -> None:
    acceptance = Acceptance()
    assumed = acceptance.probability(3)
    for _ in range(50):
        acceptance.observe(3, 0, 1)
    assert acceptance.probability(3) < 0.1
    assert acceptance.probability(4) == assumed
    for _ in range(20000):
        acceptance.forget(3)
    assert acceptance.probability(3) == pytest.approx(assumed, abs=0.01)
    for _ in range(50):
        acceptance.observe(3, 4, 4)
    assert acceptance.probability(3) > 0.9


def test_the_cost_is_measured_predicted_or_assumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_llama()
    predicted = cost_of(model)
    assert predicted.source == "predicted"
    assert predicted.seconds(8) >= predicted.seconds(1)
    monkeypatch.setattr(pass_cost, "report", None)  # which is asked once
    assert cost_of(model).seconds(1) == predicted.seconds(1)

    times = {m: (0.01 * m, 0.02) for m in ROWS}
    kept = Forwards(key="k", layout="mlx", seconds=times, date="2026-11-26")
    object.__setattr__(model, FORWARDS, kept)
    measured = cost_of(model)
    assert measured.source == "measured"
    assert [measured.seconds(m) for m in (1, 2, 4)] == [0.01, 0.02, 0.02]


def test_nothing_is_known_of_a_model_without_quantized_layers() -> None:
    class Float(nn.Module):
        def __call__(self, x: mx.array, cache: Any = None) -> mx.array:
            return x

    cost = cost_of(Float())

    assert cost.source == "assumed"
    assert cost.seconds(1) < cost.seconds(16) < 3 * cost.seconds(1)
