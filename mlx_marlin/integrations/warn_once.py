"""Warnings that a process gives once for each cause."""

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
    warnings.warn(f"mlx_marlin: {message}", RuntimeWarning, stacklevel=4)


def forget() -> None:
    """Forgets which warnings were given."""
    _warned.clear()
