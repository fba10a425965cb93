"""An index of the n-grams of a text, to look up what followed them before."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

LONGEST, SHORTEST = 8, 2
"""Tokens of the n-grams that are found."""
PLACES = 32
"""Earlier places of the last two tokens that are compared, the latest ones."""


class NgramIndex:
    """The tokens of a text, and where each pair of tokens ended before.

    Adding a token and looking up take constant time.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = [*tokens]
        self.length = self.end = 0
        self._last: dict[tuple[int, int], int] = {}
        self._before = [0] * min(len(self.tokens) + 1, SHORTEST)
        last, before = self._last, self._before
        for end, pair in enumerate(pairwise(self.tokens), SHORTEST):
            before.append(last.get(pair, 0))
            last[pair] = end
        self._match(before[-1])

    def add(self, token: int) -> None:
        """Adds a token to the text."""
        text, end = self.tokens, self.end
        goes_on = self.length and text[end] == token
        text.append(token)
        place = 0
        if len(text) >= SHORTEST:
            pair = text[-2], token
            place = self._last.get(pair, 0)
            self._last[pair] = len(text)
        self._before.append(place)
        length = min(self.length + 1, LONGEST) if goes_on else 0
        self._match(place)
        if length > self.length:  # its place is not among those that were compared
            self.length, self.end = length, end + 1

    def _match(self, place: int) -> None:
        self.length = self.end = 0
        for _ in range(PLACES):
            if not place or self.length == LONGEST:
                return
            length = self._common(place)
            if length > self.length:
                self.length, self.end = length, place
            place = self._before[place]

    def _common(self, place: int) -> int:
        """Returns how many tokens before a place are those at the end."""
        text, length = self.tokens, SHORTEST
        while length < min(LONGEST, place) and (
            text[place - length - 1] == text[-length - 1]
        ):
            length += 1
        return length

    def continuation(self, count: int) -> Sequence[int]:
        """Returns the tokens that followed that n-gram when it last occurred.

        Where the text ends, the continuation goes on with itself.
        """
        if not self.length:
            return []
        period = len(self.tokens) - self.end
        found: list[int] = self.tokens[self.end : self.end + count]
        for _ in range(count - len(found)):
            found.append(found[-period])
        return found
