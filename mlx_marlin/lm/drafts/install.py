"""Makes mlx-lm's own commands draft tokens: generate, chat and server."""

import sys
from collections.abc import Callable, Generator
from typing import Any

from mlx_marlin.lm.drafts.stream import stream_generate, without_drafts
from mlx_marlin.lm.warn_once import warn_once

ONE_AT_A_TIME = (
    "requests are decoded one at a time with drafts looked up in their text; later "
    "requests wait"
)


def install() -> None:
    """Lets mlx-lm's commands look up drafts, also those that have been imported."""
    for name, module in [*sys.modules.items()]:
        if name.split(".")[0] == "mlx_lm":
            names = vars(module)
            if names.get("stream_generate") is without_drafts:
                names["stream_generate"] = _looking_up


def serve_one_at_a_time() -> None:
    """Lets mlx-lm's server decode requests one by one, since batches have no drafts."""
    from mlx_lm import server

    answerer: Any = getattr(server, "ResponseGenerator", None)
    if not hasattr(answerer, "_is_batchable"):
        warn_once(
            "no lookup in the server",
            "mlx-lm's server decodes without drafts, because it has no "
            "ResponseGenerator._is_batchable",
        )
        return
    answerer._is_batchable = _never
    if sys.stderr is not None:
        print(f"mlx_marlin: {ONE_AT_A_TIME}", file=sys.stderr, flush=True)


def _never(*_: Any) -> bool:
    return False


def _looking_up(*given: Any, **options: Any) -> Generator[Any, None, None]:
    """`stream_generate`, which looks up drafts if there is no draft model."""
    drafts: Callable[..., Generator[Any, None, None]] = stream_generate
    models = *given[4:5], options.get("draft_model")  # it may be the fifth argument
    has_model = any(each is not None for each in models)
    return drafts(*given, lookup=not has_model, **options)
