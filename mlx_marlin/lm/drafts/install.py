"""Makes mlx-lm's own commands draft tokens: generate, chat and server."""

import socket
import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_marlin.lm.checkpoints.head_source import AUTO, load_heads
from mlx_marlin.lm.drafts.stream import (
    DraftedResponse,
    stream_generate,
    without_drafts,
)
from mlx_marlin.warn_once import warn_once

ONE_AT_A_TIME = "requests are decoded one at a time with drafts; later requests wait"
HEAD = "_mlx_marlin_head"
"""Attribute of a model: its head."""


def install(
    *, lookup: bool = True, tell: Callable[[str], None] = lambda _: None
) -> None:
    """Lets mlx-lm's commands draft, also those that have been imported.

    `lookup`: whether drafts are looked up; models that have a head use it.
    `tell`: is told at the end of each text what drafts did.
    """
    for name, module in [*sys.modules.items()]:
        if name.split(".")[0] == "mlx_lm":
            names = vars(module)
            if names.get("stream_generate") is without_drafts:
                names["stream_generate"] = partial(_drafting, lookup, tell)


def attach_head(place: str, model: nn.Module, folder: Path) -> nn.Module:
    """Loads the head of a model that mlx-lm has read from a folder, for `install`.

    `place`: as for `load_heads`; "auto" is the model's folder.
    """
    head = load_heads(folder if place == AUTO else place, model)
    object.__setattr__(model, HEAD, head)  # no part of the model
    return head


def serve_one_at_a_time() -> None:
    """Lets mlx-lm's server decode requests one by one, since batches have no drafts."""
    from mlx_lm import server

    answerer: Any = getattr(server, "ResponseGenerator", None)
    handler: Any = getattr(server, "APIHandler", None)
    for owner, name in (answerer, "_is_batchable"), (handler, "handle_completion"):
        if not hasattr(owner, name):
            warn_once(
                "no lookup in the server",
                f"mlx-lm's server decodes without drafts, because it has no {name}",
            )
            return
    answerer._is_batchable = _never
    handler.handle_completion = _ending_with_the_client(handler.handle_completion)
    if sys.stderr is not None:
        print(f"mlx_marlin: {ONE_AT_A_TIME}", file=sys.stderr, flush=True)


def _never(*_: Any) -> bool:
    return False


def _ending_with_the_client(answer: Callable[..., None]) -> Callable[..., None]:
    """Wraps the method that answers a request: it fails if the client has left.

    mlx-lm's notices that when it writes, which it does at the end if nothing is
    streamed. Its decoding stops when the method fails.
    """

    @wraps(answer)
    def answer_while_there(handler: Any, *given: Any, **options: Any) -> None:
        generator = handler.response_generator
        handler.response_generator = _Watching(generator, handler.connection)
        try:
            answer(handler, *given, **options)
        finally:
            handler.response_generator = generator

    return answer_while_there


class _Watching:
    """mlx-lm's `ResponseGenerator`, which looks for the client at each token."""

    def __init__(self, generator: Any, client: socket.socket) -> None:
        self._generator, self._client = generator, client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def generate(self, *given: Any, **options: Any) -> tuple[Any, Iterator[Any]]:
        """Returns what mlx-lm's does: a context, and responses token by token."""
        context, responses = self._generator.generate(*given, **options)
        return context, self._while_there(responses)

    def _while_there(self, responses: Iterator[Any]) -> Iterator[Any]:
        for response in responses:
            if _has_left(self._client):
                raise BrokenPipeError("the client has left before its answer was ready")
            yield response


def _has_left(client: socket.socket) -> bool:
    """Returns whether a connection was closed by the other side."""
    try:
        return not client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:  # it is there and says nothing
        return False
    except OSError:
        return True


def _drafting(
    lookup: bool, tell: Callable[[str], None], *given: Any, **options: Any
) -> Iterator[Any]:
    """`stream_generate` that drafts with a model's head and what else is asked for."""
    model = given[0] if given else options["model"]
    if (head := vars(model).get(HEAD)) is not None:
        options["draft_model"] = head
    drafts: Callable[..., Generator[Any, None, None]] = stream_generate
    response: Any = None
    try:
        for response in drafts(*given, lookup=lookup, **options):
            yield response
    finally:
        if isinstance(response, DraftedResponse):
            tell(response.summary)
