"""Parser of declarations of arrays and threadgroup variables."""

from __future__ import annotations

import re
from dataclasses import dataclass

from metal_emulator.language.tokens import Tokens

SPACES = frozenset({"device", "threadgroup", "thread"})
"""Address spaces that the emulator removes."""
STATEMENT_ENDS = frozenset(["", "{", "}", ";", ")", ":"])
"""Tokens that can precede a statement."""

_INTEGER_WORD = r"(?:(?:un)?signed|char|short|int|long)"
_INTEGER = re.compile(rf"\b{_INTEGER_WORD}(?:\s+{_INTEGER_WORD})+\b|\b(?:un)?signed\b")


def plain_type(text: str) -> str:
    """Returns a type with Metal's short names: `uint2` is `metal::uint2`."""

    def short(found: re.Match[str]) -> str:
        words = found[0].split()
        size = next(
            (word for word in ("char", "short", "long") if word in words), "int"
        )
        return f"u{size}" if "unsigned" in words else size

    return _INTEGER.sub(short, re.sub(r"\bmetal\s*::\s*", "", text))


def is_declarator(tokens: Tokens, opening: int) -> bool:
    """Returns whether a declarator `(&name)[8]` or `(*name)[8]` begins there."""
    if tokens.text(opening) != "(":
        return False
    mark = tokens.after(opening)
    while tokens.text(mark) in SPACES:
        mark = tokens.after(mark)
    closing = tokens.closing(opening)
    name = tokens.before(closing)
    return (
        tokens.text(mark) in ("*", "&")
        and tokens.before(name) == mark
        and tokens.named(name)
        and tokens.text(tokens.after(closing)) == "["
    )


def _skip_alignment(tokens: Tokens, at: int) -> int:
    """Skips `alignas(n)`: threadgroup memory is aligned to 16 bytes anyway."""
    if tokens.text(at) != "alignas":
        return at
    return tokens.after(tokens.closing(tokens.after(at)))


@dataclass(frozen=True)
class Declaration:
    """`threadgroup type name[dimensions], ...;`."""

    type: str  # The type of the elements
    variables: list[tuple[str, str]]  # Names and dimensions
    end: int  # The last token: the `;`, or the last token of a macro without one

    @classmethod
    def parse(cls, tokens: Tokens, begin: int) -> Declaration | None:
        """Parses the declaration at `begin`.

        Returns None for pointers, references and variables with an initializer.
        """
        begin = _skip_alignment(tokens, begin)
        limit = tokens.statement_limit(begin)
        name = _first_name(tokens, begin, limit)
        if name < 0:
            return None
        kind, at = tokens.read_line(begin, name), tokens.after(name)
        if not kind or (at < limit and tokens.text(at) == "="):
            return None
        variables = []
        while True:
            dimensions, last = _dimensions(tokens, name, limit)
            at = tokens.after(last)
            variables.append((tokens.text(name), dimensions))
            if at >= limit or tokens.text(at) != ",":
                ended = at < limit and tokens.text(at) == ";"
                return cls(kind, variables, at if ended else last)
            name = tokens.after(at)


def _first_name(tokens: Tokens, begin: int, limit: int) -> int:
    """Returns the first declared name, or -1 for a pointer or reference."""
    name = begin
    at = tokens.after(begin)
    while at < limit and tokens.text(at) not in ("[", ",", ";", "="):
        if tokens.text(at) in ("*", "&", "(", ")", "{"):
            return -1
        if tokens.text(at) == "<":
            at = tokens.closing_angle(at)
        name = at
        at = tokens.after(at)
    return name


def _dimensions(tokens: Tokens, name: int, limit: int) -> tuple[str, int]:
    """Returns the dimensions after a name and the last token of both."""
    text, last = "", name
    at = tokens.after(name)
    while at < limit and tokens.text(at) == "[":
        last = tokens.closing(at)
        text += tokens.read_line(at, last + 1)
        at = tokens.after(last)
    return text, last
