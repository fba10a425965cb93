"""Metal text as tokens, and steps from one to another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/|\\\n)
  | (?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
  | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<mark>::|->|.)
    """,
    re.VERBOSE | re.DOTALL,
)

_OPENING = {"(": ")", "[": "]", "{": "}"}


@dataclass
class Token:
    """A piece of text and what becomes of it.

    Attributes:
        kind: space, text, number, name or mark.
        text: As read; the rules look at this only.
        written: As written out.
    """

    kind: str
    text: str
    written: str


class Tokens:
    """A text cut into tokens. Positions are indices; -1 stands before the first."""

    def __init__(self, text: str) -> None:
        pieces = _TOKEN.finditer(text)
        self.tokens = [Token(m.lastgroup or "", m[0], m[0]) for m in pieces]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: int) -> Token:
        return self.tokens[at]

    def __iter__(self) -> Iterator[Token]:
        return iter(self.tokens)

    def after(self, at: int) -> int:
        """The next position that is not space."""
        at += 1
        while at < len(self.tokens) and self.tokens[at].kind == "space":
            at += 1
        return at

    def before(self, at: int) -> int:
        """The previous position that is not space, or -1."""
        at -= 1
        while at >= 0 and self.tokens[at].kind == "space":
            at -= 1
        return at

    def text(self, at: int) -> str:
        """What stands there; nothing outside of the text."""
        return self.tokens[at].text if 0 <= at < len(self.tokens) else ""

    def closing(self, at: int) -> int:
        """The bracket that closes the one at `at`, or the end."""
        wanted = [_OPENING[self.text(at)]]
        while wanted and at < len(self.tokens) - 1:
            at += 1
            word = self.text(at)
            if word in _OPENING and self.tokens[at].kind == "mark":
                wanted.append(_OPENING[word])
            elif word == wanted[-1]:
                wanted.pop()
        return at

    def closing_angle(self, at: int) -> int:
        """The `>` that closes the `<` at `at`, or -1 if it is a comparison."""
        depth = 1
        while at < len(self.tokens) - 1:
            at += 1
            word = self.text(at)
            if word in ("(", "["):
                at = self.closing(at)
            elif word == "<":
                depth += 1
            elif word == ">":
                depth -= 1
                if depth == 0:
                    return at
            elif word in (";", "{", "}"):
                return -1
        return -1

    def space(self, at: int) -> bool:
        """Whether white space or a comment stands there."""
        return self.tokens[at].kind == "space"

    def named(self, at: int) -> bool:
        """Whether a name or keyword stands there."""
        return 0 <= at < len(self.tokens) and self.tokens[at].kind == "name"

    def number(self, at: int) -> bool:
        """Whether a literal number stands there."""
        return 0 <= at < len(self.tokens) and self.tokens[at].kind == "number"

    def blank(self, at: int) -> None:
        """Makes it space that keeps its line breaks."""
        token = self.tokens[at]
        token.text = token.written = "\n" * token.text.count("\n")
        token.kind = "space"

    def line_end(self, at: int) -> int:
        """The space with which the line of a directive ends."""
        while at < len(self.tokens) - 1:
            at += 1
            if self.tokens[at].kind == "space" and self.text(at).startswith("\n"):
                break
        return at

    def items(self, opening: int, closing: int) -> Iterator[int]:
        """First tokens of the items of a bracketed list."""
        at = self.after(opening)
        if at < closing:
            yield at
        while at < closing:
            if self.text(at) == ",":
                yield self.after(at)
            at = self.after(self.closing(at) if self.text(at) in _OPENING else at)

    def read(self, begin: int, end: int) -> str:
        """The text of a range, as read."""
        return "".join(token.text for token in self.tokens[begin:end])
