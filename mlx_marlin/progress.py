"""Progress bars on standard error, and output above them."""

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

Value = TypeVar("Value")


def bar(label: str, unit: str, total: int | None) -> Any:
    """Returns a bar of tqdm, as a context; its `update` moves it on.

    It is silent without steps, and where standard error is no terminal: in a file a
    bar is noise. That of a notebook is none, but shows bars.
    """
    from tqdm import tqdm

    silent = None if "ipykernel" not in sys.modules else False  # None: tqdm decides
    return tqdm(desc=label, unit=unit, total=total, disable=total == 0 or silent)


def shown(
    values: Iterable[Value], label: str, unit: str, total: int | None = None
) -> Iterator[Value]:
    """Yields values and moves a bar; `total` is for those that have no length."""
    if total is None and isinstance(values, Sized):
        total = len(values)
    with bar(label, unit, total) as steps:
        for value in values:
            yield value
            steps.update()


def print_above(text: str) -> None:
    """Prints a text and an empty line to standard output, above the bar."""
    from tqdm import tqdm

    tqdm.write(f"{text}\n")
