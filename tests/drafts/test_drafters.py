"""What a drafter drafts, and what it learns of it."""

from collections.abc import Sequence

import mlx.core as mx
import pytest

from drafts.scripted import counting
from mlx_marlin.lm.drafts import drafters
from mlx_marlin.lm.drafts.draft_length import Lengths
from mlx_marlin.lm.drafts.drafters import LookupDrafter, ModelDrafter
from mlx_marlin.lm.drafts.pass_cost import PassCost
from mlx_marlin.lm.drafts.passes import Passes


def lookup_text(text: Sequence[int], cost: dict[int, float]) -> tuple[int, int]:
    """Returns the drafts of a lookup drafter that is told a text token by token."""
    drafter, passes = LookupDrafter(), PassCost(cost, "test")
    drafter.begin(())
    drafted = wrong = 0
    for position, token in enumerate(text):
        drafter.add(token)
        probabilities = drafter.probabilities(15)
        if not probabilities:
            continue
        length = Lengths(probabilities, passes).best().length
        if not length:
            continue
        draft = drafter.draft(length)
        following = text[position + 1 : position + 1 + length]
        pairs = zip(draft, following, strict=False)
        accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), length)
        drafted, wrong = drafted + length, wrong + length - accepted
    return drafted, wrong


COST = {1: 1.0, 2: 1.3, 4: 1.6, 8: 2.2, 16: 3.5}


def test_drafts_that_are_always_wrong_are_no_longer_offered() -> None:
    # Pairs that come again, each time followed by something new.
    text = [each for i in range(2000) for each in (1, 2, 100 + i)]

    drafted, wrong = lookup_text(text, COST)

    assert wrong == drafted
    assert drafted < 60  # of 2000 matches


def test_a_match_is_judged_by_the_token_after_it_without_a_draft() -> None:
    """So that no pass waits for tokens that would not be drafted, and none is tried."""
    drafter = LookupDrafter()
    assert not drafter.learns_by_drafts
    drafter.begin([1, 2, 99])
    for i in range(60):
        for token in (1, 2, 100 + i):
            drafter.add(token)
    for token in (1, 2):
        drafter.add(token)
    kinds = 2, 3, 4  # of the match, and with each accepted token
    probabilities = [drafter.acceptance.probability(kind) for kind in kinds]
    assert drafter.probabilities(3) == probabilities
    assert probabilities[0] < 0.1 < probabilities[1]
    for token in [*range(200, 220)] * 4:
        drafter.add(token)
    assert drafter.probabilities(2) == [drafter.acceptance.probability(8)] * 2
    assert drafter.probabilities(1)[0] > 0.9


def test_a_text_that_repeats_is_drafted() -> None:
    drafted, wrong = lookup_text([*range(30)] * 20, COST)

    assert drafted > 2000
    assert wrong < 0.02 * drafted


def test_a_lookup_counts_each_token_after_a_match() -> None:
    drafter = LookupDrafter()
    kinds = drafter.acceptance.kinds
    drafter.begin([1, 2, 9, 8, 1])
    assert drafter.probabilities(3) == drafter.draft(3) == []
    drafter.add(2)  # no match before it
    assert kinds == {}
    assert drafter.probabilities(3) == pytest.approx([0.6] * 3)
    assert [*drafter.draft(3)] == [9, 8, 1]
    drafter.add(9)
    assert kinds == {2: (1, 1)}
    assert [*drafter.draft(2)] == [8, 1]
    drafter.add(7)
    assert kinds == {2: (1, 1), 3: (0, 1)}
    for token in (3, 1, 2):
        drafter.add(token)
    assert kinds == {2: (1, 1), 3: (0, 1)}
    assert drafter.probabilities(3) == pytest.approx([2.2 / 3, 1.2 / 3, 0.6])
    assert [*drafter.draft(2)] == [9, 7]  # the latest


def test_a_model_is_fed_each_token_once_and_its_time_is_for_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fed: list[list[int]] = []

    def model(tokens: mx.array, cache: object) -> mx.array:
        fed.append(tokens[0].tolist())  # type: ignore[arg-type]
        return counting(tokens, cache)

    clock = iter([0.0, 10.0, 13.0, 20.0, 30.0, 40.0, 40.8, 50.0, 50.0])
    monkeypatch.setattr(drafters, "perf_counter", lambda: next(clock))
    drafter = ModelDrafter(Passes(model, []))  # type: ignore[arg-type]
    drafter.begin([5, 6, 7])
    assert drafter.seconds_of_token == 0

    for text, drafted, passes, seconds in (
        ([], [8, 9, 10], [[5, 6], [7], [8], [9]], 0.0),  # the first may compile
        ([8, 9, 10, 11], [12, 13], [[10], [11], [12]], 5.0),
        ([12, 40], [41, 42, 43, 44], [[40], [41], [42], [43]], 0.8 * 5 + 0.2 * 0.2),
        ([41, 0], [1], [[0]], 0.8 * 4.04),  # takes two of the four back
    ):
        for token in text:
            drafter.add(token)
        fed.clear()
        assert drafter.draft(len(drafted)) == drafted
        assert fed == passes
        assert drafter.seconds_of_token == pytest.approx(seconds)
    assert drafter._passes.fed == 11


def test_one_slow_draft_does_not_end_all_drafts() -> None:
    """What a token takes is seen while drafting only."""
    drafter = ModelDrafter(Passes(None, []))  # type: ignore[arg-type]
    for seconds in (70.0, 1.0, 1.0, 50.0):
        drafter._observe_seconds(seconds)
    assert drafter.seconds_of_token == pytest.approx(0.8 + 0.2 * 2)


def test_a_model_counts_accepted_tokens_and_the_first_wrong_one() -> None:
    drafter = ModelDrafter(Passes(None, []))  # type: ignore[arg-type]
    kinds = drafter.acceptance.kinds
    drafter.observe(3, 1)
    assert kinds == {0: (1, 1), 1: (0, 1)}
    drafter.observe(2, 2)  # all of them
    drafter.observe(1, 0)
    assert kinds == {
        0: pytest.approx((0.95 * 1.95, 0.95 * 1.95 + 1)),
        1: pytest.approx((0.95, 0.95 * 1.95)),
    }
    assert drafter.probabilities(3) == drafter.acceptance.of_positions(3)
