"""The length of a draft has the most expected tokens a second."""

from collections.abc import Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.lm.drafts import pass_cost
from mlx_marlin.lm.drafts.draft_length import Acceptance, Choice, best_length
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
    st.booleans(),
)
def test_no_other_length_is_better(
    seconds: list[float],
    probabilities: list[float],
    waiting: int,
    each: float,
    begun: float,
    again: bool,
) -> None:
    cost = PassCost(dict(zip(ROWS, seconds, strict=True)), "test")

    def rate(length: int) -> float:
        expected, later = 1.0, 0.0
        for accepted in range(length):
            before, probability = (
                prod(probabilities[:accepted]),
                probabilities[accepted],
            )
            expected += before * probability
            rows = waiting + accepted  # to be fed again, with the token that is right
            longer = max(cost.seconds(rows + 1) - cost.seconds(1), 0.0)
            later += before * (1 - probability) * longer * again
        drafting = begun + length * each + later if length else 0.0
        return expected / (cost.seconds(waiting + length) + drafting)

    best = best_length(
        probabilities,
        cost,
        waiting=waiting,
        seconds_of_draft=begun,
        seconds_of_token=each,
        are_fed_again=again,
    )

    lengths = range(min(len(probabilities), 16 - waiting) + 1)
    assert best.length in lengths
    assert rate(best.length) == pytest.approx(max(map(rate, lengths)))
    assert best.rate == pytest.approx(rate(best.length))


def test_a_longer_draft_has_to_be_better() -> None:
    assert best_length([1.0], PassCost({1: 1.0, 2: 2.0}, "")) == Choice(
        length=0, rate=1.0
    )
    assert best_length([0.5, 0.5], PassCost({1: 1.0, 3: 1.5}, "")) == Choice(
        length=1, rate=1.2
    )


def test_seconds_are_known_between_and_what_is_observed_counts_for_all() -> None:
    cost = PassCost({8: 4.0, 2: 1.5, 1: 1.0, 4: 2.0}, "test")
    rows = 1, 2, 3, 4, 6, 8, 9, 16
    assert cost.most_rows == 8

    def seconds() -> list[float]:
        return [cost.seconds(m) for m in rows]

    known = [1, 1.5, 1.75, 2, 3, 4, 4.5, 8]
    assert seconds() == known
    cost.observe(2.0)  # the first one counts wholly, and each further one as a tenth
    assert seconds() == pytest.approx([each + 1 for each in known])
    cost.observe(3.0)
    assert seconds() == pytest.approx([each + 1.1 for each in known])
    cost.observe(-16.9)  # so that the average is 0.2
    assert seconds() == pytest.approx([each * 0.2 for each in known])


def test_acceptance_is_that_of_tried_tokens_and_of_an_assumption() -> None:
    acceptance = Acceptance()

    def expected(accepted: float, tried: float) -> Any:
        return pytest.approx((accepted + 2.4) / (tried + 4), rel=1e-9)

    assert acceptance.probability(3) == expected(0, 0) == 0.6
    acceptance.observe(3, 1, 2)
    assert acceptance.probability(3) == expected(1, 2)
    acceptance.observe(3, 4, 5)
    assert acceptance.probability(3) == expected(4.98, 6.96)
    acceptance.forget(3)
    assert acceptance.probability(3) == expected(4.98 * 0.9995, 6.96 * 0.9995)
    acceptance.forget(4)
    assert acceptance.probability(4) == 0.6


LAYERS = {"q": (3, 100.0), "down": (2, 10.0)}
"""Number of layers of a group, and their microseconds for each row."""


def a_report(missing: int = 0, names: Sequence[str] = ("q", "down")) -> Any:
    """Returns a report on groups of layers; a product has no time with some rows."""
    layers = [SimpleNamespace(use=None, decisions=())]  # not quantized
    for name in names:
        count, us = LAYERS[name]
        decisions = [
            SimpleNamespace(
                rows=m, time=None if m == missing else SimpleNamespace(us=us * m)
            )
            for m in ROWS
        ]
        use = SimpleNamespace(paths=range(count))
        layers.append(SimpleNamespace(use=use, decisions=decisions))
    return SimpleNamespace(layers=layers)


@pytest.mark.parametrize(
    ("found", "source", "each"),
    [
        (a_report(), "predicted", 320e-6),
        (a_report(missing=12), "assumed", 0.0),
        (a_report(names=()), "assumed", 0.0),
    ],
)
@pytest.mark.parametrize("measured", [(), (1,), (2, 4), (1, 2, 4)])
def test_the_cost_is_measured_or_predicted_or_assumed(
    monkeypatch: pytest.MonkeyPatch,
    found: Any,
    source: str,
    each: float,
    measured: tuple[int, ...],
) -> None:
    """Measured seconds of a pass that is served; predicted ones from microseconds."""
    model, asked = nn.Module(), []

    def report(*given: Any) -> Any:
        asked.append(given)
        return found

    monkeypatch.setattr(pass_cost, "report", report)
    if measured:
        times = {m: (0.01 * m, 0.02) for m in measured}
        kept = Forwards(key="k", layout="mlx", seconds=times, date="2026-11-26")
        object.__setattr__(model, FORWARDS, kept)
    cost, again = cost_of(model), cost_of(model)

    seconds = [cost.seconds(m) for m in ROWS]
    assert seconds == [again.seconds(m) for m in ROWS]
    if {1, 2} <= {*measured}:
        assert (cost.source, cost.most_rows, asked) == ("measured", 4, [])
        assert seconds[:4] == pytest.approx([0.01, 0.02, 0.02, 0.02])
        return
    assert asked == [(model, ROWS)]  # which takes long
    assert (cost.source, cost.most_rows) == (source, 16)
    expected = [each * m if each else 1 + 0.1 * (m - 1) for m in ROWS]
    assert seconds == pytest.approx(expected)
    assert not model.parameters()


def test_the_cost_of_a_model_with_quantized_layers_is_predicted() -> None:
    predicted = cost_of(tiny_llama())
    assert predicted.source == "predicted"
    assert predicted.seconds(8) >= predicted.seconds(1) > 0
