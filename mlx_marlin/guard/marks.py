"""The mark of a kernel that is being evaluated; it stays if that ends the process.

It stays after an abort, a fault of the GPU, SIGKILL and a halt of the machine. Signals
that people and schedulers end processes with take it back first, as do exceptions and
the end of the interpreter. A signal reaches Python when MLX returns, and only in the
main thread: one that ends the process during a check in another thread leaves the mark.
"""

import atexit
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, BinaryIO

ENDING = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGXCPU,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that end a process and that no kernel causes."""

_present: "dict[Mark, None]" = {}
"""The marks of this process that are in files."""
_handlers: dict[int, Any] = {}
"""The handlers that `_take_all_back` replaces now."""


class Mark:
    """What an open file contains while a kernel is evaluated, and otherwise."""

    def __init__(self, file: BinaryIO, content: bytes, otherwise: bytes) -> None:
        self._file, self._content, self._otherwise = file, content, otherwise
        self._process = os.getpid()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Marks what is evaluated in the context."""
        try:
            _replace_handlers()
            self.put()
            yield
        finally:
            self.take_back()
            _restore_handlers()

    def put(self) -> None:
        """Writes the mark, so that it outlasts the process and the machine."""
        _present[self] = None  # before it is written: a signal may come in between
        self._write(self._content)

    def take_back(self) -> None:
        """Removes the mark."""
        self._write(self._otherwise)
        _present.pop(self, None)

    def _write(self, content: bytes) -> None:
        if self._process != os.getpid():
            return  # a forked child, which evaluates nothing
        with suppress(OSError, ValueError):  # a full device, a closed file
            rewrite(self._file, content)


def rewrite(file: BinaryIO, content: bytes) -> None:
    """Replaces the content of an open file, without a buffer that is written later."""
    if content:  # before the old one goes: a full device must not lose it
        os.pwrite(file.fileno(), content, 0)
    os.ftruncate(file.fileno(), len(content))
    if content:
        os.fsync(file.fileno())


def _take_all_back(number: int, frame: FrameType | None) -> None:
    """Handles a signal: removes all marks, then does what the signal did before."""
    marks = [*_present]
    for mark in marks:
        mark.take_back()
    before = _handlers.get(number, signal.SIG_DFL)
    if callable(before):
        before(number, frame)
    else:
        signal.signal(number, before)
        signal.raise_signal(number)
    for mark in marks:  # the process goes on
        mark.put()


def _replace_handlers() -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for number in ENDING:
        before = signal.getsignal(number)
        # None is a handler that Python does not know.
        if before not in (None, signal.SIG_IGN, _take_all_back):
            _handlers[number] = before
            signal.signal(number, _take_all_back)


def _restore_handlers() -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for number in [*_handlers]:
        signal.signal(number, _handlers[number])
        del _handlers[number]


@atexit.register
def _end() -> None:
    """Removes the marks of threads that end with the interpreter."""
    for mark in [*_present]:
        mark.take_back()
