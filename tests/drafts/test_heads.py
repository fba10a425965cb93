"""Heads that ship with models draft what their weights say, and change no text."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from drafts import scripted
from drafts.scripted import PROMPT, assert_same_text, plain
from mlx_marlin.lm.drafts.decoder import Decoder
from mlx_marlin.lm.drafts.drafters import HeadDrafter
from mlx_marlin.lm.drafts.heads import DraftHead, Trunk
from mlx_marlin.lm.drafts.hidden_rows import HiddenPasses
from support import head_models
from support.head_models import CONFIGS, craft
from support.profiles import sampled

COUNT = 12


def decoder(
    model: nn.Module, head: DraftHead, cache: list[Any] | None = None, step: int = 2048
) -> tuple[Decoder, list[Any]]:
    """Returns a decoder that drafts with a head, and the head's cache."""
    before, own = head.family.before_norm, head.make_cache()
    cache = make_prompt_cache(model) if cache is None else cache
    main = HiddenPasses(head.trunk.norm, before, model, cache, step=step)
    drafter = HeadDrafter(HiddenPasses(head.norm, before, head, own), main)
    return scripted.decoder(model, drafter, passes=main), own


def states(model: nn.Module, head: DraftHead, text: list[int]) -> mx.array:
    """Returns the hidden states of a text, as the family's heads get them."""
    own: Any = Trunk(model)
    norm, tokens = own.norm, mx.array([text])
    if head.family.before_norm:
        own.inner[own.norm_name] = nn.Identity()
    found: mx.array = own.inner(tokens)
    own.inner[own.norm_name] = norm
    return found


@sampled(5)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.usefixtures("unfused")
def test_a_head_leaves_the_text_and_has_the_pairs_of_it_and_no_others(
    family: str, tmp_path: Path
) -> None:
    model, head = head_models.load(tmp_path, family)
    text, logprobs = plain(model, PROMPT, COUNT)
    decoding, cache = decoder(model, head)

    found = [each.token for each in decoding.tokens(PROMPT, COUNT)]

    assert_same_text(found, text, logprobs)
    assert decoding.drafted > decoding.accepted
    whole, expected = [*PROMPT, *found], head.make_cache()
    hidden = states(model, head, whole)
    head(mx.array([whole[1:]]), hidden[:, :-1], expected)
    following = mx.array([[3]]), hidden[:, -1:]
    after = [head(*following, each) for each in (cache, expected)]
    assert mx.allclose(*after, rtol=1e-4, atol=1e-4)


@sampled(5)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_head_that_knows_the_next_token_is_always_right(
    family: str, tmp_path: Path
) -> None:
    """By the embedding of the last token, or by the model's state of the one before.

    A W whose halves are swapped repeats tokens. So order, alignment and what the head
    goes on with are as the family's.
    """
    model, head = head_models.load(tmp_path, family)
    prompt = [*range(40, 52)]
    text = [each % 64 for each in range(52, 52 + COUNT)]
    for by in ("embedding", "hidden"):
        craft(model, head, by=by)
        decoding, _ = decoder(model, head)
        assert [each.token for each in decoding.tokens(prompt, COUNT)] == text
        assert decoding.accepted == decoding.drafted > 6
    craft(model, head, by="embedding", swapped=True)
    decoding, _ = decoder(model, head)
    assert [each.token for each in decoding.tokens(prompt, COUNT)] == text
    assert decoding.accepted == 0 < decoding.drafted
