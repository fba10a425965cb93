"""Where the package keeps what it can make again: folders of the user's cache."""

from pathlib import Path


def folder(name: str) -> Path:
    """Returns the package's folder of a name in the user's cache; it may not exist.

    Raises:
        ImportError: If platformdirs is missing, which the extras bring.
    """
    import platformdirs

    return Path(platformdirs.user_cache_dir("mlx_marlin")) / name
