"""The option `--json [FILE]` of commands: a result as JSON, printed or in a file."""

import argparse
import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_marlin.cli.pictures import files

OPTION = "--json"
STDOUT = Path("-")
"""Value of the option without a file: JSON is printed instead of text."""


def add_option(parser: "argparse._ActionsContainer", *aliases: str) -> None:
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


def is_printed(args: argparse.Namespace) -> bool:
    """Returns whether JSON is printed instead of text."""
    return getattr(args, "json", None) == STDOUT


@contextlib.contextmanager
def instead_of_text(args: argparse.Namespace) -> Iterator[None]:
    """Checks the file of the option; prints JSON alone if there is none."""
    path = getattr(args, "json", None)
    if path is None or path != STDOUT:
        if path is not None:
            files.check_folder(path, OPTION)
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    print(args.json_text, end="")


def write(args: argparse.Namespace, value: Any) -> None:
    """Writes a value as JSON, if the option is given."""
    write_text(args, f"{json.dumps(value, indent=2)}\n")


def write_text(args: argparse.Namespace, text: str) -> None:
    """Writes a JSON text, if the option is given."""
    if is_printed(args):
        args.json_text = text
    elif args.json is not None:
        files.write(args.json, OPTION, text.encode("utf-8"))
