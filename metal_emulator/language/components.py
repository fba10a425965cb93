"""Alignment checks of vector components in memory: `p[i].x`, `p->x` and `(*p).x`.

Clang checks the alignment of a vector when the whole vector is loaded, but not when
only a component is. `emu_whole(p[i]).x` first refers to the whole vector; in trace mode
clang checks that reference.
"""

from __future__ import annotations

import re

from metal_emulator.language.tokens import Tokens

_COMPONENTS = re.compile(r"[xyzw]{1,4}|[rgba]{1,4}")
_KEYWORDS = frozenset(
    {"return", "if", "while", "for", "switch", "case", "else", "do", "sizeof"}
    | {"alignof", "decltype", "operator", "and", "or", "not"}
)


def checked_component(tokens: Tokens, at: int) -> None:
    """Adds the reference to the whole vector for the `.` or `->` at `at`."""
    last = tokens.before(at)
    if not _COMPONENTS.fullmatch(tokens.text(tokens.after(at))):
        return
    pointer = tokens.text(at) == "->"
    if not pointer and tokens.text(last) != "]" and not _dereferences(tokens, last):
        return
    first = _expression_begin(tokens, last)
    if first < 0:
        return
    begin, end = ("emu_whole(*", ").") if pointer else ("emu_whole(", ").")
    tokens[first].written = begin + tokens[first].written
    tokens[at].written = end


def _dereferences(tokens: Tokens, last: int) -> bool:
    """Returns whether `(*p)` ends there and is not an argument list."""
    if tokens.text(last) != ")":
        return False
    opening = tokens.opening(last)
    previous = tokens.before(opening)
    return tokens.text(tokens.after(opening)) == "*" and (
        tokens.text(previous) not in (")", "]", ">")
        and (not tokens.named(previous) or tokens.text(previous) in _KEYWORDS)
    )


def _expression_begin(tokens: Tokens, last: int) -> int:
    """Returns the first token of the postfix expression that ends at `last`.

    Returns -1 after `>`, which may close template arguments.
    """
    at = last
    while at >= 0:
        if tokens.text(at) in ("]", ")"):
            opening = tokens.opening(at)
            before = tokens.before(opening)
            operand = tokens.named(before) and tokens.text(before) not in _KEYWORDS
            if operand or (
                tokens.text(at) == "]" and tokens.text(before) in ("]", ")")
            ):
                at = before
            elif tokens.text(at) == "]" or tokens.text(before) in ("]", ">"):
                return -1
            else:
                return opening
        elif tokens.named(at):
            before = tokens.before(at)
            if tokens.text(before) not in (".", "->", "::"):
                return at
            at = tokens.before(before)
        else:
            return -1
    return -1
