"""Warnings that a process gives once for each cause."""

import sys
import warnings

_warned: set[str] = set()


def warn_once(cause: str, message: str) -> None:
    """Gives a RuntimeWarning, unless the process has given one for this cause.

    Args:
        cause: Identifies the warning.
        message: What the user reads, after the package's name.
    """
    if cause in _warned:
        return
    _warned.add(cause)
    warnings.warn(f"mlx_marlin: {message}", RuntimeWarning, stacklevel=_caller())


def _caller() -> int:
    """Returns the stack level of the code that called this package, for `warn_once`."""
    level, frame = 0, sys._getframe(1)
    while frame.f_back and frame.f_globals["__name__"].startswith("mlx_marlin."):
        level, frame = level + 1, frame.f_back
    return level + 1


def forget() -> None:
    """Forgets which warnings were given."""
    _warned.clear()
