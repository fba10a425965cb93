"""Sampled texts have the same distribution with drafts as without."""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from drafts.scripted import decoder
from mlx_marlin.lm.drafts.drafters import Drafter, LookupDrafter, ModelDrafter
from mlx_marlin.lm.drafts.passes import Passes
from support.profiles import sampled

VOCABULARY, RUNS = 64, 1000
SPREAD = 1.5
"""Of an embedding with which some tokens are much more likely than others."""
PROMPT = [1, 2, 3, 1, 2]
LIMIT = 3.5
"""Standard deviations of a chi-square statistic: once in some thousand tests."""


@lru_cache  # it seeds the samples too
def small_model(seed: int) -> nn.Module:
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    mx.random.seed(seed)
    model = llama.Model(args)
    model.model.embed_tokens.weight *= SPREAD
    mx.eval(model.parameters())
    return model


def looking_up(_: nn.Module) -> Drafter:
    return LookupDrafter()


def by_a_model(model: nn.Module) -> Drafter:
    other = small_model(1)
    return ModelDrafter(Passes(other, make_prompt_cache(other)))


def by_itself(model: nn.Module) -> Drafter:
    return ModelDrafter(Passes(model, make_prompt_cache(model)))


def chi_square(counts: Counter[int], expected: np.ndarray) -> float:
    """Returns how many standard deviations a chi-square statistic is off its mean."""
    observed = np.array([counts[token] for token in range(VOCABULARY)], float)
    wanted = expected * RUNS
    rare = wanted < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    wanted = np.append(wanted[~rare], max(wanted[rare].sum(), 1e-9))
    freedom = len(wanted) - 1
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float((statistic - freedom) / np.sqrt(2 * freedom))


@pytest.mark.slow
@sampled(1)
@pytest.mark.parametrize("make", [looking_up, by_a_model, by_itself])
def test_the_distribution_is_that_of_plain_decoding(
    make: Callable[[nn.Module], Drafter],
) -> None:
    model = small_model(0)
    sampler = make_sampler(temp=0.9)

    def distribution(rows: mx.array) -> np.ndarray:
        logits = model(rows)[:, -1].astype(mx.float32)
        return np.array(mx.softmax(logits / 0.9, axis=-1), float)

    first = distribution(mx.array([PROMPT]))[0]
    following = distribution(mx.array([[*PROMPT, u] for u in range(VOCABULARY)]))
    second = first @ following
    found: list[Counter[int]] = [Counter(), Counter()]
    drafted = 0
    small_model(1)
    mx.random.seed(7)
    for _ in range(RUNS):
        decoding = decoder(model, make(model), sampler=sampler)
        text = [each.token for each in decoding.tokens(PROMPT, 2)]
        drafted += decoding.drafted
        for counts, token in zip(found, text, strict=False):
            counts[token] += 1

    assert drafted > 0.9 * RUNS
    assert chi_square(found[0], first) < LIMIT
    assert chi_square(found[1], second) < LIMIT
    # The test would see another distribution.
    assert chi_square(found[0], second) > LIMIT
