"""`#include "file"` of a text: replaced by the file, as a preprocessor does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from metal_emulator import regular_files

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"(?P<name>[^"\n]+)".*$', re.M)
_LINE = re.compile(
    r'^[ \t]*#[ \t]*line[ \t]+(?P<line>\d+)(?:[ \t]+"(?P<name>[^"\n]*)")?.*\n', re.M
)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b.*$", re.M)


def flattened(text: str, name: str, folders: Sequence[Path]) -> str:
    """Returns a text with the files that it includes by names in quotes.

    A file is looked up in the folder of the file that includes it, then in `folders`.
    An `#include` whose file is in neither stays: it may be in an inactive `#if`.
    """
    return _Includes(folders).text_of(text, name, None)


class _Includes:
    """The files that are being included, and those that are included once."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self.open: list[Path] = []
        self.once: set[Path] = set()

    def text_of(self, text: str, name: str, file: Path | None) -> str:
        """Returns the text of a file with `#line` directives."""
        if file and _ONCE.search(text):
            self.once.add(file)

        def included(found: re.Match[str]) -> str:
            inner = self.included(found["name"], file)
            if inner is None:
                return found[0]
            here, line = _place(text[: found.start()], name)
            return f'{inner}\n#line {line + 1} "{here}"'

        body = _INCLUDE.sub(included, _ONCE.sub("", text) if file else text)
        return f'#line 1 "{name}"\n{body}'

    def included(self, name: str, by: Path | None) -> str | None:
        """Returns the text of a file, "" if it is there already, or None."""
        folders = [*([by.parent] if by else []), *self.folders]
        files = ((folder / name).resolve() for folder in folders)
        file = next((each for each in files if each.is_file()), None)
        if file is None:
            return None
        if file in self.once or file in self.open:
            return ""
        self.open.append(file)
        try:
            return self.text_of(regular_files.read_text(file), name, file)
        finally:
            self.open.pop()


def _place(before: str, name: str) -> tuple[str, int]:
    """Returns the file and line behind a text, as `#line` directives count them."""
    start, line = 0, 1
    for found in _LINE.finditer(before):
        start, line, name = found.end(), int(found["line"]), found["name"] or name
    return name, line + before.count("\n", start)
