"""The index finds the longest n-gram before, and of these the latest."""

from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.lm.drafts.ngrams import LONGEST, SHORTEST, NgramIndex

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def longest(text: list[int]) -> tuple[int, int]:
    """Returns the length of the match and where it ended, by trying everything."""
    for n in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return n, end
    return 0, 0


@given(TEXTS, st.integers(0, 12))
def test_the_match_is_the_longest_and_latest(text: list[int], count: int) -> None:
    index = NgramIndex(text)
    n, end = longest(text)

    assert index.length == n
    whole = [*text]
    for _ in range(count):
        whole.append(whole[end + len(whole) - len(text)] if n else 0)
    expected = whole[len(text) :] if n else []
    assert [*index.continuation(count)] == expected


def test_a_period_goes_on() -> None:
    assert NgramIndex([1, 2, 3, 1, 2]).continuation(7) == [3, 1, 2, 3, 1, 2, 3]
