"""Compaction of Metal text: removes what the compiler does not need.

MLX concatenates the text of a kernel in each call and hashes it in each evaluation, so
every byte costs host time. Comments, unnecessary white space and unused declarations
are removed. Line breaks stay, so remaining tokens keep their line numbers.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from mlx_marlin.backends.metal.source.tokens import (
    BETWEEN,
    Item,
    identifiers,
    items_of,
)

_ANGLES = {"<": 1, ">": -1, ">>": -2}
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_BEHIND_NAME = frozenset({"(", "=", "[", "{", ";"})
_CLOSING = frozenset(")]}")
_CLASSES = frozenset({"struct", "class", "union"})
_UNNAMED = frozenset(
    {"__attribute__", "alignas", "asm", "decltype", "enum", "extern", "friend"}
    | {"namespace", "operator", "static_assert", "typedef"}
)
"""Keywords of declarations whose names are not parsed; such declarations stay."""


class _Piece(NamedTuple):
    """A declaration at namespace scope, a directive, or a line break.

    Attributes:
        text: The text without comments and unnecessary white space.
        name: The declared name; None if the piece always stays.
        words: All identifiers in the piece.
        parameters: For a function, the identifiers that occur in its parameter list and
            not before it.
        is_class: Whether the piece declares a class.
    """

    text: str
    name: str | None
    words: frozenset[str]
    parameters: frozenset[str] = frozenset()
    is_class: bool = False


def stripped(text: str) -> str:
    """Returns a text without comments and unnecessary white space, line by line."""
    return "".join([word for _, word in items_of(text)])


def lean(files: Sequence[str], body: str) -> str:
    """Returns the declarations of files that a kernel's body uses, stripped.

    A declaration stays if its name occurs in the body, in a directive or in another
    declaration that stays. All overloads and specializations of a name stay, except
    overloads with a parameter of a class that nothing else mentions, because no value
    of such a class exists. Removed declarations leave their line breaks.

    Args:
        files: Texts of declarations.
        body: Text that uses them.

    Returns:
        The files, joined by line breaks.
    """
    parsed = [_pieces(text) for text in files]
    kept = _kept([piece for pieces in parsed for piece in pieces], body)
    return "\n".join(
        "".join(
            piece.text if piece in kept else "\n" * piece.text.count("\n")
            for piece in pieces
        )
        for pieces in parsed
    )


def _kept(pieces: Sequence[_Piece], body: str) -> set[_Piece]:
    """Returns the pieces that a body uses, directly or indirectly."""
    classes = {piece.name for piece in pieces if piece.is_class}
    used = set(identifiers(items_of(body)))
    kept: set[_Piece] = set()
    waiting = list(pieces)
    while waiting:
        found = [
            piece
            for piece in waiting
            if piece.name is None
            or (piece.name in used and piece.parameters & classes <= used)
        ]
        if not found:
            break
        kept.update(found)
        used.update(*(piece.words for piece in found))
        waiting = [piece for piece in waiting if piece not in kept]
    return kept


@cache
def _pieces(text: str) -> tuple[_Piece, ...]:
    """Returns the declarations of a text and what is between them."""
    items = items_of(text)
    pieces = []
    at = 0
    while at < len(items):
        if items[at][0] in ("newline", "space", "directive"):
            part = items[at : at + 1]
            pieces.append(_Piece(part[0][1], None, identifiers(part)))
        else:
            part = items[at : _last(items, at) + 1]
            pieces.append(_declaration(part))
        at += len(part)
    return tuple(pieces)


def _declaration(part: Sequence[Item]) -> _Piece:
    name = _name(part)
    text = "".join([word for _, word in part])
    head = _after_template(part, 0)
    if name is None or _is_class(part, head):
        return _Piece(text, name, identifiers(part), is_class=name is not None)
    return _Piece(text, name, identifiers(part), _parameters(part, name))


def _parameters(part: Sequence[Item], name: str) -> frozenset[str]:
    """Returns the identifiers of a function's parameters that do not occur before."""
    head = _after_template(part, 0)
    first = next(at for at in range(head, len(part)) if part[at][1] == name)
    opening = _following(part, first)
    if part[opening][1] != "(":
        return frozenset()
    depth = 0
    for end in range(opening, len(part)):
        depth += _BRACKETS.get(part[end][1], 0)
        if depth == 0:
            break
    return identifiers(part[opening:end]) - identifiers(part[:opening])


def _last(items: Sequence[Item], start: int) -> int:
    """Returns the index of the last item of the declaration that begins at `start`.

    An unfinished declaration ends with the text.
    """
    head = _after_template(items, start)
    to_semicolon = _is_class(items, head) or items[head][1] in ("enum", "using")
    depth = 0
    for at in range(head, len(items)):
        text = items[at][1]
        depth += _BRACKETS.get(text, 0)
        if depth == 0:
            if text == ";" or (text == "}" and not to_semicolon):
                return at
            to_semicolon = to_semicolon or text == "="
    return len(items) - 1


def _after_template(items: Sequence[Item], at: int) -> int:
    """Returns the index of the first item after `template <...>`, or of the last."""
    last = len(items) - 1
    while items[at][1] == "template" and at < last:
        angles, brackets = 0, 0
        while at < last:
            at += 1
            text = items[at][1]
            brackets += _BRACKETS.get(text, 0)
            if text in _ANGLES and brackets == 0:
                angles += _ANGLES[text]
                if angles <= 0:
                    break
        at = _following(items, at)
    return at


def _following(items: Sequence[Item], at: int) -> int:
    """Returns the index of the next token or directive, or of the last item."""
    at += 1
    while at < len(items) and items[at][0] in BETWEEN:
        at += 1
    return min(at, len(items) - 1)


def _is_class(items: Sequence[Item], at: int) -> bool:
    """Returns whether a class is declared, rather than a value of a class type."""
    name = _following(items, at)
    behind = items[_following(items, name)][1]
    return items[at][1] in _CLASSES and behind in ("{", "<", ":", ";")


def _name(part: Sequence[Item]) -> str | None:
    """Returns the declared name; None if the declaration must stay."""
    items = [
        item for item in part[_after_template(part, 0) :] if item[0] not in BETWEEN
    ]
    texts = [text for _, text in items]
    if not _is_complete(texts) or any(kind == "directive" for kind, _ in part):
        return None
    if _is_class(items, 0):
        outer = _outside_of_brackets(texts)
        whole = outer[-2:] == ["{", ";"] and outer.count("{") == 1
        return texts[1] if whole or len(texts) == 3 else None
    if texts[0] == "using":
        return texts[1] if texts[2:3] == ["="] else None
    at = next((i for i, text in enumerate(texts) if text in _BEHIND_NAME), 0)
    if at == 0 or items[at - 1][0] != "word" or not _UNNAMED.isdisjoint(texts[:at]):
        return None
    declares_more = texts[-1] == ";" and "," in _outside_of_brackets(texts[at:])
    return None if declares_more else texts[at - 1]


def _is_complete(texts: Sequence[str]) -> bool:
    """Returns whether a declaration has an end and balanced brackets."""
    ends = texts[-1:] in (["}"], [";"]) and texts[0] not in _CLOSING
    return ends and sum(_BRACKETS.get(text, 0) for text in texts) == 0


def _outside_of_brackets(texts: Sequence[str]) -> list[str]:
    """Returns the texts outside of brackets, and the opening brackets."""
    outer = []
    depth = 0
    for text in texts:
        change = _BRACKETS.get(text, 0)
        if depth == 0 and change >= 0:
            outer.append(text)
        depth += change
    return outer
