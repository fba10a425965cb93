"""A drafter whose drafts are wrong where a test says, and plain decoding."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

from mlx_marlin.lm.drafts.decoder import Decoder, Picker
from mlx_marlin.lm.drafts.drafters import Drafter
from mlx_marlin.lm.drafts.pass_cost import PassCost
from mlx_marlin.lm.drafts.passes import Passes

FLAT = {1: 1.0, 16: 1.01}
TIE = 1e-4
"""Difference of two logits in float32 that rounding may reverse."""


class ScriptedDrafter(Drafter):
    """Drafts the text that plain decoding gives, wrong at one position of each draft.

    Args:
        text: The prompt and the text.
        length: Tokens of a draft.
        wrong: From the number of a draft to the position of its wrong token.
    """

    always = False

    def __init__(
        self, text: Sequence[int], length: int, wrong: Callable[[int], int]
    ) -> None:
        super().__init__()
        self.text, self.length, self.wrong = [*text], length, wrong
        self.known: list[int] = []
        self.lengths: list[tuple[int, int]] = []

    def add(self, token: int) -> None:
        self.known.append(token)

    def probabilities(self, most: int) -> list[float]:
        return [0.99] * min(most, self.length)

    def draft(self, count: int) -> Sequence[int]:
        start = len(self.known)
        drafted = self.text[start : start + count]
        position = self.wrong(len(self.lengths))
        if position < len(drafted):
            drafted[position] = (drafted[position] + 1) % 50
        return drafted

    def observe(self, length: int, accepted: int) -> None:
        self.lengths.append((length, accepted))

    def decline(self) -> None:
        pass

    def settle(self) -> None:
        pass


def plain(
    model: nn.Module, prompt: Sequence[int], count: int, **options: Any
) -> tuple[list[int], list[mx.array]]:
    """Returns the tokens of mlx-lm's own decoding, and their log probabilities."""
    found = [*generate_step(mx.array(prompt), model, max_tokens=count, **options)]
    return [int(token) for token, _ in found], [logprobs for _, logprobs in found]


def decoder(
    model: nn.Module,
    drafter: Drafter,
    *,
    cache: list[Any] | None = None,
    cost: PassCost | None = None,
    **picker: Any,
) -> Decoder:
    cache = make_prompt_cache(model) if cache is None else cache
    cost = PassCost(FLAT, "test") if cost is None else cost
    given = {"sampler": None, "processors": (), **picker}
    return Decoder(
        Passes(model, cache), drafter, cost, Picker(**given), generation_stream
    )


def assert_same_text(
    actual: Sequence[int], expected: Sequence[int], logprobs: Sequence[mx.array]
) -> None:
    """Checks that texts are equal, or first differ where two tokens are tied."""
    pairs = zip(actual, expected, strict=True)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is not None:
        of_both = logprobs[first][actual[first]], logprobs[first][expected[first]]
        gap = abs(of_both[0].item() - of_both[1].item())
        assert gap < TIE, (first, gap)
