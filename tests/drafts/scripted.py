"""A drafter whose drafts are wrong where a test says, and plain decoding."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache

from mlx_marlin.lm.drafts.decoder import Decoder, Picker
from mlx_marlin.lm.drafts.drafters import Drafter
from mlx_marlin.lm.drafts.pass_cost import PassCost
from mlx_marlin.lm.drafts.passes import Passes
from support.architectures import ARCHITECTURES

PROMPT = [5, 9, 2, 7, 5, 9, 2, 7, 5, 9, 3]
COUNT = 40
"""Tokens of a text after the prompt."""
FLAT = {1: 1.0, 16: 1.01}
TIE = 1e-4
"""Difference of two logits in float32 that rounding may reverse."""


class Text(NamedTuple):
    """A model and the text that it gives, with the log probabilities."""

    model: Any
    tokens: list[int]
    logprobs: list[mx.array]


class ScriptedDrafter(Drafter):
    """Drafts what plain decoding gives, but for one token of each draft."""

    def __init__(
        self, text: Sequence[int], length: int, wrong: Callable[[int], int]
    ) -> None:
        super().__init__()
        self.text, self.length, self.wrong = [*text], length, wrong
        self.known: list[int] = []
        self.lengths: list[tuple[int, int]] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.known = [*prompt]

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


class FixedCost(PassCost):
    """A cost that does not depend on the clock of the machine that tests run on."""

    def observe(self, rows: int, seconds: float, context: int) -> None:
        """Learns nothing."""

    def weight(self, rows: int) -> float:
        return inf


def counting(tokens: mx.array, cache: Any) -> mx.array:
    """A model without a cache: after each token comes the next number, below 50."""
    return mx.eye(50)[(tokens + 1) % 50]


class Recalling(nn.Module):
    """A model whose tokens depend on all that its cache shows, and where, exactly."""

    layers = (None,)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        mask = create_attention_mask(tokens[..., None], cache[0], return_array=True)
        places = cache[0].offset + mx.arange(tokens.shape[1])
        values = ((7 * tokens + 1) * (13 * places + 5) % 101).astype(mx.float32)
        seen, _ = cache[0].update_and_fetch(*[values[:, None, :, None]] * 2)
        seen = mx.broadcast_to(seen[..., 0], (1, tokens.shape[1], seen.shape[2]))
        sums = (seen if mask is None else mx.where(mask, seen, 0)).sum(axis=-1)
        return mx.eye(50)[sums.astype(mx.uint32) % 50]


def plain(
    model: nn.Module, prompt: Sequence[int], count: int, **options: Any
) -> tuple[list[int], list[mx.array]]:
    """Returns the tokens of mlx-lm's own decoding, and their log probabilities."""
    found = [*generate_step(mx.array(prompt), model, max_tokens=count, **options)]
    return [int(token) for token, _ in found], [logprobs for _, logprobs in found]


@lru_cache
def text_of(name: str) -> Text:
    """Returns a model of an architecture, and what it says after `PROMPT`."""
    architecture = ARCHITECTURES[name]
    model = architecture.model(*architecture.formats[0])
    return Text(model, *plain(model, PROMPT, COUNT))


def decoder(
    model: nn.Module,
    drafter: Drafter,
    *others: Drafter,
    cache: list[Any] | None = None,
    passes: Passes | None = None,
    seconds: dict[int, float] = FLAT,
    **picker: Any,
) -> Decoder:
    cache = make_prompt_cache(model) if cache is None else cache
    passes = Passes(model, cache) if passes is None else passes
    cost = FixedCost(seconds, "test")
    given = {"sampler": None, "processors": (), **picker}
    return Decoder(passes, [drafter, *others], cost, Picker(**given), generation_stream)


def same_state(model: nn.Module, cache: list[Any], text: list[int]) -> bool:
    """Returns whether a cache goes on as one that was fed a text."""
    expected = make_prompt_cache(model)
    model(mx.array([text]), cache=expected)
    following = mx.array([[3]])
    found, wanted = (model(following, cache=each)[0, -1] for each in (cache, expected))
    return bool(mx.allclose(found, wanted, rtol=1e-3, atol=1e-3).item())


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
