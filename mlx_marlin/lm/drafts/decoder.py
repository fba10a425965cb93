"""The decoding loop: plain steps that run one ahead, and passes that verify drafts."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx

from mlx_marlin.lm.drafts.draft_length import BETWEEN, PLAIN, Choice, Lengths, Losses
from mlx_marlin.lm.drafts.drafters import Drafter
from mlx_marlin.lm.drafts.pass_cost import LARGEST, PassCost
from mlx_marlin.lm.drafts.passes import Passes

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]
SMOOTHING = 0.1
"""Weight of the latest pass in the time that it takes to begin one."""
CLEARED = 256
"""Tokens after which MLX's cache of free memory is cleared, as mlx-lm does."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Token:
    """A generated token."""

    token: int  # The token
    logprobs: mx.array  # Log probabilities [vocabulary] that it was chosen by
    from_draft: bool  # Whether it was drafted
    rows: int  # Rows of the pass that verified or computed it


class Picker:
    """Chooses tokens from logits, each as without drafts.

    Sampler and processors may have a state: they are called once for each token of the
    text and in its order. So a drafted token's position has its turn when the token
    is accepted.
    """

    def __init__(
        self, sampler: Sampler | None, processors: Sequence[Processor]
    ) -> None:
        """Keeps what chooses.

        `sampler`: from log probabilities [1, vocabulary] to tokens [1].
        `processors`: change the logits [1, vocabulary] of a position, given all tokens
        before it.
        """
        self._sampler, self._processors = sampler, processors
        self._text: mx.array | None = None
        self.is_greedy = sampler is None and not processors

    def add(self, tokens: mx.array | Sequence[int]) -> None:
        """Adds tokens to the text that processors are given."""
        if self._processors:
            if not isinstance(tokens, mx.array):
                tokens = mx.array([*tokens], mx.uint32)
            new, text = tokens.astype(mx.uint32), self._text
            self._text = new if text is None else mx.concatenate([text, new])

    def pick(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Begins to choose, and returns tokens and log probabilities.

        `logits`: logits [1, vocabulary] of the position after the text; of any number
        of positions if `is_greedy`.
        """
        for processor in self._processors:
            logits = processor(self._text, logits)  # type: ignore[arg-type]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        sampler = self._sampler
        tokens = mx.argmax(logprobs, axis=-1) if sampler is None else sampler(logprobs)
        mx.async_eval(tokens, logprobs)
        return tokens, logprobs


class Positions:
    """The positions of a pass, whose tokens are chosen one after the other."""

    def __init__(
        self, logits: mx.array, picker: Picker, draft: Sequence[int] = (), rows: int = 1
    ) -> None:
        """Begins to choose the first token.

        `logits`: logits [positions, vocabulary].
        """
        self.draft, self.index = [*draft], 0
        self._logits, self._picker, self.rows = logits, picker, rows
        self._begin(logits if picker.is_greedy else logits[:1])

    def _begin(self, logits: mx.array) -> None:
        self.tokens, self._logprobs = self._picker.pick(logits)
        self._found: list[int] = []

    def read(self) -> Token:
        """Waits for the token of the next position."""
        if not self._found:
            self._found = self.tokens.tolist()  # type: ignore[assignment]
        index = self.index
        at = index if self._picker.is_greedy else 0
        return Token(
            token=self._found[at],
            logprobs=self._logprobs[at],
            from_draft=self.draft[index : index + 1] == [self._found[at]],
            rows=self.rows,
        )

    def accept(self) -> None:
        """Goes on to the position after the next drafted token."""
        self._picker.add(self.draft[self.index : self.index + 1])
        self.index += 1
        if not self._picker.is_greedy:
            self._begin(self._logits[self.index : self.index + 1])


class Decoder:
    """Decodes a text, drafting tokens where that is expected to pay."""

    def __init__(
        self,
        passes: Passes,
        drafters: Sequence[Drafter],
        cost: PassCost,
        picker: Picker,
        stream: Any,
        *,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Keeps what decoding needs.

        `drafters`: each pass verifies the draft of one, the first of equals.
        `cost`: the seconds of a pass.
        """
        self._passes, self._drafters, self._cost = passes, drafters, cost
        self._drafter: Drafter | None = None  # who made the last draft
        self._picker, self._stream, self._clock = picker, stream, clock
        self._text: list[int] = []
        self._yielded = 0  # tokens of the text that the caller knows
        self._to_begin = 0.0  # seconds until a pass of one row is begun
        self._last: float | None = None  # when the pass before was read
        self._was_ahead = False  # whether the pass after it was begun before
        self._drafting = 0.0  # seconds of the draft since then
        self._losses = Losses()
        self._since_trial = 0  # passes
        self.drafted = self.accepted = self.passes = 0
        self.accepted_by: Counter[str] = Counter()  # drafter's name -> accepted tokens

    def tokens(
        self,
        prompt: Sequence[int],
        most: int,
        told: Callable[[int], None] = lambda _: None,
    ) -> Generator[Token, None, None]:
        """Yields tokens; at each of them, the caches have all that were yielded.

        They have these and no others when it ends, is closed or fails, too.
        """
        self._text, self._yielded = [*prompt], len(prompt)
        for drafter in self._drafters:
            drafter.begin(prompt)
        self._picker.add(prompt[:-1])
        with mx.stream(self._stream):
            self._passes.feed(prompt[:-1], told)
        try:
            yield from self._decoded(len(prompt) + most if most >= 0 else -1)
        finally:
            self._settle()

    def _decoded(self, end: int) -> Iterator[Token]:
        current = self._launch(end)
        while current is not None:
            ahead = self._ahead(current, end)
            token = current.read()
            self.passes += not current.index
            if not token.from_draft:
                self._observe(current, ahead is not None)
            self._text.append(token.token)
            for drafter in self._drafters:
                drafter.add(token.token)
            current = ahead or self._following(current, token, end)
            self._show()
            yield token
            self._resume()
            if len(self._text) % CLEARED == 0:
                mx.clear_cache()

    def _observe(self, read: Positions, is_ahead: bool) -> None:
        """Takes note of the seconds of a pass, whose last token was read.

        They are those since the last token of the pass before, but for those in which
        a draft was made or the pass was begun.
        """
        now, steps = self._clock(), 1.0
        if self._last is not None:
            since = now - self._last
            seconds = since - self._drafting
            if not self._was_ahead:
                seconds -= self._to_begin
            self._cost.observe(read.rows, seconds, self._passes.fed)
            if read.rows > 1:  # of a draft, not what the drafter had missed before
                drafter, count = self._drafter, len(read.draft)
                each = drafter.seconds_of_token if drafter else 0.0
                passed = since - self._drafting
                # More was no draft's loss: a kernel was compiled, or the host away.
                believed = min(passed, LARGEST * self._cost.seconds(read.rows))
                steps = (believed + count * each) / self._cost.seconds(1)
        self._losses.observe(read.index + 1, steps)
        self._last, self._was_ahead, self._drafting = now, is_ahead, 0.0

    def _left(self, end: int) -> int:
        """Returns how many tokens are to come, or as many as a draft can have."""
        return end - len(self._text) if end >= 0 else self._cost.most_rows + 1

    def _ahead(self, current: Positions, end: int) -> Positions | None:
        """Begins the next pass while the host waits for its token, unless a draft pays.

        A draft needs that token.
        """
        left = self._left(end) - 1
        if current.draft or left <= 0 or self._choose(left - 1)[1]:
            return None
        started = self._clock()
        with mx.stream(self._stream):
            self._picker.add(current.tokens)
            ahead = Positions(self._passes.run(current.tokens), self._picker)
        seconds = self._clock() - started
        self._since_trial += 1
        before = self._to_begin or seconds
        self._to_begin = (1 - SMOOTHING) * before + SMOOTHING * seconds
        return ahead

    def _following(
        self, current: Positions, token: Token, end: int
    ) -> Positions | None:
        """Begins to choose the token after one that was read, if there is to be one."""
        if not current.index:
            self.drafted += len(current.draft)
        if token.from_draft:
            self.accepted += 1
            self.accepted_by[self._drafter.name if self._drafter else ""] += 1
            if not self._left(end):
                return None
            with mx.stream(self._stream):
                current.accept()
            return current
        if self._drafter and current.draft:
            self._drafter.observe(len(current.draft), current.index)
        with mx.stream(self._stream):
            self._passes.keep(len(self._text) - 1)
        return self._launch(end)

    def _launch(self, end: int) -> Positions | None:
        """Begins a pass with a draft, if one pays; None if no token is to come."""
        left = self._left(end)
        if not left:
            return None
        with mx.stream(self._stream):
            self._drafter, length = self._choose(left - 1)
            is_due = self._since_trial >= BETWEEN
            self._since_trial = 0 if is_due else self._since_trial + 1
            started = self._clock()
            draft = self._drafter.draft(length) if self._drafter else ()
            self._drafting = self._clock() - started
            tokens = mx.array([*self._text[self._passes.fed :], *draft], mx.uint32)
            self._picker.add(self._text[-1:])
            logits = self._passes.run(tokens, len(draft) + 1)
            return Positions(logits, self._picker, draft, tokens.size)

    def _choose(self, left: int) -> tuple[Drafter | None, int]:
        """Returns who is to draft now, and how many tokens, at most `left`."""
        offers = self._offers(left)
        if not offers or self._cost.weight(1) < PLAIN:
            return None, 0
        chosen, best = None, Choice(length=0, rate=0.0)
        for drafter, lengths in offers:
            choice = lengths.best(self._losses)
            if choice.length and choice.rate > best.rate:
                chosen, best = drafter, choice
        if self._since_trial >= BETWEEN:
            for drafter, lengths in offers:
                learns = drafter.learns_by_drafts
                length = lengths.to_try(best.length, self._losses, learns=learns)
                if length and drafter is (chosen or drafter):
                    return drafter, length
        return chosen, best.length

    def _offers(self, left: int) -> list[tuple[Drafter, Lengths]]:
        """Returns who can draft now, and what at most `left` tokens gain."""
        most = min(left, self._cost.most_rows)
        found = [
            (drafter, probabilities)
            for drafter in self._drafters
            if (probabilities := drafter.probabilities(most))
        ]
        if not found:  # asked after every token: the rest takes longer
            return []
        waiting = max(len(self._text) - self._passes.fed, 1)
        room = max(self._passes.room(waiting + most) - waiting, 0)
        return [
            (
                drafter,
                Lengths(
                    probabilities[:room],
                    self._cost,
                    waiting=waiting,
                    seconds_of_draft=self._to_begin,
                    seconds_of_token=drafter.seconds_of_token,
                    are_fed_again=self._passes.are_fed_again,
                ),
            )
            for drafter, probabilities in (found if room else ())
        ]

    def _show(self) -> None:
        """Makes the caches have the text, until `_resume`."""
        if self._passes.is_seen:
            with mx.stream(self._stream):
                self._passes.show(self._text)
                for drafter in self._drafters:
                    drafter.show()
        self._yielded = len(self._text)

    def _resume(self) -> None:
        if self._passes.is_seen:
            self._passes.resume()
            for drafter in self._drafters:
                drafter.resume()

    def _settle(self) -> None:
        """Makes the caches have all tokens that were yielded, and no others."""
        if self._passes.is_seen:
            with mx.stream(self._stream):
                self._passes.settle(self._text[: self._yielded])
                for drafter in self._drafters:
                    drafter.settle(self._yielded)
