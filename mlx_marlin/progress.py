"""Progress bars on standard error, and output above them."""

import sys
from collections.abc import Iterable, Iterator, Sized
from threading import Event, Thread
from typing import Any, TypeVar

Value = TypeVar("Value")
TICK = 1.0
"""Seconds between two movements of the clock of a bar."""


def bar(label: str, unit: str, total: int | None, leave: bool = True) -> Any:
    """Returns a bar of tqdm, as a context; its `update` moves it on.

    It is silent without steps, and where standard error is no terminal: in a file a
    bar is noise. That of a notebook is none, but shows bars.
    """
    from tqdm import tqdm

    silent = None if "ipykernel" not in sys.modules else False  # None: tqdm decides
    disable = total == 0 or silent
    return tqdm(desc=label, unit=unit, total=total, disable=disable, leave=leave)


class Stages:
    """One bar for work of several stages, which shows that time passes.

    Its clock moves each `TICK` seconds whatever the work does, if that lets other
    threads run.
    """

    def __init__(self, unit: str) -> None:
        self._bar = bar("", unit, None, leave=False)
        self._ended = Event()
        self._ticker = Thread(target=self._tick, daemon=True)

    def __enter__(self) -> "Stages":
        if not self._bar.disable:
            self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._ticker.is_alive():
            self._ticker.join()
        self._bar.close()

    def _tick(self) -> None:
        while not self._ended.wait(TICK):
            self._bar.refresh()

    def say(self, what: str) -> None:
        """Says what is being done."""
        self._bar.set_description_str(what)

    def expect(self, steps: int) -> None:
        """Adds steps to those that are to be done."""
        self._bar.total = (self._bar.total or 0) + steps
        self._bar.refresh()

    def step(self) -> None:
        """Moves the bar on by a step that is done."""
        self._bar.update()


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
