"""`stream_generate` has mlx-lm's arguments and responses."""

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from tokenizers.processors import TemplateProcessing

import mlx_marlin
from drafts.scripted import FLAT, FixedCost
from mlx_marlin.lm.drafts import stream
from mlx_marlin.lm.drafts.decoder import Token
from mlx_marlin.lm.drafts.pass_cost import PassCost
from mlx_marlin.lm.drafts.stream import DraftedResponse
from support import quantized_folder
from support.profiles import sampled

GENERATE = sys.modules["mlx_lm.generate"]
TEXT = "a rose is a rose is a rose is a rose. " * 3


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Any]:
    folder = tmp_path_factory.mktemp("models") / "quantized"
    model, tokenizer, *_ = mlx_lm.load(str(quantized_folder.write(folder, mx.float32)))
    return model, tokenizer


def joined_text(responses: Iterable[Any]) -> str:
    return "".join(each.text for each in responses)


SAME = ("text", "token", "prompt_tokens", "generation_tokens", "finish_reason")


def assert_same_responses(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Compares every field that is no time, no memory and not about drafts."""
    for each, own in zip(found, expected, strict=True):
        for name in SAME:
            assert (name, getattr(each, name)) == (name, getattr(own, name))
        assert mx.allclose(each.logprobs, own.logprobs, rtol=1e-3, atol=1e-3)


@pytest.fixture
def _fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets drafts pay, however busy this machine is."""
    monkeypatch.setattr(stream, "cost_of", lambda _: FixedCost(FLAT, "predicted"))


@pytest.mark.usefixtures("_fixed")
@pytest.mark.parametrize("by", ["lookup", "model", "both"])
def test_the_text_is_that_of_mlx_lm(loaded: tuple[nn.Module, Any], by: str) -> None:
    given = {
        "lookup": by != "model",
        "draft_model": None if by == "lookup" else loaded[0],
    }
    expected = [*mlx_lm.stream_generate(*loaded, TEXT, 40)]

    found = [*mlx_marlin.stream_generate(*loaded, TEXT, 40, **given)]

    assert_same_responses(found, expected)
    last = found[-1]
    assert all(isinstance(each, DraftedResponse) for each in found)
    drafted = [each.from_draft for each in found]
    assert [each.accepted for each in found] == [*accumulate(drafted)]
    assert last.drafted >= last.accepted
    assert last.plain_tps > 0
    assert last.cost == "predicted"
    assert max(each.rows for each in found) > 1 or not last.drafted
    if by == "lookup":
        assert any(each.from_draft and each.rows > 2 for each in found)


@pytest.mark.parametrize("is_shared", [False, True])
def test_without_a_drafter_or_with_a_shared_model_it_is_mlx_lms(
    loaded: tuple[nn.Module, Any], monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    monkeypatch.setattr(stream, "is_divided", lambda _: is_shared)

    found = [*mlx_marlin.stream_generate(*loaded, TEXT, 5, lookup=is_shared)]

    assert not any(isinstance(each, DraftedResponse) for each in found)
    assert len(found) == 5


def test_a_prompt_cache_goes_on(loaded: tuple[nn.Module, Any]) -> None:
    texts = []
    for generate in (
        mlx_lm.stream_generate,
        partial(mlx_marlin.stream_generate, lookup=True),
    ):
        cache = make_prompt_cache(loaded[0])
        first = joined_text(generate(*loaded, TEXT, 12, prompt_cache=cache))
        second = joined_text(generate(*loaded, "So", 12, prompt_cache=cache))
        texts.append((first, second))
    assert texts[0] == texts[1]


@sampled(1, 4)
@pytest.mark.parametrize("begun", [None, 3, 6, 9])
@pytest.mark.usefixtures("unfused", "_fixed")
def test_a_caller_sees_the_cache_of_mlx_lm_at_each_token(
    loaded: tuple[nn.Module, Any], begun: int | None
) -> None:
    model, tokenizer = loaded
    prompt, options = tokenizer.encode(TEXT), {}
    if begun is not None:
        start = len(prompt) + begun
        options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    own, ours = make_prompt_cache(model), make_prompt_cache(model)
    expected = mlx_lm.stream_generate(*loaded, prompt, 14, prompt_cache=own, **options)
    found = mlx_marlin.stream_generate(
        *loaded, prompt, 14, prompt_cache=ours, lookup=True, **options
    )
    responses = []
    for response, other in zip(found, expected, strict=True):
        assert response.token == other.token
        kinds = [[(type(each), each.offset) for each in cache] for cache in (ours, own)]
        assert kinds[0] == kinds[1]
        responses.append(response)
    assert any(each.from_draft for each in responses)


def test_progress_of_the_prompt_is_told(loaded: tuple[nn.Module, Any]) -> None:
    told: list[tuple[int, int]] = []
    options = {
        "prefill_step_size": 8,
        "prompt_progress_callback": lambda *each: told.append(each),
    }

    [*mlx_marlin.stream_generate(*loaded, [*range(20)], 3, lookup=True, **options)]

    assert told == [(0, 20), (8, 20), (16, 20), (19, 20), (20, 20)]


def test_an_end_token_ends_the_text(loaded: tuple[nn.Module, Any]) -> None:
    model, tokenizer = loaded
    end = [*mlx_lm.stream_generate(model, tokenizer, TEXT, 11)][-1].token
    before = {*tokenizer.eos_token_ids}
    tokenizer.eos_token_ids.add(end)
    try:
        found = [*mlx_marlin.stream_generate(model, tokenizer, TEXT, 30, lookup=True)]
        expected = [*mlx_lm.stream_generate(model, tokenizer, TEXT, 30)]
    finally:
        tokenizer.eos_token_ids.clear()
        tokenizer.eos_token_ids.update(before)

    assert_same_responses(found, expected)
    assert found[-1].finish_reason == "stop"


BOS = "<|endoftext|>"


@pytest.mark.parametrize("bos", [BOS, None])
@pytest.mark.parametrize("prompt", ["So", BOS + "So", [5, 6, 7], mx.array])
def test_a_prompt_begins_as_with_mlx_lm(
    loaded: tuple[nn.Module, Any], prompt: Any, bos: str | None
) -> None:
    """A text gets the token with which texts begin, unless it has it."""
    tokenizer = deepcopy(loaded[1])
    tokenizer._tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    tokenizer._tokenizer.bos_token = bos
    given = loaded[0], tokenizer, prompt if prompt is not mx.array else mx.array([5, 6])
    expected = [*mlx_lm.stream_generate(*given, 1)]
    found = [*mlx_marlin.stream_generate(*given, 1, lookup=True)]
    assert_same_responses(found, expected)


def last_of_all(logprobs: mx.array) -> mx.array:
    return mx.argmin(logprobs, axis=-1)


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": last_of_all},
        {"logits_processors": [lambda _, logits: -logits]},
        {"kv_bits": 2, "kv_group_size": 32, "quantized_kv_start": 4},
        {"stream": mx.cpu, "num_draft_tokens": 3, "input_embeddings": None},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.usefixtures("unfused")
def test_an_option_does_what_it_does_in_mlx_lm(
    loaded: tuple[nn.Module, Any], options: dict[str, Any]
) -> None:
    given = *loaded, [5, 9, 2, 7, 5, 9, 2], 3
    expected = [*mlx_lm.stream_generate(*given, **options)]

    found = [*mlx_marlin.stream_generate(*given, lookup=True, **options)]

    assert_same_responses(found, expected)


def test_caches_are_the_callers_or_as_long_as_asked_for() -> None:
    model: Any = SimpleNamespace(layers=[1, 2, 3])
    small: Any = SimpleNamespace(layers=[1, 2])
    for draft_model in (None, small):
        own, others = stream._split(None, model, draft_model, 8)
        assert [each.max_size for each in own] == [8] * 3
        # mlx-lm's own decoding with a draft model bounds neither.
        assert [type(each) for each in others] == [KVCache] * len(others)
        assert len(others) == (2 if draft_model else 0)
    own, _ = stream._split(None, model, None, None)
    assert [type(each) for each in own] == [KVCache] * 3
    given: Any = [*"abcde"]
    assert stream._split(given, model, None, 8)[0] is given
    assert stream._split(given, model, small, 8) == ([*"abc"], [*"de"])
    own, others = stream._split(given[:3], model, small, 8)
    assert own == [*"abc"]
    assert len(others) == 2


def test_what_is_not_drafted_is_given_to_mlx_lm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def without_drafts(*given: Any, **options: Any) -> Iterator[str]:
        asked.append((given, options))
        yield "theirs"

    monkeypatch.setattr(stream, "without_drafts", without_drafts)
    model, draft_model, other = nn.Module(), nn.Module(), object()
    options = {"input_embeddings": mx.zeros(2), "num_draft_tokens": 4}
    ours = mlx_marlin.stream_generate
    assert [*ours(model, "t", "p", 7, lookup=True, **options)] == ["theirs"]
    assert [*ours(model, "t", "p", 7, draft_model, other, **options)] == ["theirs"]
    assert [*ours(model, "t", "p")] == ["theirs"]
    assert asked == [
        ((model, "t", "p", 7, None, stream.generation_stream), options),
        ((model, "t", "p", 7, None, other), options),
        ((model, "t", "p", 256, None, stream.generation_stream), {}),
    ]


def test_rates_are_tokens_a_second_of_the_prompt_and_of_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([100.0, 104.0, 104.5, 106.0, 108.0])
    events: list[Any] = []

    def tokens(prompt: list[int], most: int, told: Any) -> Iterator[Token]:
        try:
            for number in range(5):
                decoder.drafted, decoder.accepted = 20 + number, 10 + number
                decoder.passes, decoder.accepted_by = 5 + number, {"lookup": number}
                rows, logprobs = 30 + number, mx.array(number)
                yield Token(
                    token=number, logprobs=logprobs, from_draft=number == 1, rows=rows
                )
        finally:
            events.append("closed")

    decoder = SimpleNamespace(tokens=tokens, drafted=0, accepted=0)
    decoding: Any = SimpleNamespace(
        model="model",
        stream="stream",
        decoder=decoder,
        cost=PassCost({1: 0.125, 2: 0.25}, "measured"),
        progress=lambda *told: events.append(told),
    )
    detokenizer = SimpleNamespace(
        last_segment="", finalize=lambda: setattr(detokenizer, "last_segment", "end")
    )
    detokenizer.add_token = lambda each: setattr(
        detokenizer, "last_segment", f"<{each}>"
    )
    tokenizer = SimpleNamespace(detokenizer=detokenizer, eos_token_ids={9})
    monkeypatch.setattr(
        stream, "time", SimpleNamespace(perf_counter=lambda: next(clock))
    )
    monkeypatch.setattr(mx, "get_peak_memory", lambda: 3_500_000_000)
    monkeypatch.setattr(
        stream, "wired_limit", lambda *given: nullcontext(events.append(given))
    )

    found = [*stream._responses(decoding, tokenizer, [7] * 12, 3)]

    assert events == [(0, 12), ("model", ["stream"]), (12, 12), "closed"]
    for number, response in enumerate(found):
        assert vars(response) == {
            "text": f"<{number}>" if number < 2 else "end",
            "token": number,
            "logprobs": mx.array(number),
            "from_draft": number == 1,
            "prompt_tokens": 12,
            "prompt_tps": 12 / 4.0,
            "generation_tokens": number + 1,
            "generation_tps": (1 / 0.5, 2 / 2.0, 3 / 4.0)[number],
            "peak_memory": 3.5,
            "finish_reason": "length" if number == 2 else None,
            "drafted": 20 + number,
            "accepted": 10 + number,
            "rows": 30 + number,
            "plain_tps": 8.0,
            "cost": "measured",
            "passes": 5 + number,
            "accepted_by": {"lookup": number},
        }
    assert len(found) == 3


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"lookup": True, "max_tokens": 0}, ValueError, "max_tokens=0"),
        ({"lookup": True, "prompt": []}, ValueError, "prompt has no tokens"),
        ({"lookup": True, "temp": 1}, TypeError, "temp"),
    ],
)
def test_bad_arguments_are_named(
    loaded: tuple[nn.Module, Any],
    given: dict[str, Any],
    error: type[Exception],
    said: str,
) -> None:
    with pytest.raises(error, match=said):
        next(mlx_marlin.stream_generate(*loaded, **{"prompt": "a"} | given))


def test_all_options_of_mlx_lm_are_taken_with_its_defaults() -> None:
    own = inspect.signature(GENERATE.generate_step).parameters
    ours = inspect.signature(stream._Decoding.__init__).parameters
    elsewhere = {"prompt", "model", "stream", "max_tokens", "input_embeddings"}
    names = {*own} - elsewhere
    assert {name: own[name].default for name in names} == {
        name: ours[name].default for name in names
    }
    ours = inspect.signature(mlx_marlin.stream_generate).parameters
    assert ours["max_tokens"].default == own["max_tokens"].default
