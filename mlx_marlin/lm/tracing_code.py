"""Imports the code that traces decoder blocks, which depends on mlx-lm's internals.

With a version of mlx-lm whose internals differ, blocks are not traced, and a warning is
given.
"""

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import mlx.nn as nn

from mlx_marlin.lm.module_tree import Changes
from mlx_marlin.versions import describe
from mlx_marlin.warn_once import has_warned, warn_once

CODE = "mlx_marlin.lm.tracing.block"
OTHER_VERSION = "not traced: "
"""Beginning of the causes of warnings about a version of mlx-lm that differs."""


def set_tracing(
    model: nn.Module,
    trace: bool,
    changes: Changes,
    fuse: Iterable[str] = (),
    asked: bool = False,
) -> None:
    """Traces a model's decoder blocks, or gives them back their own code."""
    code = tracing_code(trace)
    if not trace and code is not None:
        code.untrace_blocks(model, changes)
    elif code is not None:
        code.trace_blocks(model, changes, frozenset(fuse))
        if asked:
            _warn_if_untraced([*code.block_outcomes(model, lambda block: block)])
    elif asked and not _is_mlx_lm_loaded():
        _warn_if_untraced([])


def tracing_code(trace: bool) -> Any | None:
    """Returns the module that traces blocks, if it is needed and there are blocks."""
    if not _is_mlx_lm_loaded():
        return None  # no module of mlx-lm has been imported, so no block can be traced
    return _imported() if trace else sys.modules.get(CODE)


def _imported() -> Any | None:
    """Returns the module that traces blocks; None, with a warning, if it fails."""
    try:
        code = import_module(CODE)
        import_module("mlx_marlin.lm.tracing.kv_cache").check_caches()
    except Exception as error:  # another version may raise anything
        report_untraced(f"{type(error).__name__}: {error}")
        return None
    return code


def _is_mlx_lm_loaded() -> bool:
    """Returns whether a module of mlx-lm's models has been imported."""
    return "mlx_lm.models.base" in sys.modules


def report_untraced(reason: str, blocks: str = "decoder blocks") -> None:
    """Warns once per process and reason that blocks are not traced."""
    warn_once(
        f"{OTHER_VERSION}{blocks}: {reason}",
        f"{blocks} are not traced, because mlx-lm differs from the tested versions "
        f"({reason}; {describe('mlx-lm')})",
    )


def _warn_if_untraced(blocks: Sequence[tuple[str, str, str | None]]) -> None:
    """Warns once per reason if none of a model's decoder blocks is traced."""
    reasons = [reason for *_, reason in blocks]
    if None in reasons or has_warned(OTHER_VERSION):
        return  # one message says why
    first = f", such as {blocks[0][0]}: {blocks[0][2]}" if blocks else ""
    warn_once(
        f"nothing traced: {sorted(set(map(str, reasons)))}",
        f"trace=True traces none of the model's {len(blocks)} decoder blocks{first}; "
        f"optimize(model, trace=True, dry_run=True) lists them",
    )
