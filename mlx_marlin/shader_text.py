"""Removes from Metal text what the compiler does not need.

MLX joins the text of a kernel at each call and hashes it at each evaluation, so each
byte costs time on the host. Comments, needless white space and unused definitions are
removed. Line breaks stay, so that every remaining token keeps its line number.

The tokenizer covers the language of `shaders/`: it does not know raw strings.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<comment>//(?:\\\n|[^\n])*|/\*.*?(?:\*/|\Z))
    |(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<word>[A-Za-z_]\w*)
    |(?P<number>\.?\d(?:[eEpP][+-]|'(?=\w)|[\w.])*)
    |(?P<newline>\n)
    |(?P<continuation>\\\n)
    |(?P<space>[ \t\r\f\v]+)
    |(?P<operator><<=|>>=|\.\.\.|->\*|->|\+\+|--|<<|>>|&&|\|\||::|\#\#|<:|<%|%:
        |[-+*/%&|^=!<>]=|.)
    """,
    re.DOTALL | re.VERBOSE,
)
_WORD = re.compile(r"[A-Za-z_]\w*")
_ANGLES = {"<": 1, ">": -1, ">>": -2}
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_CLASSES = frozenset({"struct", "class", "union"})
_UNNAMED = frozenset(
    {"__attribute__", "alignas", "asm", "decltype", "enum", "extern", "friend"}
    | {"namespace", "operator", "static_assert", "typedef"}
)
"""Words of declarations whose names are not looked for: such declarations stay."""


class _Item(NamedTuple):
    """A token, a whole directive, or the space or line break between tokens."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class _Piece:
    """A declaration outside of all braces, a directive, or line breaks.

    Attributes:
        text: Without comments and needless white space.
        name: The name that it declares; None if it always stays.
        words: All identifiers in it.
    """

    text: str
    name: str | None
    words: frozenset[str]


def stripped(text: str) -> str:
    """Returns a text without comments and needless white space, with all its lines."""
    return "".join(item.text for item in _items(text))


def lean(files: Sequence[str], body: str) -> str:
    """Returns the declarations of files that a kernel's body uses, stripped.

    A declaration stays if its name occurs in the body, in a directive or in another
    declaration that stays. This never separates overloads or specializations. A
    declaration that is removed leaves its line breaks.

    Args:
        files: Texts of declarations.
        body: The text that uses them.

    Returns:
        The files, joined by line breaks.
    """
    parsed = [_pieces(text) for text in files]
    used = _used([piece for pieces in parsed for piece in pieces], body)
    return "\n".join(
        "".join(
            piece.text
            if piece.name is None or piece.name in used
            else "\n" * piece.text.count("\n")
            for piece in pieces
        )
        for pieces in parsed
    )


def _used(pieces: Sequence[_Piece], body: str) -> set[str]:
    """Returns all words of the body and of the pieces that stay."""
    named: dict[str, list[_Piece]] = {}
    used = set(_words(_items(body)))
    for piece in pieces:
        if piece.name is None:
            used |= piece.words
        else:
            named.setdefault(piece.name, []).append(piece)
    waiting = list(used)
    while waiting:
        for piece in named.get(waiting.pop(), ()):
            waiting += piece.words - used
            used |= piece.words
    return used


def _words(items: Sequence[_Item]) -> Iterator[str]:
    for item in items:
        if item.kind == "word":
            yield item.text
        elif item.kind == "directive":
            yield from _WORD.findall(item.text)


def _items(text: str) -> list[_Item]:
    """Returns tokens, directives, line breaks, and spaces between tokens that need one.

    Directives keep one space wherever they have any, because a space before the
    parameters of a macro has a meaning.
    """
    items: list[_Item] = []
    directive: list[str] | None = None
    previous, spaced = "", False
    for found in _TOKEN.finditer(text):
        kind, word = found.lastgroup or "", found[0]
        if kind == "newline":
            if directive is not None:
                items.append(_Item("directive", "".join(directive)))
                directive = None
            items.append(_Item("newline", "\n"))
            previous, spaced = "", False
        elif kind == "space":
            spaced = True
        elif kind in ("comment", "continuation"):
            spaced |= kind == "comment"
            breaks = "\n" * word.count("\n")
            if directive is not None or kind == "continuation":
                breaks = breaks.replace("\n", "\\\n")
            if directive is not None:
                directive.append(breaks)
            elif breaks:
                items.append(_Item("newline", breaks))
                previous = previous if kind == "continuation" else ""
        else:
            if word == "#" and not previous:
                directive = []
            needed = spaced and previous
            if directive is not None:
                directive.append(" " + word if needed else word)
            else:
                if needed and _must_be_apart(previous, word):
                    items.append(_Item("space", " "))
                items.append(_Item(kind, word))
            previous, spaced = word, False
    if directive is not None:
        items.append(_Item("directive", "".join(directive)))
    return items


@cache
def _must_be_apart(first: str, second: str) -> bool:
    """Returns whether two tokens would be read differently without space."""
    if re.match(r"[\w\"']", first[-1]) and re.match(r"[\w\"']", second[0]):
        return True
    found = _TOKEN.match(first + second)
    return found is not None and found.end() > len(first)


@cache
def _pieces(text: str) -> tuple[_Piece, ...]:
    """Returns the declarations of a text and what stands between them."""
    items = _items(text)
    pieces = []
    at = 0
    while at < len(items):
        end = at
        if items[at].kind not in ("newline", "space", "directive"):
            end = _last(items, at)
        part = items[at : end + 1]
        written = "".join(item.text for item in part)
        pieces.append(_Piece(written, _name(part), frozenset(_words(part))))
        at = end + 1
    return tuple(pieces)


def _last(items: Sequence[_Item], start: int) -> int:
    """Returns the last item of the declaration that begins at `start`.

    An unfinished declaration has all items.
    """
    head = _after_template(items, start)
    to_semicolon = _is_class(items, head) or items[head].text in ("enum", "using")
    depth = 0
    for at in range(head, len(items)):
        text = items[at].text
        depth += _BRACKETS.get(text, 0)
        if depth == 0 and (text == ";" or (text == "}" and not to_semicolon)):
            return at
        to_semicolon |= depth == 0 and text == "="
    return len(items) - 1


def _after_template(items: Sequence[_Item], at: int) -> int:
    """Returns the first item behind `template <...>`, or the last one of all."""
    while items[at].text == "template":
        depth, parentheses = 0, 0
        for at in range(at + 1, len(items)):
            text = items[at].text
            parentheses += _BRACKETS.get(text, 0)
            depth += 0 if parentheses else _ANGLES.get(text, 0)
            if depth <= 0 and text in _ANGLES and not parentheses:
                break
        at = _following(items, at)
    return at


def _following(items: Sequence[_Item], at: int) -> int:
    """Returns the next token or directive, or the last item."""
    at += 1
    while at < len(items) and items[at].kind in ("newline", "space"):
        at += 1
    return min(at, len(items) - 1)


def _is_class(items: Sequence[_Item], at: int) -> bool:
    """Returns whether a class is declared, rather than what has its type."""
    name = _following(items, at)
    behind = items[_following(items, name)].text
    return items[at].text in _CLASSES and behind in ("{", "<", ":", ";")


def _name(part: Sequence[_Item]) -> str | None:
    """Returns the name that a declaration declares, None if it has to stay."""
    head = _after_template(part, 0)
    if any(item.kind == "directive" for item in part):
        return None
    items = [item for item in part[head:] if item.kind not in ("newline", "space")]
    texts = [item.text for item in items]
    outer = _outside_of_brackets(texts)
    if not outer or texts[-1] not in ("}", ";"):
        return None
    if _is_class(items, 0):
        ends = outer[-2:] == ["{", ";"] or len(texts) == 3
        return texts[1] if ends and outer.count("{") < 2 else None
    if texts[0] == "using":
        return texts[1] if texts[2:3] == ["="] else None
    at = next(i for i, text in enumerate(texts) if text in ("(", "=", "[", "{", ";"))
    if at == 0 or items[at - 1].kind != "word" or _UNNAMED & {*texts[:at]}:
        return None
    behind = _outside_of_brackets(texts[at:])
    return None if "," in behind else texts[at - 1]


def _outside_of_brackets(texts: Sequence[str]) -> list[str]:
    """Returns texts outside of brackets; of brackets the opening one only."""
    outer = []
    depth = 0
    for text in texts:
        change = _BRACKETS.get(text, 0)
        if depth == 0 and change >= 0:
            outer.append(text)
        depth += change
    return outer
