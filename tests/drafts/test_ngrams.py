"""The index finds the longest n-gram before, and of these the latest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.lm.drafts.ngrams import LONGEST, PLACES, SHORTEST, NgramIndex

TEXTS = st.lists(st.integers(0, 3), max_size=PLACES)


def longest(text: list[int]) -> tuple[int, int]:
    """Returns the length of the match and where it ended, by trying everything."""
    for n in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return n, end
    return 0, 0


@given(TEXTS, st.integers(0, PLACES), st.integers(0, 12))
def test_the_match_is_the_longest_and_latest(
    text: list[int], given: int, count: int
) -> None:
    index = NgramIndex(text[:given])
    for token in text[given:]:
        index.add(token)
    n, end = longest(text)

    assert index.length == n
    whole = [*text]
    for _ in range(count):
        whole.append(whole[end + len(whole) - len(text)] if n else 0)
    expected = whole[len(text) :] if n else []
    assert [*index.continuation(count)] == expected


def test_a_bounded_number_of_places_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = [each for i in range(500) for each in (1, 2, 100 + i)]
    compared = []
    own = NgramIndex._common
    monkeypatch.setattr(
        NgramIndex, "_common", lambda *given: compared.append(0) or own(*given)
    )
    index = NgramIndex(text)
    for token in (1, 2):
        compared.clear()
        index.add(token)
        assert len(compared) <= PLACES


def test_a_passage_is_followed_where_its_pairs_come_again_too_often() -> None:
    passage = [7, 1, 2, 1, 2, 1, 3, 4]
    index = NgramIndex([*passage, *[1, 2] * PLACES, 9, 7, 1])
    for position in range(2, len(passage)):
        assert index.continuation(1) == [passage[position]]
        index.add(passage[position])
    assert index.length == LONGEST
