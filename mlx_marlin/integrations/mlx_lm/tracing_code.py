"""Imports the code that traces decoder blocks, which depends on mlx-lm's internals.

With a version of mlx-lm whose internals differ, blocks are not traced, and a warning is
given.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from mlx_marlin.integrations.mlx_lm.versions import describe
from mlx_marlin.integrations.mlx_lm.warn_once import warn_once

CODE = "mlx_marlin.integrations.tracing.block"


def tracing_code() -> Any | None:
    """Returns the module that traces blocks; None, with a warning, if it fails."""
    try:
        code: Any = import_module(CODE)
        code.check()
    except Exception as error:  # another version may raise anything
        report_untraced(f"{type(error).__name__}: {error}")
        return None
    return code


def loaded_code() -> ModuleType | None:
    """Returns the module that traces blocks, or None if it has not been imported."""
    return sys.modules.get(CODE)


def report_untraced(reason: str, blocks: str = "decoder blocks") -> None:
    """Warns once per process and reason that blocks are not traced."""
    warn_once(
        f"not traced: {blocks}: {reason}",
        f"{blocks} are not traced, because mlx-lm differs from the tested versions "
        f"({reason}; {describe('mlx-lm')})",
    )
