"""Components of vectors in memory: `p[i].x`, `p->x` and `(*p).x`.

Clang checks the alignment of a vector that is loaded as a whole, not of one of which a
component is used. `emu_whole(p[i]).x` refers to the whole vector first; in trace mode
clang checks that reference.
"""

from __future__ import annotations

import re

from mlx_marlin.emulator.language.tokens import Tokens

_COMPONENTS = re.compile(r"[xyzw]{1,4}|[rgba]{1,4}")
_KEYWORDS = frozenset(
    {"return", "if", "while", "for", "switch", "case", "else", "do", "sizeof"}
    | {"alignof", "decltype", "operator", "and", "or", "not"}
)


def checked_component(tokens: Tokens, at: int) -> None:
    """Refers to the whole vector whose component the `.` or `->` at `at` names."""
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
    """Whether `(*p)` ends there, and no call."""
    if tokens.text(last) != ")":
        return False
    opening = tokens.opening(last)
    called = tokens.before(opening)
    return tokens.text(tokens.after(opening)) == "*" and (
        tokens.text(called) not in (")", "]", ">")
        and (not tokens.named(called) or tokens.text(called) in _KEYWORDS)
    )


def _expression_begin(tokens: Tokens, last: int) -> int:
    """The first token of the postfix expression that ends at `last`.

    -1 if it is not certain: behind `>`, which may close template arguments.
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
