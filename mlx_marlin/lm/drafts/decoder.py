"""The decoding loop: plain steps that run one ahead, and passes that verify drafts."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx

from mlx_marlin.lm.drafts.draft_length import best_length
from mlx_marlin.lm.drafts.drafters import Drafter
from mlx_marlin.lm.drafts.pass_cost import PassCost
from mlx_marlin.lm.drafts.passes import Passes

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]
CLEARED = 256
"""Tokens after which MLX's cache of free memory is cleared, as mlx-lm does."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Token:
    """A generated token.

    Attributes:
        token: The token.
        logprobs: Log probabilities [vocabulary] that it was chosen by.
        from_draft: Whether it was drafted.
        rows: Rows of the pass that verified or computed it.
    """

    token: int
    logprobs: mx.array
    from_draft: bool
    rows: int


@dataclass(kw_only=True)
class Picker:
    """Chooses tokens from logits, each position as without drafts.

    Attributes:
        sampler: From log probabilities [1, vocabulary] to tokens [1].
        processors: Change the logits [1, vocabulary] of a position, given all tokens
            before it.
    """

    sampler: Sampler | None
    processors: Sequence[Processor]

    def pick(
        self, logits: mx.array, text: mx.array | None, draft: Sequence[int] = ()
    ) -> tuple[mx.array, mx.array]:
        """Returns a token and log probabilities for each position.

        Args:
            logits: Logits [positions, vocabulary].
            text: All tokens before the first position; None without processors.
            draft: The tokens between the positions.
        """
        if text is not None:
            logits = mx.concatenate(
                [
                    self._processed(logits[index : index + 1], text, draft[:index])
                    for index in range(len(draft) + 1)
                ]
            )
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self.sampler is None:
            return mx.argmax(logprobs, axis=-1), logprobs
        rows = [self.sampler(logprobs[i : i + 1]) for i in range(len(draft) + 1)]
        return mx.concatenate(rows), logprobs

    def _processed(
        self, logits: mx.array, text: mx.array, draft: Sequence[int]
    ) -> mx.array:
        if draft:
            text = mx.concatenate([text, mx.array([*draft], text.dtype)])
        for processor in self.processors:
            logits = processor(text, logits)
        return logits


class Decoder:
    """Decodes a text, drafting tokens where that is expected to pay.

    Attributes:
        drafted: Tokens drafted so far.
        accepted: Drafted tokens that were accepted so far.
    """

    def __init__(
        self,
        passes: Passes,
        drafter: Drafter,
        cost: PassCost,
        picker: Picker,
        stream: Any,
    ) -> None:
        """Keeps what decoding needs.

        Args:
            passes: The model's forward passes; nothing has been fed.
            drafter: What drafts.
            cost: The seconds of a pass.
            picker: Chooses tokens.
            stream: The stream of the passes.
        """
        self._passes, self._drafter, self._cost = passes, drafter, cost
        self._picker, self._stream = picker, stream
        self._text: list[int] = []
        self._known: mx.array | None = None
        self.drafted = self.accepted = 0

    def tokens(
        self,
        prompt: Sequence[int],
        most: int,
        told: Callable[[int], None] = lambda _: None,
    ) -> Generator[Token, None, None]:
        """Yields tokens; the caches have all that were yielded when it ends or fails.

        Args:
            prompt: At least one token.
            most: Most tokens to yield; -1 for no limit.
            told: Called with the tokens of the prompt that have been fed.
        """
        for token in prompt:
            self._append(token)
        with mx.stream(self._stream):
            self._passes.feed(prompt[:-1], told)
        end = len(prompt) + most if most >= 0 else -1
        try:
            yield from self._decoded(end)
        finally:
            self._settle()

    def _decoded(self, end: int) -> Iterator[Token]:
        ahead: tuple[mx.array, mx.array] | None = None
        may_draft = self._drafter.always
        last: float | None = None
        while len(self._text) != end:
            left = end - len(self._text) - 1 if end >= 0 else self._cost.most_rows
            if ahead is None:
                draft = self._draft(left)
                if draft:
                    last, may_draft = None, True
                    yield from self._verified(draft)
                    continue
                ahead = self._step(mx.array(self._text[self._passes.fed :], mx.uint32))
                may_draft = self._drafter.always
            (token, logprobs), ahead = ahead, None
            if not may_draft and left:
                ahead = self._step(token)  # while the host reads the token
            number = self._read(token)
            now = perf_counter()
            if last is not None and ahead is not None:
                self._cost.observe(now - last)
            last = now
            self._append(number)
            yield Token(token=number, logprobs=logprobs[0], from_draft=False, rows=1)
            if len(self._text) % CLEARED == 0:
                mx.clear_cache()
            if ahead is not None:
                may_draft = self._length(left) > 0

    def _length(self, left: int) -> int:
        """Returns how many tokens to draft now, at most `left`."""
        most = min(left, self._cost.most_rows)
        probabilities = self._drafter.probabilities(most)
        if not probabilities:  # asked after every token: the rest takes longer
            return 0
        waiting = max(len(self._text) - self._passes.fed, 1)
        room = max(self._passes.room(waiting + most) - waiting, 0)
        length = best_length(
            probabilities[:room],
            self._cost,
            waiting=waiting,
            seconds_of_token=self._drafter.seconds_of_token,
        ).length
        if not length:
            self._drafter.decline()
        return length

    def _draft(self, left: int) -> Sequence[int]:
        length = self._length(left)
        if not length:
            return []
        with mx.stream(self._stream):
            return self._drafter.draft(length)

    def _verified(self, draft: Sequence[int]) -> Iterator[Token]:
        """Yields the tokens of a draft that are right, and the one after them."""
        passes = self._passes
        waiting = self._text[passes.fed :]
        tokens = mx.array([*waiting, *draft], mx.uint32)
        with mx.stream(self._stream):
            passes.begin(tokens.size)
            logits = passes.run(tokens, len(draft) + 1)
            picked, logprobs = self._picker.pick(logits, self._known, draft)
            mx.eval(picked, logprobs)
        found: list[int] = picked.tolist()  # type: ignore[assignment]
        pairs = zip(found, draft, strict=False)
        accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(draft))
        self.drafted += len(draft)
        self._drafter.observe(len(draft), accepted)
        for index in range(accepted + 1):
            if index == accepted:  # in its place, the cache has a rejected token
                passes.reject(len(draft) - accepted)
            self._append(found[index])
            self.accepted += index < accepted
            yield Token(
                token=found[index],
                logprobs=logprobs[index],
                from_draft=index < accepted,
                rows=tokens.size,
            )

    def _step(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Starts a pass without a draft, and returns its token and log probabilities.

        Args:
            tokens: Tokens to feed, which need not be evaluated.
        """
        with mx.stream(self._stream):
            logits = self._passes.run(tokens)
            text = self._known
            if text is not None and self._passes.fed > len(self._text):
                text = mx.concatenate([text, tokens.astype(text.dtype)])
            picked = self._picker.pick(logits, text)
            mx.async_eval(picked)
        return picked

    def _read(self, token: mx.array) -> int:
        number: int = token.item()  # type: ignore[assignment]
        return number

    def _append(self, token: int) -> None:
        self._text.append(token)
        self._drafter.add(token)
        if self._picker.processors:
            new = mx.array([token], mx.uint32)
            known = self._known
            self._known = new if known is None else mx.concatenate([known, new])

    def _settle(self) -> None:
        """Makes the caches have all tokens that were yielded, and no others."""
        passes, text = self._passes, self._text
        with mx.stream(self._stream):
            passes.reject(passes.fed - len(text))
            passes.feed(text[passes.fed :])
            self._drafter.settle()
