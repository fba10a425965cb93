"""The masks and caches that traced blocks pass to attention, as in mlx-lm."""

import copy
from io import StringIO
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_marlin.lm.tracing import attention, kv_cache
from mlx_marlin.lm.tracing.attention import attend
from mlx_marlin.lm.tracing.kv_cache import CUDNN_STEP, is_alone, updated, updated_alone
from support.choose import Choose
from support.decoder_models import assert_equal, tiny, traced

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


def keys_of(
    tokens: int, streams: int = 1, features: int = 64, dtype: mx.Dtype = mx.float16
) -> mx.array:
    return mx.random.normal((streams, 2, tokens, features)).astype(dtype)


def of_one_stream(kind: str, tokens: int) -> Any:
    """Returns a cache that mlx-lm has filled with a prompt; the same one each time."""
    mx.random.seed(tokens)
    cache = KVCache() if kind == "generate" else BatchKVCache([0])
    prompt = keys_of(tokens)
    cache.update_and_fetch(prompt, prompt + 1)
    return cache


STEPS = {"generate": updated, "server": updated_alone}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(
    ("tokens", "vector"),
    [
        (6, False),  # too few for cuDNN
        (255, False),
        (256, True),
        (257, True),
        (300, True),
        (511, True),
        (512, False),
        (513, False),
        (770, False),
        (1024, False),
        (1025, True),
        (2048, True),
        (2049, False),
        (3500, False),
    ],
)
def test_the_places_of_a_cache_let_mlx_take_the_faster_kernel(
    kind: str, tokens: int, vector: bool, backend: Choose
) -> None:
    backend("cuda")
    cache, own = (of_one_stream(kind, tokens - 1) for _ in range(2))
    k, v = keys_of(1), keys_of(1)

    assert_equal(STEPS[kind](cache, k, v), own.update_and_fetch(k, v))

    places = cache.keys.shape[2]
    assert (places % CUDNN_STEP != 0) is vector
    assert places == cache.values.shape[2] <= own.keys.shape[2] + 1.5 * CUDNN_STEP
    assert_equal([*cache.keys_and_values()], [*own.keys_and_values()])
    assert cache.size() == own.size() == tokens


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(
    ("first", "sizes"),
    [
        (250, [256, 640]),
        (505, [512, 640, 768]),
        (1018, [1024, 1408]),
        (2042, [2048, 2176, 2304]),
    ],
)
def test_a_cache_goes_on_where_the_faster_kernel_changes(
    kind: str, first: int, sizes: list[int], backend: Choose
) -> None:
    backend("cuda")
    cache, own = (of_one_stream(kind, first) for _ in range(2))
    found = [cache.keys.shape[2]]
    for _ in range(14):
        k, v = keys_of(1), keys_of(1)
        assert_equal(STEPS[kind](cache, k, v), own.update_and_fetch(k, v))
        found.append(cache.keys.shape[2])
    assert [*dict.fromkeys(found)] == sizes
    tokens = keys_of(300)
    assert_equal(
        cache.update_and_fetch(tokens, tokens), own.update_and_fetch(tokens, tokens)
    )


@pytest.mark.parametrize("kind", STEPS)
def test_a_prompt_that_is_trimmed_and_used_again_takes_no_more_places(
    kind: str, backend: Choose
) -> None:
    backend("cuda")
    cache, own = (of_one_stream(kind, 500) for _ in range(2))
    for _ in range(5):
        for _ in range(20):  # there and back over 512
            k = keys_of(1)
            assert_equal(STEPS[kind](cache, k, k), own.update_and_fetch(k, k))
        assert cache.keys.shape[2] == 768
        assert cache.trim(20) == own.trim(20) == 20


def test_what_padding_left_behind_the_tokens_is_not_taken_along(
    backend: Choose,
) -> None:
    backend("cuda")
    cache = of_one_stream("server", 600)
    cache.keys[:, :, 600:] = mx.nan
    cache.keys = cache.keys[:, :, :765]
    updated_alone(cache, keys_of(1), keys_of(1))
    assert cache.keys.shape[2] == 768
    assert not mx.isnan(cache.keys).any()


@pytest.mark.parametrize(
    ("name", "streams", "tokens", "shape"),
    [
        ("cuda", 1, 3, ()),
        ("cuda", 2, 1, ()),
        ("cuda", 2, 3, ()),
        ("cuda", 1, 1, (32, mx.float16)),  # heads that one kernel takes
        ("cuda", 1, 1, (256, mx.float16)),
        ("cuda", 1, 1, (64, mx.float32)),
        ("metal", 1, 1, ()),
    ],
    ids=str,
)
def test_other_calls_leave_the_number_of_places(
    name: str, streams: int, tokens: int, shape: Any, backend: Choose
) -> None:
    backend(name)
    cache, prompt = KVCache(), keys_of(300, streams, *shape)
    cache.update_and_fetch(prompt, prompt)
    updated(cache, *(keys_of(tokens, streams, *shape) for _ in range(2)))
    assert cache.keys.shape[2] == 512


@pytest.mark.parametrize(
    ("tokens", "places"), [(100, 356), (255, 511), (700, 768), (1500, 1756)]
)
def test_places_that_are_no_multiple_are_left_where_they_serve(
    tokens: int, places: int, backend: Choose
) -> None:
    backend("cuda")
    cache = KVCache.merge([of_one_stream("generate", tokens)])
    assert cache.keys.shape[2] == tokens  # as streams are when they join
    updated_alone(cache, keys_of(1), keys_of(1))
    assert cache.keys.shape[2] == places


def test_places_of_a_lone_stream_are_no_chain_of_sums() -> None:
    cache = filled()
    for _ in range(3):
        updated_alone(cache, *mx.random.normal((2, 1, 2, 1, FEATURES)))
    graph = StringIO()
    mx.export_to_dot(graph, cache.offset)
    assert "Add" not in graph.getvalue()


def test_streams_move_on_by_an_array_that_is_kept(
    backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend("cuda")
    asked: list[tuple[int, int]] = []
    own = kv_cache._steps

    def listed(streams: int, tokens: int, dtype: mx.Dtype) -> mx.array:
        asked.append((streams, tokens))
        return own(streams, tokens, dtype)

    monkeypatch.setattr(kv_cache, "_steps", listed)
    cache = filled(streams=3)
    q, k = mx.zeros((3, 4, 2, FEATURES)), mx.zeros((3, 2, 2, FEATURES))

    attend(q, k, k, cache, cache.make_mask(2), 1.0)

    assert asked == [(3, 2)]
    assert own(3, 2, mx.int32) is own(3, 2, mx.int32)
    assert cache.offset.tolist() == [7, 7, 7]


@pytest.mark.usefixtures("stock", "unfused")
def test_a_traced_batch_is_not_asked_for_its_padding() -> None:
    model = traced(tiny("llama", num_hidden_layers=1))
    start = filled_for(model)

    def step(tokens: mx.array, *state: mx.array) -> mx.array:
        cache = BatchKVCache([0])
        cache.state = (*state, 5)
        y: mx.array = model(tokens, cache=[cache])
        return y

    state, tokens = start.state[:4], mx.array([[3]])
    assert_equal([mx.compile(step)(tokens, *state)], [step(tokens, *state)])


def filled_for(model: nn.Module) -> BatchKVCache:
    cache = BatchKVCache([0])
    mx.eval(model(mx.array([[1, 2, 3, 4, 5]]), cache=[cache]))
    return cache


def test_a_cache_serves_a_lone_stream_and_many_in_turn(
    backend: Choose, grouped: list[Any]
) -> None:
    backend("cuda")
    mx.random.seed(3)
    first = filled(5)
    caches = first, copy.deepcopy(first)

    def token() -> None:
        streams = len(caches[0].offset)
        q = mx.random.normal((streams, 4, 1, FEATURES))
        k, v = mx.random.normal((2, streams, 2, 1, FEATURES))
        ours, own = caches
        mask = ours.make_mask(1)
        alone = is_alone(row(streams), mask, ours)
        assert alone == (streams == 1)
        y = attend(q, k, v, ours, mask, 1.0, alone=alone)
        expected = mx.fast.scaled_dot_product_attention(
            q, *own.update_and_fetch(k, v), scale=1.0, mask=mask
        )
        assert mx.allclose(y, expected, atol=1e-5)

    for turn in range(3):
        token()
        other = filled(3 + 250 * turn)
        for each in caches:
            each.extend(copy.deepcopy(other))
        token()
        token()
        for each in caches:
            each.filter(mx.array([0]))
        token()
    assert len(grouped) == 6
    ours, own = caches
    assert_equal([*ours.keys_and_values()], [*own.keys_and_values()])
    assert_equal([ours.offset, ours.left_padding], [own.offset, own.left_padding])


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the shapes of the masks under which blocks of one row attend."""
    found: list[Any] = []
    own = attention.scaled_dot_product_attention

    def listed(queries: mx.array, *args: Any, **options: Any) -> mx.array:
        mask = options["mask"]
        if queries.shape[2] == 1:
            found.append(None if mask is None else mask.shape)
        y: mx.array = own(queries, *args, **options)
        return y

    monkeypatch.setattr(attention, "scaled_dot_product_attention", listed)
    return found


def outputs_of(model: nn.Module, cache: list[Any]) -> list[mx.array]:
    prompt = 6
    mx.random.seed(5)
    tokens = mx.random.randint(0, 100, (1, prompt + 4))
    ends = [0, *range(prompt, prompt + 5)]
    return [model(tokens[:, start:end], cache=cache) for start, end in pairwise(ends)]


@pytest.mark.usefixtures("stock", "unfused")
@pytest.mark.parametrize("padding", [0, 2])
def test_a_block_of_a_batch_of_one_attends_to_all_that_is_no_padding(
    padding: int, masks: list[Any]
) -> None:
    caches = [[BatchKVCache([padding]) for _ in range(2)] for _ in range(2)]

    outputs = outputs_of(traced(tiny("llama")), caches[0])

    assert_equal(outputs, outputs_of(tiny("llama"), caches[1]))
    hiding = {(1, 1, 1, length) for length in (7, 8, 9, 10)}
    assert set(masks) == ({None} if padding == 0 else hiding)
    for ours, own in zip(*caches, strict=True):
        assert_equal([*ours.state[:4]], [*own.state[:4]])


@pytest.mark.usefixtures("stock", "unfused")
def test_a_window_hides_what_is_far_behind(masks: list[Any]) -> None:
    kinds = ["full_attention", "sliding_attention"]
    options = {"layer_types": kinds, "sliding_window": 4}
    caches = [[BatchKVCache([0]) for _ in range(2)] for _ in range(2)]

    outputs = outputs_of(traced(tiny("llama", **options)), caches[0])

    assert_equal(outputs, outputs_of(tiny("llama", **options), caches[1]))
    assert masks == [each for n in (7, 8, 9, 10) for each in (None, (1, 1, 1, n))]
