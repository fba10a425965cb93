"""What drafts tokens: the text so far, or a smaller model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import perf_counter

import mlx.core as mx

from mlx_marlin.lm.drafts.draft_length import Acceptance
from mlx_marlin.lm.drafts.ngrams import LONGEST, NgramIndex
from mlx_marlin.lm.drafts.passes import Passes

SMOOTHING = 0.2
"""Weight of the latest draft in the time that a drafted token takes."""


class Drafter(ABC):
    """Drafts tokens, and learns how many of them are accepted."""

    seconds_of_token = 0.0

    def __init__(self) -> None:
        self.acceptance = Acceptance()

    @abstractmethod
    def begin(self, prompt: Sequence[int]) -> None:
        """Takes the text's first tokens."""

    @abstractmethod
    def add(self, token: int) -> None:
        """Adds a token to the text."""

    @abstractmethod
    def probabilities(self, most: int) -> list[float]:
        """Returns the probability of each position of a draft, at most `most`.

        It is that of a token if those before it are accepted; [] if there is no draft.
        """

    @abstractmethod
    def draft(self, count: int) -> Sequence[int]:
        """Returns a draft of the next tokens."""

    def observe(self, length: int, accepted: int) -> None:  # noqa: B027
        """Takes note of how many tokens of the last draft were accepted."""

    def decline(self) -> None:  # noqa: B027
        """Takes note that a draft that was possible was not made."""

    def show(self) -> None:  # noqa: B027
        """Makes a cache have the text and nothing else, until `resume`."""

    def resume(self) -> None:  # noqa: B027
        """Puts back what `show` took out of a cache."""

    def settle(self, count: int) -> None:  # noqa: B027
        """Makes a cache have the first `count` tokens of the text, for good."""


class LookupDrafter(Drafter):
    """Drafts what followed the longest n-gram at the end of the text before.

    It learns from each token of the text after a match, whether a draft was made of it
    or not.
    """

    def begin(self, prompt: Sequence[int]) -> None:
        """Takes the text's first tokens."""
        self._index = NgramIndex(prompt)

    def add(self, token: int) -> None:
        """Adds a token to the text, and counts whether a match foretold it."""
        index = self._index
        if index.length:
            was_right = index.tokens[index.end] == token
            self.acceptance.observe(index.length, int(was_right), 1)
        index.add(token)

    def probabilities(self, most: int) -> list[float]:
        """Returns the probabilities of matches that grow by each accepted token."""
        length = self._index.length
        if not length:
            return []
        kinds = range(length, length + most)
        return [self.acceptance.probability(min(kind, LONGEST)) for kind in kinds]

    def draft(self, count: int) -> Sequence[int]:
        """Returns the continuation of the match."""
        return self._index.continuation(count)


class ModelDrafter(Drafter):
    """Drafts the most likely tokens of another model with the same tokenizer."""

    def __init__(self, passes: Passes) -> None:
        """Keeps a draft model."""
        super().__init__()
        self._passes = passes
        self._text: list[int] = []
        self._fed: list[int] = []  # for the last draft, after `_start` tokens
        self._start = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Takes the text's first tokens."""
        self._text = [*prompt]

    def add(self, token: int) -> None:
        """Adds a token to the text."""
        self._text.append(token)

    def probabilities(self, most: int) -> list[float]:
        """Returns the probability of each position."""
        return [self.acceptance.probability(index) for index in range(most)]

    def draft(self, count: int) -> Sequence[int]:
        """Returns the model's most likely tokens, one pass each."""
        passes, started = self._passes, perf_counter()
        self._take_back()
        missed = self._text[passes.fed : -1]
        passes.feed(missed)
        if len(missed) > 1:  # a draft leaves one: the rest is the price of no draft
            started = perf_counter()
        tokens = mx.array(self._text[-1:], mx.uint32)
        passes.begin(count, passes=count)
        drafted = []
        for _ in range(count):
            tokens = mx.argmax(passes.run(tokens), axis=-1).astype(mx.uint32)
            mx.async_eval(tokens)
            drafted.append(tokens)
        found: list[int] = mx.concatenate(drafted).tolist()  # type: ignore[assignment]
        seconds = (perf_counter() - started) / count
        before = self.seconds_of_token or seconds
        self.seconds_of_token = (1 - SMOOTHING) * before + SMOOTHING * seconds
        self._start, self._fed = len(self._text) - 1, [self._text[-1], *found[:-1]]
        return found

    def observe(self, length: int, accepted: int) -> None:
        """Counts for each position that was tried."""
        for index in range(min(accepted + 1, length)):
            self.acceptance.observe(index, int(index < accepted), 1)

    def decline(self) -> None:
        """Moves the estimate for the first position towards the assumption."""
        self.acceptance.forget(0)

    def show(self) -> None:
        """Makes the model's cache have the text and nothing else, until `resume`."""
        self._take_back()
        self._passes.show(self._text)

    def resume(self) -> None:
        """Puts back the draft."""
        self._passes.resume()

    def settle(self, count: int) -> None:
        """Makes the model's cache have the first `count` tokens, for good."""
        del self._text[count:]
        self._take_back()
        self._passes.settle(self._text)

    def _take_back(self) -> None:
        """Takes back the tokens of the last draft from the first wrong one on."""
        pairs = zip(self._fed, self._text[self._start :], strict=False)
        wrong = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if wrong is not None:
            self._passes.keep(self._start + wrong)
            self._fed = []
