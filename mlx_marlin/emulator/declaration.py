"""Declarations that are no C++ yet: of arrays, and of threadgroup variables."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_marlin.emulator.tokens import Tokens

SPACES = frozenset({"device", "threadgroup", "thread"})
"""Address spaces that mean nothing on a CPU."""


def is_declarator(tokens: Tokens, opening: int) -> bool:
    """Whether `(&name)[8]` or `(*name)[8]` begins there, and no expression."""
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


@dataclass(frozen=True)
class Declaration:
    """`threadgroup type name[dimensions], ...;`."""

    type: str
    variables: list[tuple[str, str]]
    end: int

    @classmethod
    def parse(cls, tokens: Tokens, begin: int) -> Declaration | None:
        """None if the text at `begin` declares a pointer or a reference."""
        name = begin
        at = tokens.after(begin)
        while tokens.text(at) not in ("[", ",", ";", "=", ""):
            if tokens.text(at) in ("*", "&", "(", ")", "{"):
                return None
            if tokens.text(at) == "<":
                at = tokens.closing_angle(at)
            name = at
            at = tokens.after(at)
        kind = tokens.read(begin, name).strip()
        if not kind or tokens.text(at) not in ("[", ",", ";"):
            return None
        variables = []
        while True:
            variable, dimensions = tokens.text(name), ""
            while tokens.text(at) == "[":
                close = tokens.closing(at)
                dimensions += tokens.read(at, close + 1)
                at = tokens.after(close)
            variables.append((variable, dimensions))
            if tokens.text(at) != ",":
                return cls(kind, variables, at)
            name = tokens.after(at)
            at = tokens.after(name)
