"""Progress bars on standard error, and output above them."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

Value = TypeVar("Value")


def shown(
    values: Iterable[Value], label: str, unit: str, total: int | None = None
) -> Iterator[Value]:
    """Yields values and shows a progress bar.

    Args:
        values: The values.
        label: Text before the bar.
        unit: What a value is.
        total: Number of values, if they have no length.

    Raises:
        ImportError: If tqdm is not installed.
    """
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            f"the progress bar needs pip install 'mlx-marlin[lm]': {error}"
        ) from error
    yield from tqdm(values, label, total=total, unit=unit)


def print_above(text: str) -> None:
    """Prints a text and an empty line to standard output, above the progress bar."""
    from tqdm import tqdm

    tqdm.write(f"{text}\n")
