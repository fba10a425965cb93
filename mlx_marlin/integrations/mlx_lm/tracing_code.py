"""Access to the code that traces decoder blocks, which depends on mlx-lm's internals.

A version of mlx-lm in which these differ leaves the blocks as they are, with a warning.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from mlx_marlin.integrations.mlx_lm.versions import describe
from mlx_marlin.integrations.mlx_lm.warn_once import warn_once

CODE = "mlx_marlin.integrations.tracing.block"


def tracing_code() -> Any | None:
    """Returns the module that traces blocks; None, with a warning, if it cannot run."""
    try:
        code: Any = import_module(CODE)
        code.check()
    except Exception as error:  # whatever a change of mlx-lm's leads to
        report_untraced(f"{type(error).__name__}: {error}")
        return None
    return code


def loaded_code() -> ModuleType | None:
    """Returns the same if it is imported already: else no block is traced."""
    return sys.modules.get(CODE)


def report_untraced(reason: str, blocks: str = "decoder blocks") -> None:
    """Warns once per process and reason that blocks are not traced."""
    warn_once(
        f"not traced: {blocks}: {reason}",
        f"{blocks} are not traced, because mlx-lm differs from the tested versions "
        f"({reason}; {describe('mlx-lm')})",
    )
