"""Saves matplotlib's figures, without what differs between runs."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_marlin.cli.pictures import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METADATA = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
}
"""Metadata to omit, by suffix, so that the same pictures give the same bytes."""
STYLE = {
    "svg.hashsalt": "mlx-marlin",
    "svg.fonttype": "none",  # text stays text: files are small and can be searched
    "font.sans-serif": ["DejaVu Sans"],
    "text.parse_math": False,
    "legend.frameon": False,
}


def require(option: str) -> None:
    """Checks that matplotlib is installed."""
    try:
        import matplotlib.style  # noqa: F401
    except ImportError as error:
        needed = f"{option} draws with matplotlib, pip install matplotlib: {error}"
        raise ImportError(needed, name=error.name) from None


def axes(figure: "Figure", inches: tuple[float, float, float, float]) -> "Axes":
    """Adds axes at a fixed place: left, bottom, width and height.

    Places that a layout engine finds depend on how texts are measured, and ids in an
    SVG on the last bits of places.
    """
    wide, high = figure.get_size_inches()
    left, bottom, width, height = inches
    return figure.add_axes((left / wide, bottom / high, width / wide, height / high))


def content(draw: "Callable[[], Figure]", suffix: str) -> bytes:
    """Returns a figure as a file. The same figure gives the same bytes."""
    import matplotlib.style

    output = BytesIO()
    with matplotlib.style.context(["default", STYLE]):
        draw().savefig(output, format=suffix[1:], dpi=150, metadata=METADATA[suffix])
    return output.getvalue()


def save(path: Path, option: str, draw: "Callable[[], Figure]") -> None:
    """Draws a figure to a file; an existing file is replaced atomically.

    Args:
        path: The file; its suffix selects the format.
        option: The option that names it, for messages.
        draw: As for `content`.

    Raises:
        ImportError: If matplotlib is missing.
        OSError: If the file cannot be written.
    """
    require(option)
    files.write(path, option, content(draw, path.suffix.lower()))
