"""Standard output and error: encodings that lack a character, and closed pipes."""

import codecs
import contextlib
import io
import os
import sys
from typing import TextIO

ERRORS = "mlx_marlin.replace"
"""Name of the codec error handler that `replace_unknown_characters` installs."""
REPLACEMENTS = {"→": "->"}
"""What is printed for a character that the terminal's encoding lacks; "?" otherwise."""


def replace_unknown_characters() -> None:
    """Makes printing succeed in every encoding, ASCII included.

    Without it, printing an arrow raises UnicodeEncodeError where the locale is C.
    """
    codecs.register_error(ERRORS, _replace)
    for stream in _streams():
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ERRORS)


def flush() -> None:
    """Writes buffered output.

    Raises:
        BrokenPipeError: If the reader of the pipe is gone.
    """
    for stream in _streams():
        stream.flush()


def discard() -> None:
    """Sends buffered output to the null device where it cannot be written.

    The interpreter flushes both streams when it exits, and would print a traceback.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in _streams():
        try:
            stream.flush()
        except OSError:
            os.dup2(null, stream.fileno())
    os.close(null)


def complain(text: str) -> None:
    """Prints a line on standard error, if it can be written to."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    discard()


def _streams() -> list[TextIO]:
    """Returns the open streams: one that the caller closed is None."""
    streams: tuple[TextIO | None, ...] = (sys.stdout, sys.stderr)
    return [stream for stream in streams if stream is not None]


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    unknown = error.object[error.start : error.end]
    return "".join(REPLACEMENTS.get(each, "?") for each in unknown), error.end
