"""Standard output and error: limited encodings and closed pipes."""

import codecs
import contextlib
import io
import os
import sys
from typing import TextIO

ERRORS = "mlx_marlin.replace"
"""Name of the codec error handler that `replace_unknown_characters` installs."""
REPLACEMENTS = {"→": "->"}
"""Replacements of characters that the encoding lacks; the others become "?"."""


def replace_unknown_characters() -> None:
    """Makes printing succeed in every encoding.

    Without it, printing an arrow in the C locale raises UnicodeEncodeError.
    """
    codecs.register_error(ERRORS, _replace)
    for stream in _streams():
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ERRORS)


def flush() -> None:
    """Writes buffered output."""
    for stream in _streams():
        stream.flush()


def discard() -> None:
    """Redirects streams that cannot be written to the null device.

    Otherwise the interpreter would print a traceback when it flushes them at exit.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in _streams():
        try:
            stream.flush()
        except OSError:
            os.dup2(null, stream.fileno())
    os.close(null)


def print_note(text: str) -> None:
    """Prints a line about the progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def print_error(text: str) -> None:
    """Prints a line to standard error, ignoring errors of the stream."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    discard()


def _streams() -> list[TextIO]:
    """Returns the open streams; sys.stdout is None if the caller closed it."""
    streams: tuple[TextIO | None, ...] = (sys.stdout, sys.stderr)
    return [stream for stream in streams if stream is not None]


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    unknown = error.object[error.start : error.end]
    return "".join(REPLACEMENTS.get(char, "?") for char in unknown), error.end
