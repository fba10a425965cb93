"""An index of the n-grams of a text, to look up what followed them before."""

from collections.abc import Iterable, Sequence

LONGEST, SHORTEST = 8, 2
"""Tokens of the n-grams in the index."""


class NgramIndex:
    """The tokens of a text, and where its n-grams ended last.

    Adding a token and looking up take constant time.

    Attributes:
        tokens: The text so far.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(LONGEST + 1)]
        self._before: tuple[int, int] | None = None
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Adds a token to the text."""
        text = self.tokens
        text.append(token)
        end = len(text)
        self._before = None
        for n in range(min(LONGEST, end), SHORTEST - 1, -1):
            ends, key = self._ends[n], tuple(text[end - n :])
            if self._before is None and key in ends:
                self._before = n, ends[key]
            ends[key] = end

    def match(self) -> int:
        """Returns the length of the longest n-gram at the end that occurred before."""
        return 0 if self._before is None else self._before[0]

    def continuation(self, count: int) -> Sequence[int]:
        """Returns the tokens that followed that n-gram when it last occurred.

        Where the text ends, the continuation goes on with itself.

        Args:
            count: Number of tokens; none are returned without a match.
        """
        if self._before is None:
            return []
        start = self._before[1]
        period = len(self.tokens) - start
        found: list[int] = []
        for index in range(count):
            inside = index < period
            found.append(self.tokens[start + index] if inside else found[-period])
        return found
