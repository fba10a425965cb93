"""The versions of MLX and mlx-lm that this package is tested with."""

from importlib import metadata

TESTED = {"mlx": ("0.32.4",), "mlx-lm": ("0.32.1", "0.32.2")}
"""Tested versions in ascending order. `pyproject.toml` requires the last ones; `make
test-peers` tests with the others."""


def describe(distribution: str) -> str:
    """Returns the installed and the tested versions, for messages."""
    tested = " and ".join(TESTED.get(distribution, ("none",)))
    return f"{distribution} {_installed(distribution)} is installed, tested: {tested}"


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "of unknown version"
