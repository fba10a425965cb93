"""Saves matplotlib's figures, without what differs between runs."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_marlin.cli.pictures import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METADATA = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
}
"""Metadata to omit, by suffix, so that the same pictures give the same bytes."""


def require(option: str) -> None:
    """Checks that matplotlib is installed.

    Args:
        option: The option that needs it, for messages.

    Raises:
        ImportError: If it is missing.
    """
    try:
        import matplotlib.style  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{option} draws with matplotlib: pip install 'mlx-marlin[plot]', or pip "
            f"install matplotlib ({error})"
        ) from None


def save(path: Path, option: str, draw: "Callable[[], Figure]") -> None:
    """Draws a figure to a file. The same figure gives the same bytes.

    Args:
        path: The file; its suffix selects the format.
        option: The option that names it, for messages.
        draw: Returns the figure, in matplotlib's default style.

    Raises:
        ImportError: If matplotlib is missing.
        OSError: If the file cannot be written.
    """
    require(option)
    import matplotlib.style

    suffix = path.suffix.lower()
    output = BytesIO()
    # Text is not converted to paths: files are small and can be searched.
    style = {
        "svg.hashsalt": "mlx-marlin",
        "svg.fonttype": "none",
        "font.sans-serif": ["DejaVu Sans"],
        "text.parse_math": False,
    }
    with matplotlib.style.context(["default", style]):
        draw().savefig(
            output, format=suffix[1:], dpi=150, metadata=METADATA[suffix], pad_inches=0
        )
    files.write(path, option, output.getvalue())
