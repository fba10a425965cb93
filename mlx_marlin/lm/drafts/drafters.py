"""What drafts tokens: the text so far, a smaller model, or the model's own head."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from time import perf_counter

import mlx.core as mx

from mlx_marlin.lm.drafts.draft_length import Acceptance
from mlx_marlin.lm.drafts.hidden_rows import PENDING, HiddenPasses
from mlx_marlin.lm.drafts.ngrams import LONGEST, NgramIndex
from mlx_marlin.lm.drafts.passes import Passes

SMOOTHING = 0.2
"""Weight of the latest draft in the time that a drafted token takes."""
MOST_GROWTH = 2.0
"""By how much the latest draft may be slower than those before, to count."""


class Drafter(ABC):
    """Drafts tokens, and learns how many of them are accepted."""

    name = "drafts"  # In what is said of drafts
    seconds_of_token = 0.0
    learns_by_drafts = True
    """Whether nothing is learnt of a text for which nothing is drafted."""

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

    name, learns_by_drafts = "lookup", False

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


class ComputingDrafter(Drafter):
    """Computes drafts, and counts for each position of a draft how good they are."""

    def __init__(self) -> None:
        super().__init__()
        self._text: list[int] = []
        self._is_warm = False

    def begin(self, prompt: Sequence[int]) -> None:
        """Takes the text's first tokens."""
        self._text = [*prompt]

    def add(self, token: int) -> None:
        """Adds a token to the text."""
        self._text.append(token)

    def probabilities(self, most: int) -> list[float]:
        """Returns the probability of each position."""
        return self.acceptance.of_positions(most)

    def draft(self, count: int) -> Sequence[int]:
        """Returns the most likely tokens, and takes note of the time."""
        started = perf_counter()
        if self._catch_up() > 1:  # a draft leaves one: the rest is the price of none
            started = perf_counter()
        found: list[int] = mx.concatenate([*self._tokens(count)]).tolist()  # type: ignore[assignment]
        self._observe_seconds((perf_counter() - started) / count)
        self._drafted(found)
        return found

    def _observe_seconds(self, seconds: float) -> None:
        """Takes note of what a token took, except of the first, which may compile.

        One slow draft must not be the last: the time is seen when drafting only.
        """
        if self._is_warm:
            before = self.seconds_of_token or seconds
            own = min(seconds, MOST_GROWTH * before)
            self.seconds_of_token = (1 - SMOOTHING) * before + SMOOTHING * own
        self._is_warm = True

    def _catch_up(self) -> int:
        """Feeds what was missed without drafts, and returns how many rows that were."""
        return 0

    @abstractmethod
    def _tokens(self, count: int) -> Iterator[mx.array]:
        """Yields tokens [1], each of which is being computed."""

    def _drafted(self, tokens: list[int]) -> None:
        """Takes note of a draft."""

    def observe(self, length: int, accepted: int) -> None:
        """Counts for each position that was tried."""
        self.acceptance.observe_positions(length, accepted)


class ModelDrafter(ComputingDrafter):
    """Drafts the most likely tokens of another model with the same tokenizer."""

    name = "model"

    def __init__(self, passes: Passes) -> None:
        """Keeps a draft model."""
        super().__init__()
        self._passes = passes
        self._fed: list[int] = []  # for the last draft, after `_start` tokens
        self._start = 0

    def _catch_up(self) -> int:
        self._take_back()
        missed = self._text[self._passes.fed : -1]
        self._passes.feed(missed)
        return len(missed)

    def _tokens(self, count: int) -> Iterator[mx.array]:
        """Yields the tokens of one pass each."""
        passes = self._passes
        tokens = mx.array(self._text[-1:], mx.uint32)
        passes.begin(count, passes=count)
        for _ in range(count):
            tokens = _likeliest(passes.run(tokens))
            yield tokens

    def _drafted(self, tokens: list[int]) -> None:
        self._start, self._fed = len(self._text) - 1, [self._text[-1], *tokens[:-1]]

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


class HeadDrafter(ComputingDrafter):
    """Drafts the most likely tokens of a model's own head.

    The head's cache has pairs: of token i + 1 and the model's hidden state of token i.
    Before a draft it is fed those that it lacks; what it computed from its own states
    is taken back after it. So it always has pairs of the text, and no others.
    """

    name = "heads"

    def __init__(self, head: HiddenPasses, model: HiddenPasses) -> None:
        """Keeps the passes of a head and of its model."""
        super().__init__()
        self._head, self._model = head, model
        model.feed_head = self._feed_many

    def settle(self, count: int) -> None:
        """Makes the head's cache have the pairs of the first `count` tokens."""
        del self._text[count:]
        self._head.keep(max(count - 1, 0))
        self._feed()
        self._head.evaluate()

    def _tokens(self, count: int) -> Iterator[mx.array]:
        """Yields the tokens of one pass each, which go on from the head's states."""
        head, logits = self._head, self._feed()
        assert logits is not None  # the text has grown since the last draft
        tokens = _likeliest(logits)
        yield tokens
        pairs = head.fed
        if count > 1:
            head.begin(count - 1, passes=count)  # `settle` may go a pair further back
        for position in range(pairs, pairs + count - 1):
            hidden = head.rows.take(position - 1, position)
            tokens = _likeliest(head.run(tokens, hidden=hidden[None]))
            yield tokens
        head.keep(pairs)

    @property
    def _known(self) -> int:
        """The number of pairs that can be fed."""
        return min(self._model.rows.end, len(self._text) - 1)

    def _feed_many(self) -> None:
        """Feeds the head if many rows wait, but not the last, which drafts."""
        if self._known - self._head.fed >= PENDING:
            self._feed(spared=1)
            self._head.evaluate()
            self._head.rows.cut(0)

    def _feed(self, spared: int = 0) -> mx.array | None:
        """Feeds the head the pairs of the text that it lacks, if there are any.

        Returns the logits [1, vocabulary] of the token after them.
        `spared`: how many of the last pairs are left.
        """
        start, end = self._head.fed, self._known - spared
        if start >= end:
            return None
        hidden = self._model.rows.take(start, end)
        self._head.rows.cut(0)
        tokens = mx.array(self._text[start + 1 : end + 1], mx.uint32)
        return self._head.run(tokens, hidden=hidden[None])


def _likeliest(logits: mx.array) -> mx.array:
    """Begins to compute the most likely token [1]."""
    tokens = mx.argmax(logits, axis=-1).astype(mx.uint32)
    mx.async_eval(tokens)
    return tokens
