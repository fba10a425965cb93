"""Warnings that are given once per process and cause."""

import sys
import warnings

_warned: set[str] = set()


def warn_once(cause: str, message: str) -> None:
    """Gives a RuntimeWarning, unless the process has given one for the same cause."""
    if cause in _warned:
        return
    _warned.add(cause)
    warnings.warn(f"mlx_marlin: {message}", RuntimeWarning, stacklevel=_caller())


def has_warned(kind: str) -> bool:
    """Returns whether a warning was given whose cause begins with `kind`."""
    return any(cause.startswith(kind) for cause in _warned)


def _caller() -> int:
    """Returns the stack level, in `warn_once`, of the code that called this package."""
    level, frame = 0, sys._getframe(1)
    while frame.f_back and frame.f_globals["__name__"].startswith("mlx_marlin."):
        level, frame = level + 1, frame.f_back
    return level + 1


def forget() -> None:
    """Allows all warnings to be given again."""
    _warned.clear()
