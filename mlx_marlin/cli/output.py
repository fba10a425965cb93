"""What commands write: standard output and error, JSON, and files."""

import argparse
import codecs
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

OPTION = "--json"
STDOUT = Path("-")
"""Value of the option without a file: JSON is printed instead of text."""


def add_json(parser: "argparse._ActionsContainer", *aliases: str) -> None:
    """Adds the option."""
    parser.add_argument(
        OPTION,
        *aliases,
        nargs="?",
        const=STDOUT,
        type=Path,
        metavar="FILE",
        help="write the result as JSON too; without FILE, print JSON instead of text",
    )


def is_json(args: argparse.Namespace) -> bool:
    """Returns whether JSON is printed instead of text."""
    return getattr(args, "json", None) == STDOUT


@contextlib.contextmanager
def instead_of_text(args: argparse.Namespace) -> Iterator[None]:
    """Checks the file of the option; prints JSON alone if there is none."""
    path = getattr(args, "json", None)
    if path is None or path != STDOUT:
        if path is not None:
            check_folder(path, OPTION)
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    print(args.json_text, end="")


def write_json(args: argparse.Namespace, value: Any) -> None:
    """Writes a value as JSON, if the option is given."""
    write_text(args, f"{json.dumps(value, indent=2)}\n")


def write_text(args: argparse.Namespace, text: str) -> None:
    """Writes a JSON text, if the option is given."""
    if is_json(args):
        args.json_text = text
    elif args.json is not None:
        write_file(args.json, OPTION, text.encode("utf-8"))


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


PICTURES = (".svg", ".png")
"""Suffixes of pictures."""


def check_file(path: Path, option: str, suffixes: Sequence[str] = PICTURES) -> None:
    """Checks that a file can be written."""
    if path.suffix.lower() not in suffixes:
        *others, last = suffixes
        raise ValueError(
            f"{option} {path}: expected a name that ends in {', '.join(others)} or "
            f"{last}"
        )
    check_folder(path, option)


def check_folder(path: Path, option: str) -> None:
    """Checks that a file can be written, whatever its suffix."""
    if not path.parent.is_dir():
        raise ValueError(
            f"{option} {path}: the folder {path.parent} does not exist, expected a "
            f"file in an existing folder"
        )
    if path.is_dir():
        raise ValueError(f"{option} {path}: is a folder, expected a file")


def write_file(path: Path, option: str, content: bytes) -> None:
    """Writes a file, whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise OSError(
            f"{option} {path}: cannot be written ({error.strerror}), expected a file "
            f"in a folder that you may write to"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
