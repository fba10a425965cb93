"""`stream_generate` has mlx-lm's arguments and responses."""

import inspect
import socket
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm import server
from mlx_lm.models.cache import make_prompt_cache

import mlx_marlin
from mlx_marlin.cli import lm
from mlx_marlin.lm.drafts import install, stream
from mlx_marlin.lm.drafts.stream import DraftedResponse
from support import quantized_folder

GENERATE = sys.modules["mlx_lm.generate"]
TEXT = "a rose is a rose is a rose is a rose. " * 3


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Any]:
    folder = tmp_path_factory.mktemp("models") / "quantized"
    model, tokenizer, *_ = mlx_lm.load(str(quantized_folder.write(folder, mx.float32)))
    return model, tokenizer


def joined_text(responses: Iterable[Any]) -> str:
    return "".join(each.text for each in responses)


@pytest.mark.parametrize("by", ["lookup", "model"])
def test_the_text_is_that_of_mlx_lm(loaded: tuple[nn.Module, Any], by: str) -> None:
    given = {"lookup": True} if by == "lookup" else {"draft_model": loaded[0]}
    expected = [*mlx_lm.stream_generate(*loaded, TEXT, 40)]

    found = [*mlx_marlin.stream_generate(*loaded, TEXT, 40, **given)]

    assert [each.token for each in found] == [each.token for each in expected]
    assert joined_text(found) == joined_text(expected)
    last, own = found[-1], expected[-1]
    assert isinstance(last, DraftedResponse)
    assert last.finish_reason == own.finish_reason
    assert last.prompt_tokens == own.prompt_tokens
    assert last.generation_tokens == own.generation_tokens
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


@pytest.mark.parametrize("begun", [None, 3, 6, 9])
@pytest.mark.usefixtures("unfused")
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
    plain = [*mlx_lm.stream_generate(model, tokenizer, TEXT, 30)]
    end = plain[10].token
    first = next(i for i, each in enumerate(plain) if each.token == end)
    before = {*tokenizer.eos_token_ids}
    tokenizer.eos_token_ids.add(end)
    try:
        found = [*mlx_marlin.stream_generate(model, tokenizer, TEXT, 30, lookup=True)]
    finally:
        tokenizer.eos_token_ids.clear()
        tokenizer.eos_token_ids.update(before)

    assert len(found) == first + 1
    assert found[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"lookup": True, "max_tokens": 0}, ValueError, "max_tokens=0"),
        ({"lookup": True, "prompt": []}, ValueError, "prompt has no tokens"),
        ({"lookup": True, "temp": 1}, TypeError, "temp"),
        ({"lookup": True, "draft_model": 1}, ValueError, "exclude each other"),
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


def test_all_options_of_mlx_lm_are_taken() -> None:
    own = inspect.signature(GENERATE.generate_step).parameters
    ours = inspect.signature(stream._Decoding.__init__).parameters
    elsewhere = {"prompt", "model", "stream", "max_tokens", "input_embeddings"}
    assert {*own} - elsewhere <= {*ours}


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {
        name: vars(module)["stream_generate"]
        for name, module in sys.modules.items()
        if name.split(".")[0] == "mlx_lm" and "stream_generate" in vars(module)
    }
    for name in before:  # a command of another test may have installed ours
        vars(sys.modules[name])["stream_generate"] = stream.without_drafts
    yield
    for name, function in before.items():
        vars(sys.modules[name])["stream_generate"] = function


@pytest.mark.usefixtures("_installed")
def test_mlx_lms_own_functions_look_up(
    loaded: tuple[nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded
    expected = mlx_lm.generate(model, tokenizer, TEXT, max_tokens=20)
    asked: list[dict[str, Any]] = []

    def noted(*given: Any, **options: Any) -> Any:
        asked.append(options)
        return stream.stream_generate(*given, **options)

    monkeypatch.setattr(install, "stream_generate", noted)
    install.install()

    assert mlx_lm.generate(model, tokenizer, TEXT, max_tokens=20) == expected
    mlx_lm.generate(model, tokenizer, TEXT, max_tokens=4, draft_model=model)
    for draft_model in (model, None):  # none is no draft model
        install._looking_up(model, tokenizer, TEXT, 4, draft_model)
    assert [each["lookup"] for each in asked] == [True, False, False, True]
    assert stream.without_drafts.__module__ == "mlx_lm.generate"


@pytest.mark.parametrize("missing", ["ResponseGenerator", "APIHandler"])
def test_a_server_of_mlx_lm_with_other_parts_batches_and_says_so(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    own = server.ResponseGenerator, server.ResponseGenerator._is_batchable
    monkeypatch.delattr(server, missing)
    with pytest.warns(RuntimeWarning, match="decodes without drafts"):
        install.serve_one_at_a_time()
    assert own[0]._is_batchable is own[1]


def test_the_server_decodes_one_request_at_a_time_while_its_client_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that is not streamed writes nothing by which it would notice."""
    ours, client = socket.socketpair()
    decoded: list[int] = []

    def responses() -> Iterator[int]:
        for number in range(100):
            if number == 5:
                client.close()
            decoded.append(number)
            yield number

    def answer(handler: Any, request: str) -> None:
        _, found = handler.response_generator.generate(request)
        assert handler.response_generator.is_healthy
        assert [*found] == []  # it is never told all

    own = SimpleNamespace(generate=lambda _: (None, responses()), is_healthy=True)
    handler = SimpleNamespace(response_generator=own, connection=ours)
    batchable = server.ResponseGenerator._is_batchable
    monkeypatch.setattr(server.ResponseGenerator, "_is_batchable", batchable)
    monkeypatch.setattr(server.APIHandler, "handle_completion", answer)
    install.serve_one_at_a_time()

    assert not server.ResponseGenerator._is_batchable(None, None)
    with ours, pytest.raises(BrokenPipeError, match="the client has left"):
        server.APIHandler.handle_completion(handler, "a request")
    assert decoded == [*range(6)]
    assert handler.response_generator is own


def test_a_flag_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(install, "install", lambda: called.append("install"))
    monkeypatch.setattr(
        install, "serve_one_at_a_time", lambda: called.append("one at a time")
    )
    lm._look_up("chat")
    lm._look_up("server")
    assert called == ["install", "install", "one at a time"]
