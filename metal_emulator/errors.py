"""Errors and warnings of the emulator."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class EmulatorError(RuntimeError):
    """A kernel violates the rules of Metal, or the emulator cannot run it.

    The message names the kernel, buffer, threadgroup, thread and source line where they
    are known.
    """


class CompileError(EmulatorError):
    """The Metal text does not compile. The message names the Metal line."""


class EmulatorWarning(UserWarning):
    """A kernel leaves elements of an output unwritten."""


def told_to_caller(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps a function so that the trace of its `EmulatorError` ends at its caller.

    A failing test then shows the line that called the kernel, and the message.
    """

    @functools.wraps(function)
    def called(*args: _P.args, **keywords: _P.kwargs) -> _R:
        __tracebackhide__ = True  # for pytest
        try:
            return function(*args, **keywords)
        except EmulatorError as error:
            raise error.with_traceback(None)  # noqa: B904 - it is the same error

    return called
