"""Versions of packages: the installed ones, and those this package is tested with."""

TESTED = {"mlx": ("0.32.4",), "mlx-lm": ("0.32.1", "0.32.2")}
"""Tested versions in ascending order. `pyproject.toml` requires the last ones; `make
test-peers` tests with the others."""


def installed(distribution: str) -> str | None:
    """Returns the version of an installed package, which is not imported, or None."""
    from importlib import metadata  # its import takes longer than the rest

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def describe(distribution: str) -> str:
    """Returns the installed and the tested versions, for messages."""
    tested = " and ".join(TESTED.get(distribution, ("none",)))
    version = installed(distribution) or "of unknown version"
    return f"{distribution} {version} is installed, tested: {tested}"
