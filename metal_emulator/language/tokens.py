"""Tokenizer for Metal source."""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
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
    """A token and its replacement."""

    kind: str  # space, text, number, name or mark
    text: str  # The token as read; rules examine only this
    written: str  # The replacement


class Tokens:
    """The tokens of a text. Positions are indices; -1 is before the first token."""

    def __init__(self, text: str) -> None:
        pieces = _TOKEN.finditer(text)
        self.tokens = [Token(m.lastgroup or "", m[0], m[0]) for m in pieces]
        self._angles: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: int) -> Token:
        return self.tokens[at]

    def __iter__(self) -> Iterator[Token]:
        return iter(self.tokens)

    def after(self, at: int) -> int:
        """Returns the next position that is not space."""
        at += 1
        while at < len(self.tokens) and self.tokens[at].kind == "space":
            at += 1
        return at

    def before(self, at: int) -> int:
        """Returns the previous position that is not space, or -1."""
        at -= 1
        while at >= 0 and self.tokens[at].kind == "space":
            at -= 1
        return at

    def text(self, at: int) -> str:
        """Returns the text of a token, or "" outside of the text."""
        return self.tokens[at].text if 0 <= at < len(self.tokens) else ""

    def closing(self, at: int) -> int:
        """Returns the bracket that closes the one at `at`, or the last position."""
        return self._closings.get(at, len(self.tokens) - 1)

    @functools.cached_property
    def _closings(self) -> dict[int, int]:
        """The closing bracket of every one that is closed, by position.

        Rules blank only whole pairs, which changes no other pair.
        """
        found: dict[int, int] = {}
        opened: list[int] = []
        for at, token in enumerate(self.tokens):
            if token.kind == "mark" and token.text in _OPENING:
                opened.append(at)
            elif opened and token.text == _OPENING[self.text(opened[-1])]:
                found[opened.pop()] = at
        return found

    def closing_angle(self, at: int) -> int:
        """Returns the `>` that closes the `<` at `at`, or -1 for a comparison."""
        if at not in self._angles:
            self._find_angles(at)
        return self._angles[at]

    def _find_angles(self, at: int) -> None:
        """Finds the `>` of the `<` at `at`, and of those inside of it."""
        opened = [at]
        while opened and at < len(self.tokens) - 1:
            at += 1
            word = self.text(at)
            if word in ("(", "["):
                at = self.closing(at)
            elif word == "<":
                opened.append(at)
            elif word == ">":
                self._angles[opened.pop()] = at
            elif word in (";", "{", "}"):
                break
        self._angles.update(dict.fromkeys(opened, -1))

    def space(self, at: int) -> bool:
        """Returns whether a token is white space or a comment."""
        return self.tokens[at].kind == "space"

    def named(self, at: int) -> bool:
        """Returns whether a token is a name or keyword."""
        return 0 <= at < len(self.tokens) and self.tokens[at].kind == "name"

    def number(self, at: int) -> bool:
        """Returns whether a token is a numeric literal."""
        return 0 <= at < len(self.tokens) and self.tokens[at].kind == "number"

    def opening(self, at: int) -> int:
        """Returns the bracket that the one at `at` closes, or -1."""
        wanted = 0
        while at >= 0:
            word = self.text(at)
            if self.tokens[at].kind == "mark":
                wanted += (word in _OPENING.values()) - (word in _OPENING)
            if wanted == 0:
                return at
            at -= 1
        return -1

    def blank(self, at: int) -> None:
        """Removes a token; space is kept, so that line numbers do not change."""
        token = self.tokens[at]
        if token.kind != "space":
            token.text = token.written = ""
            token.kind = "space"

    def blank_range(self, begin: int, end: int) -> None:
        """Removes the tokens from `begin` up to, not including, `end`."""
        for at in range(begin, end):
            self.blank(at)

    def line_end(self, at: int) -> int:
        """Returns the space that ends the line of a directive."""
        while at < len(self.tokens) - 1:
            at += 1
            if self.text(at).isspace() and "\n" in self.text(at):
                break
        return at

    @functools.cached_property
    def directives(self) -> list[tuple[int, int]]:
        """First token and end of the line of each preprocessor directive."""
        marks = (at for at in range(len(self.tokens)) if self.text(at) == "#")
        found: list[tuple[int, int]] = []
        for at in marks:
            if not found or at > found[-1][1]:  # otherwise the operator # in a macro
                found.append((at, self.line_end(at)))
        return found

    def directive(self, at: int) -> int:
        """Returns the `#` of the directive that contains the token, or -1."""
        index = bisect_right(self.directives, (at, len(self.tokens))) - 1
        if index < 0 or at >= self.directives[index][1]:
            return -1
        return self.directives[index][0]

    def statement_limit(self, at: int) -> int:
        """Returns the end of the macro or text that contains a statement."""
        mark = self.directive(at)
        return len(self.tokens) if mark < 0 else self.line_end(mark)

    def before_statement(self, at: int) -> str:
        """Returns the text of the token before `at`, skipping directives.

        Returns "" at the start of the text or of a macro's body.
        """
        mark = self.directive(at)
        previous = self.before(at)
        if mark >= 0:
            return "" if previous == self._macro_head(mark) else self.text(previous)
        while previous >= 0 and (line := self.directive(previous)) >= 0:
            previous = self.before(line)
        return self.text(previous)

    def _macro_head(self, mark: int) -> int:
        """Returns the last token before the body of the macro defined at `mark`."""
        name = self.after(self.after(mark))
        return self.closing(name + 1) if self.text(name + 1) == "(" else name

    def items(self, opening: int, closing: int) -> Iterator[int]:
        """Yields the first token of every item of a bracketed list."""
        at = self.after(opening)
        if at < closing:
            yield at
        while at < closing:
            if self.text(at) == ",":
                yield self.after(at)
            at = self.after(self.closing(at) if self.text(at) in _OPENING else at)

    def read(self, begin: int, end: int) -> str:
        """Returns the text of a range, as read."""
        return "".join(token.text for token in self.tokens[begin:end])

    def read_line(self, begin: int, end: int) -> str:
        """Returns the text of a range on one line, without comments."""
        tokens = self.tokens[begin:end]
        words = (" " if token.kind == "space" else token.text for token in tokens)
        return "".join(words).strip()
