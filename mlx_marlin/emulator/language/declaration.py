"""Declarations that are no C++ yet: of arrays, and of threadgroup variables."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_marlin.emulator.language.tokens import Tokens

SPACES = frozenset({"device", "threadgroup", "thread"})
"""Address spaces that mean nothing on a CPU."""
STATEMENT_ENDS = frozenset(["", "{", "}", ";", ")", ":"])
"""What may stand before a statement."""


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


def _behind_alignment(tokens: Tokens, at: int) -> int:
    """What follows `alignas(16)`; threadgroup memory is aligned to 16 bytes."""
    if tokens.text(at) != "alignas":
        return at
    return tokens.after(tokens.closing(tokens.after(at)))


@dataclass(frozen=True)
class Declaration:
    """`threadgroup type name[dimensions], ...;`.

    Attributes:
        type: The type of the elements.
        variables: Names and dimensions.
        end: The last token: the `;`, or what stands before it where a macro ends.
    """

    type: str
    variables: list[tuple[str, str]]
    end: int

    @classmethod
    def parse(cls, tokens: Tokens, begin: int) -> Declaration | None:
        """None if the text at `begin` declares a pointer or a reference."""
        begin = _behind_alignment(tokens, begin)
        limit = tokens.statement_limit(begin)
        name = begin
        at = tokens.after(begin)
        while at < limit and tokens.text(at) not in ("[", ",", ";", "="):
            if tokens.text(at) in ("*", "&", "(", ")", "{"):
                return None
            if tokens.text(at) == "<":
                at = tokens.closing_angle(at)
            name = at
            at = tokens.after(at)
        kind = tokens.read_line(begin, name)
        if not kind or (at < limit and tokens.text(at) == "="):
            return None
        variables = []
        while True:
            variable, dimensions, last = tokens.text(name), "", name
            while at < limit and tokens.text(at) == "[":
                last = tokens.closing(at)
                dimensions += tokens.read_line(at, last + 1)
                at = tokens.after(last)
            variables.append((variable, dimensions))
            if at >= limit or tokens.text(at) != ",":
                ended = at < limit and tokens.text(at) == ";"
                return cls(kind, variables, at if ended else last)
            name = tokens.after(at)
            at = tokens.after(name)
