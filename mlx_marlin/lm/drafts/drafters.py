"""What drafts tokens: the text so far, or a smaller model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import perf_counter

import mlx.core as mx

from mlx_marlin.lm.drafts.draft_length import Acceptance
from mlx_marlin.lm.drafts.ngrams import NgramIndex
from mlx_marlin.lm.drafts.passes import Passes

SMOOTHING = 0.2
"""Weight of the latest draft in the time that a drafted token takes."""


class Drafter(ABC):
    """Drafts tokens, and learns how many of them are accepted.

    Attributes:
        always: Whether there is a draft after every token.
        seconds_of_token: Seconds that one drafted token takes.
    """

    always: bool
    seconds_of_token = 0.0

    def __init__(self) -> None:
        self.acceptance = Acceptance()

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

    @abstractmethod
    def observe(self, length: int, accepted: int) -> None:
        """Takes note of how many tokens of the last draft were accepted."""

    @abstractmethod
    def decline(self) -> None:
        """Takes note that a draft that was possible was not made."""

    @abstractmethod
    def settle(self) -> None:
        """Makes the drafter's cache, if it has one, have the text and nothing else."""


class LookupDrafter(Drafter):
    """Drafts what followed the longest n-gram at the end of the text before."""

    always = False

    def __init__(self) -> None:
        super().__init__()
        self._index = NgramIndex()
        self._kind = 0

    def add(self, token: int) -> None:
        """Adds a token to the text."""
        self._index.add(token)

    def probabilities(self, most: int) -> list[float]:
        """Returns the same probability for all positions, by the match's length."""
        self._kind = self._index.match()
        return [self.acceptance.probability(self._kind)] * most if self._kind else []

    def draft(self, count: int) -> Sequence[int]:
        """Returns the continuation of the match."""
        return self._index.continuation(count)

    def observe(self, length: int, accepted: int) -> None:
        """Counts for the match's length: the first wrong token was tried too."""
        self.acceptance.observe(self._kind, accepted, min(accepted + 1, length))

    def decline(self) -> None:
        """Moves the estimate for the match's length towards the assumption."""
        self.acceptance.forget(self._kind)

    def settle(self) -> None:
        """Does nothing, since there is no cache."""


class ModelDrafter(Drafter):
    """Drafts the most likely tokens of another model with the same tokenizer."""

    always = True

    def __init__(self, passes: Passes) -> None:
        """Keeps a draft model.

        Args:
            passes: Its forward passes; nothing has been fed.
        """
        super().__init__()
        self._passes = passes
        self._text: list[int] = []
        self._drafted: Sequence[int] = ()

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
        passes.feed(self._text[passes.fed : -1])
        tokens = mx.array(self._text[-1:], mx.uint32)
        passes.begin(count)
        drafted = []
        for _ in range(count):
            tokens = mx.argmax(passes.run(tokens), axis=-1).astype(mx.uint32)
            mx.async_eval(tokens)
            drafted.append(tokens)
        found: list[int] = mx.concatenate(drafted).tolist()  # type: ignore[assignment]
        seconds = (perf_counter() - started) / count
        before = self.seconds_of_token or seconds
        self.seconds_of_token = (1 - SMOOTHING) * before + SMOOTHING * seconds
        self._drafted = found
        return found

    def observe(self, length: int, accepted: int) -> None:
        """Counts for each position that was tried."""
        for index in range(min(accepted + 1, length)):
            self.acceptance.observe(index, int(index < accepted), 1)

    def decline(self) -> None:
        """Moves the estimate for the first position towards the assumption."""
        self.acceptance.forget(0)

    def settle(self) -> None:
        """Takes back a draft, and feeds what is missing."""
        self._take_back()
        self._passes.feed(self._text[self._passes.fed :])

    def _take_back(self) -> None:
        """Takes back what was fed and is not the text."""
        passes = self._passes
        common = min(passes.fed, len(self._text))
        start = passes.fed - max(len(self._drafted) - 1, 0)
        for index, token in enumerate(self._drafted[: passes.fed - start]):
            if start + index >= len(self._text) or self._text[start + index] != token:
                common = start + index
                break
        passes.reject(passes.fed - common)
        self._drafted = ()
