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
        raise ImportError(
            f"{option} draws with matplotlib, pip install matplotlib: {error}"
        ) from None


def content(draw: "Callable[[], Figure]", suffix: str) -> bytes:
    """Returns a figure as a file. The same figure gives the same bytes."""
    import matplotlib.style

    output = BytesIO()
    with matplotlib.style.context(["default", STYLE]):
        figure = draw()
        _lay_out(figure)
        figure.savefig(output, format=suffix[1:], dpi=150, metadata=METADATA[suffix])
    return output.getvalue()


def _lay_out(figure: "Figure") -> None:
    """Places the parts of a figure, rounded to what is drawn.

    The last bits of the solver depend on addresses, and ids in an SVG are digests of
    exact places.
    """
    engine = figure.get_layout_engine()
    assert engine is not None
    for _ in range(2):  # labels of ticks depend on the places, too
        engine.execute(figure)
    figure.set_layout_engine("none")
    for part in figure.subfigs:
        part.bbox_relative.set_points(part.bbox_relative.get_points().round(6))
    for axes in figure.axes:
        x, y, width, height = axes.get_position().bounds
        axes.set_position((round(x, 6), round(y, 6), round(width, 6), round(height, 6)))


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
