"""A batch of one stream: no mask where nothing is hidden, and mlx-lm's cache."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_marlin.integrations import block_attention
from mlx_marlin.integrations.block_cache import is_alone, updated_alone
from tests.test_traced_block import assert_equal, tiny, traced

FEATURES = 8


def filled(length: int = 5, padding: int = 0, streams: int = 1) -> BatchKVCache:
    cache = BatchKVCache([padding] * streams)
    prompt = mx.random.normal((streams, 2, length, FEATURES))
    cache.update_and_fetch(prompt, prompt + 1)
    return cache


def row(streams: int = 1, tokens: int = 1) -> mx.array:
    return mx.zeros((streams, tokens, FEATURES))


class Derived(BatchKVCache):
    """A cache that may do anything."""


def test_a_stream_is_alone_in_a_batch_of_one() -> None:
    cache = filled()
    assert is_alone(row(), cache.make_mask(1), cache)


@pytest.mark.parametrize(
    ("cache", "x", "mask"),
    [
        (filled(padding=1), row(), "made"),
        (filled(streams=2), row(2), "made"),
        (filled(streams=2), row(1), mx.ones((1, 1, 1, 6), mx.bool_)),
        (filled(), row(2), "made"),
        (filled(), row(tokens=2), mx.ones((1, 1, 1, 6), mx.bool_)),
        (filled(), row(tokens=2), mx.ones((1, 1, 2, 7), mx.bool_)),
        (filled(), row(), None),
        (filled(), row(), "causal"),
        (filled(), row(), mx.zeros((1, 1, 1, 6))),
        (filled(), row(), mx.ones((1, 6), mx.bool_)),
        (filled(), row(), mx.ones((1, 1, 1, 5), mx.bool_)),
        (Derived([0]), row(), "made"),
        (KVCache(), row(), mx.ones((1, 1, 1, 1), mx.bool_)),
        (None, row(), None),
    ],
)
def test_other_calls_are_not_alone(cache: Any, x: mx.array, mask: Any) -> None:
    made = isinstance(mask, str) and mask == "made"
    assert not is_alone(x, cache.make_mask(1) if made else mask, cache)


def test_padding_that_comes_later_is_seen() -> None:
    cache = BatchKVCache([0])
    cache.prepare(right_padding=[2])
    prompt = mx.random.normal((1, 2, 5, FEATURES))
    cache.update_and_fetch(prompt, prompt)
    padding = cache.left_padding
    assert is_alone(row(), cache.make_mask(1), cache)

    cache.finalize()

    assert cache.left_padding is padding  # mlx-lm adds in place
    assert not is_alone(row(), cache.make_mask(1), cache)


@pytest.mark.parametrize("length", [0, 5, 254, 256, 300])
def test_the_cache_is_what_mlx_lm_makes_of_it(length: int) -> None:
    mx.random.seed(length)
    cache, own = (BatchKVCache([0]) for _ in range(2))
    if length:
        prompt = mx.random.normal((1, 2, length, FEATURES))
        cache.update_and_fetch(prompt, prompt + 1)
        own.update_and_fetch(prompt, prompt + 1)

    for _ in range(4):
        k, v = (mx.random.normal((1, 2, 1, FEATURES)) for _ in range(2))
        assert_equal(updated_alone(cache, k, v), own.update_and_fetch(k, v))

    assert cache._idx == own._idx
    assert_equal([cache.offset, cache.keys], [own.offset, own.keys])


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the shapes of the masks under which blocks of one row attend."""
    found: list[Any] = []
    own = block_attention.scaled_dot_product_attention

    def listed(queries: mx.array, *args: Any, **options: Any) -> mx.array:
        mask = options["mask"]
        if queries.shape[2] == 1:
            found.append(None if mask is None else mask.shape)
        y: mx.array = own(queries, *args, **options)
        return y

    monkeypatch.setattr(block_attention, "scaled_dot_product_attention", listed)
    return found


def outputs_of(model: nn.Module, cache: list[Any], prompt: int = 6) -> list[mx.array]:
    mx.random.seed(5)
    tokens = mx.random.randint(0, 100, (1, prompt + 4))
    ends = [0, *range(prompt, prompt + 5)]
    return [model(tokens[:, start:end], cache=cache) for start, end in pairwise(ends)]


@pytest.mark.parametrize("padding", [0, 2])
def test_a_block_of_a_batch_of_one_attends_to_all_that_is_no_padding(
    padding: int, backend: Callable[[str], None], masks: list[Any]
) -> None:
    backend("stock")
    caches = [[BatchKVCache([padding]) for _ in range(2)] for _ in range(2)]

    outputs = outputs_of(traced(tiny("llama")), caches[0])

    assert_equal(outputs, outputs_of(tiny("llama"), caches[1]))
    hiding = {(1, 1, 1, length) for length in (7, 8, 9, 10)}
    assert set(masks) == ({None} if padding == 0 else hiding)
    for ours, own in zip(*caches, strict=True):
        assert_equal([*ours.state[:4]], [*own.state[:4]])


def test_a_window_hides_what_is_far_behind(
    backend: Callable[[str], None], masks: list[Any]
) -> None:
    backend("stock")
    kinds = ["full_attention", "sliding_attention"]
    options = {"layer_types": kinds, "sliding_window": 4}
    caches = [[BatchKVCache([0]) for _ in range(2)] for _ in range(2)]

    outputs = outputs_of(traced(tiny("llama", **options)), caches[0])

    assert_equal(outputs, outputs_of(tiny("llama", **options), caches[1]))
    assert masks == [each for n in (7, 8, 9, 10) for each in (None, (1, 1, 1, n))]


def answers(model: nn.Module) -> dict[int, list[int]]:
    """Returns the tokens of three prompts; two come late, and end early."""
    generator = BatchGenerator(model, max_tokens=9)
    found: dict[int, list[int]] = {}
    generator.insert([[3, 1, 4, 1, 5]])
    step = 0
    while responses := generator.next_generated():
        for each in responses:
            found.setdefault(each.uid, []).append(each.token)
        step += 1
        if step == 2:
            generator.insert([[9, 2, 6], [5, 3, 5, 8, 9, 7]], max_tokens=[3, 4])
    return found


def test_a_server_whose_streams_come_and_go_answers_as_before(
    backend: Callable[[str], None], masks: list[Any]
) -> None:
    backend("stock")

    found = answers(traced(tiny("llama")))

    assert found == answers(tiny("llama"))
    assert [len(found[uid]) for uid in (0, 1, 2)] == [9, 3, 4]
    assert None in masks
    assert any(mask is not None and mask[0] > 1 for mask in masks)
    last = masks.index(None), len(masks) - masks[::-1].index(None)
    assert any(mask is not None for mask in masks[slice(*last)])  # alone again
