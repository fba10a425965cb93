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
from mlx_marlin.lm.drafts.draft_length import Acceptance, Choice, Lengths, Losses
from mlx_marlin.lm.drafts.pass_cost import HALF, PassCost, cost_of
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

    best = Lengths(
        probabilities,
        cost,
        waiting=waiting,
        seconds_of_draft=begun,
        seconds_of_token=each,
        are_fed_again=again,
    ).best(Losses(most=1e9))

    lengths = range(min(len(probabilities), 16 - waiting) + 1)
    assert best.length in lengths
    assert rate(best.length) == pytest.approx(max(map(rate, lengths)))
    assert best.rate == pytest.approx(rate(best.length))


def test_a_longer_draft_has_to_be_better_and_more_so_after_losses() -> None:
    def best(probabilities: list[float], seconds: dict[int, float]) -> Choice:
        return Lengths(probabilities, PassCost(seconds, "")).best(losses)

    losses = Losses()
    assert best([1.0], {1: 1.0, 2: 2.0}) == Choice(length=0, rate=1.0)
    assert best([0.5, 0.5], {1: 1.0, 3: 1.5}) == Choice(length=1, rate=1.2)
    flat, steep = {1: 1.0, 2: 1.45, 16: 1.46}, {1: 1.0, 4: 6.0}
    assert best([0.5, 0.1], flat).length == 2
    assert best([0.9] * 3, {1: 2.0, 4: 4.0}).length == 3
    assert best([1.0] * 3, steep | {3: 2.0}).length == 2  # 4 rows may lose 5 steps
    losses.observe(tokens=1, steps=5.0)
    assert losses.lost == pytest.approx(3.995)
    assert best([0.9] * 3, {1: 2.0, 4: 4.0}).length == 1  # at worst, the least
    assert best([0.5, 0.1], flat).length == 0  # 1.034 times plain steps
    losses.observe(tokens=3, steps=1.0)
    assert losses.lost == pytest.approx(1.98)
    assert best([0.9] * 3, {1: 2.0, 4: 4.0}).length == 3
    losses.observe(tokens=1, steps=1e9)
    assert losses.most_steps < 0
    for _ in range(2000):
        losses.observe(tokens=1, steps=1.0)
    assert (losses.lost, losses.least_gain) == (0, 1)


def test_lengths_of_which_little_is_known_are_tried_where_they_may_be_better() -> None:
    cost = PassCost({1: 1.0, 16: 1.15}, "test")
    lengths = Lengths([0.8] * 15, cost)
    losses = Losses()

    def tried(best: int, learns: bool = False) -> int:
        return lengths.to_try(best, losses, learns=learns)

    def see(rows: int, seconds: float, passes: int = 3, context: int = 1000) -> None:
        nonlocal lengths
        for _ in range(passes):
            cost.observe(rows, seconds, context)
        lengths = Lengths([0.8] * 15, cost)

    see(1, 1.0)
    see(5, 1.04)
    assert [tried(0), tried(4), tried(9)] == [1, 5, 8]  # 10 gain less than 5 % more
    see(6, 2.1, passes=1)  # once is enough if it was bad
    assert tried(4) == 9
    see(10, 4.0, passes=1)
    assert tried(4) == 3
    see(4, 1.03, passes=1)  # a tenth less may be by chance
    assert tried(4) == 3
    see(4, 1.03, passes=2)
    assert tried(4) == 0
    see(2, 2.0)
    assert [tried(0), tried(0, learns=True)] == [0, 1]
    losses.observe(tokens=1, steps=4.0)
    assert tried(0, learns=True) == 1
    losses.observe(tokens=1, steps=2.0)
    assert tried(0, learns=True) == 0
    see(1, 1.0, context=1000 + 2 * HALF)
    losses = Losses()
    assert tried(4) == 5  # that pass is forgotten
    assert Lengths([0.8], cost).to_try(1, losses, learns=True) == 0
    assert Lengths([0.8] * 9, cost, waiting=15).to_try(1, losses, learns=True) == 0


ROWS_SEEN = 1, 2, 3, 4, 6, 8, 9, 16


def test_seconds_are_known_between_and_corrected_by_what_is_seen() -> None:
    def cost(*observed: tuple[int, float]) -> list[float]:
        found = PassCost({8: 4.0, 2: 1.5, 1: 1.0, 4: 2.0}, "test")
        assert found.most_rows == 8
        for rows, seconds in observed:
            found.observe(rows, seconds, 10)
        return [found.seconds(m) for m in ROWS_SEEN]

    known = [1, 1.5, 1.75, 2, 3, 4, 4.5, 8]
    assert cost() == cost((9, 1.0)) == cost((1, 0.0)) == known
    # What one row takes longer is added, and more rows than known take it as often.
    longer = [3, 3.5, 3.75, 4, 5, 6, 6.75, 12]
    assert cost((1, 3.0)) == pytest.approx(longer)
    # A part of what was known is a part for all.
    assert cost((1, 0.5)) == pytest.approx([each / 2 for each in known])
    # Between rows that were seen, on a straight line; beyond them as the nearest.
    line = [3, 1.5 + 5 / 3, 1.75 + 4 / 3, 3, 4, 5, 5.625, 10]
    assert cost((1, 3.0), (4, 3.0)) == pytest.approx(line)
    assert cost((1, 1.0), (4, 1.0))[1:4] == pytest.approx([1.25, 1.75 * 2 / 3, 1])
    # A first pass that compiles, or one in which the host was away, is not believed.
    assert cost((1, 1.0), (4, 99.0))[3] == 4
    assert cost((1, 1.0), (4, 0.01))[3] == 1


def test_costs_follow_what_is_seen_and_all_follow_what_concerns_all() -> None:
    cost = PassCost({1: 1.0, 2: 1.5, 4: 2.0, 8: 4.0}, "test")
    for rows, seconds in ((1, 1.0), (4, 2.0)):
        for _ in range(8):
            cost.observe(rows, seconds, 100)
    cost.observe(4, 3.0, 100)  # a tenth of the surprise concerns all
    common = 1.5**0.1
    assert cost.seconds(1) == pytest.approx(common)
    assert cost.seconds(4) == pytest.approx(common * (2 + (3 / common - 2) / 9))
    for _ in range(60):  # a machine that is slowed
        cost.observe(4, 3.0, 160)
    assert cost.seconds(4) == pytest.approx(3.0, rel=0.01)
    assert 1.2 < cost.seconds(1) < 1.5
    assert cost.weight(4) == 16
    assert cost.weight(1) == pytest.approx(8 * 0.5 ** (60 / HALF))
    assert cost.weight(2) == 0
    for _ in range(60):
        cost.observe(1, 1.5, 9000)
    assert (cost.weight(4), cost.weight(1)) == (pytest.approx(0, abs=1e-3), 16)
    cost.observe(4, 4.0, 9000)  # after so long, one pass counts alone
    assert cost.seconds(4) == pytest.approx(4.0, rel=0.01)


def test_acceptance_is_that_of_tried_tokens_and_of_an_assumption() -> None:
    acceptance = Acceptance()

    def expected(accepted: float, tried: float) -> Any:
        return pytest.approx((accepted + 1.2) / (tried + 2), rel=1e-9)

    assert acceptance.probability(3) == expected(0, 0) == 0.6
    acceptance.observe(3, 1, 2)
    assert acceptance.probability(3) == expected(1, 2)
    acceptance.observe(3, 4, 5)
    assert acceptance.probability(3) == expected(4.95, 6.9)


def test_positions_are_at_first_as_those_before_them_and_a_change_is_noticed() -> None:
    acceptance = Acceptance()
    assert acceptance.of_positions(2) == [0.6, 0.6]
    acceptance.observe_positions(3, 1)  # the third was not reached
    assert acceptance.kinds == {0: (1, 1), 1: (0, 1)}
    first = 2.2 / 3
    second = 2 * first / 3
    assert acceptance.of_positions(3) == pytest.approx([first, second, second])
    acceptance.observe_positions(1, 1)
    assert acceptance.kinds[1] == (0, 0.95)  # fades, so that it follows the first
    for _ in range(60):
        acceptance.observe_positions(4, 4)
    assert min(acceptance.of_positions(4)) > 0.9
    for _ in range(3):
        acceptance.observe_positions(4, 0)
    assert acceptance.of_positions(4)[0] > 0.8
    assert acceptance.of_positions(4)[3] > 0.9
    acceptance.observe_positions(4, 0)
    first, *others = acceptance.of_positions(4)
    assert first < 0.5
    assert others == pytest.approx([first] * 3)
    for _ in range(5):
        acceptance.observe_positions(1, 1)
    assert acceptance.of_positions(2)[0] > 0.65


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
