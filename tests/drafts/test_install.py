"""mlx-lm's own commands draft tokens."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm import server

from drafts.test_stream import TEXT, loaded
from mlx_marlin.cli import lm
from mlx_marlin.lm.drafts import install, stream
from support import head_models

__all__ = ["loaded"]


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
    said: list[str] = []
    install.install(tell=said.append)

    assert mlx_lm.generate(model, tokenizer, TEXT, max_tokens=20) == expected
    assert len(said) == 1
    assert said[0].startswith("drafts: ")
    mlx_lm.generate(model, tokenizer, TEXT, max_tokens=4, draft_model=model)
    monkeypatch.setitem(vars(model), install.HEAD, "head")
    responses = mlx_lm.stream_generate(model, tokenizer, TEXT, draft_model=None)
    with pytest.raises(AttributeError):  # a text is no head
        next(responses)
    assert [each["lookup"] for each in asked] == [True] * 3
    assert [each["draft_model"] for each in asked[1:]] == [model, "head"]
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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert capsys.readouterr().err == f"mlx_marlin: {install.ONE_AT_A_TIME}\n"


def test_a_client_has_left_if_its_connection_is_closed_on_either_side() -> None:
    ours, client = socket.socketpair()
    with ours, client:
        assert not install._has_left(ours)
        client.send(b"next")
        assert not install._has_left(ours)
        assert ours.recv(4) == b"next"  # it was not taken
        client.close()
        assert install._has_left(ours)
    assert install._has_left(ours)


@pytest.mark.parametrize("command", ["chat", "generate", "server"])
def test_flags_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(install, "install", lambda **given: called.append(given))
    monkeypatch.setattr(
        install, "serve_one_at_a_time", lambda: called.append("one at a time")
    )
    said = lm._draft(command, lookup=False)
    given = called.pop(0)
    assert given["lookup"] is False
    assert called == (["one at a time"] if command == "server" else [])
    if command == "server":  # which says it of each request
        assert given["tell"] is lm._tell
    else:
        given["tell"]("drafts")
        assert said == ["drafts"]


def test_a_head_is_the_models_own_or_that_of_a_place(tmp_path: Path) -> None:
    model = head_models.trunk("mimo")
    for place, folder in (("auto", tmp_path), (str(tmp_path), Path("elsewhere"))):
        head_models.write(tmp_path, head_models.stored("mimo"))
        head = install.attach_head(place, model, folder)
        assert vars(model)[install.HEAD] is head
        assert head.trunk.text is model
    assert "_mlx_marlin_head" not in model  # else it would be converted with it
