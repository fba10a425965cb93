"""Removes from Metal text what the compiler does not need.

MLX joins the text of a kernel at each call and hashes it at each evaluation, so each
byte costs time on the host. Comments, needless white space and unused definitions are
removed. Line breaks stay, so that every remaining token keeps its line number.

The tokenizer covers the language of `shaders/`: it does not know raw strings.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

_TOKEN = r"""
    (?P<space>[ \t\r\f\v]*)
    (?:(?P<word>[A-Za-z_]\w*)
    |(?P<newline>\n)
    |(?P<continuation>\\\n)
    |(?P<comment>//(?:\\\n|[^\n])*|/\*.*?(?:\*/|\Z))
    |(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<number>\.?\d(?:[eEpP][+-]|'(?=\w)|[\w.])*)
    |(?P<operator><<=|>>=|\.\.\.|->\*|->|\+\+|--|<<|>>|&&|\|\||::|\#\#|<:|<%|%:
        |[-+*/%&|^=!<>]=|.))
"""
_WORD = r"[A-Za-z_]\w*"
_ANGLES = {"<": 1, ">": -1, ">>": -2}
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_BEHIND_NAME = frozenset({"(", "=", "[", "{", ";"})
_CLOSING = frozenset(")]}")
_CLASSES = frozenset({"struct", "class", "union"})
_UNNAMED = frozenset(
    {"__attribute__", "alignas", "asm", "decltype", "enum", "extern", "friend"}
    | {"namespace", "operator", "static_assert", "typedef"}
)
"""Words of declarations whose names are not looked for: such declarations stay."""

_Item = tuple[str, str]
"""The kind and the text of a token, a directive, a line break or a necessary space."""
_BETWEEN = ("newline", "space")


class _Piece(NamedTuple):
    """A declaration outside of all braces, a directive, or a line break.

    Attributes:
        text: Without comments and needless white space.
        name: The name that it declares; None if it always stays.
        words: All identifiers in it.
        parameters: Of a function, the identifiers that occur in the list of parameters
            and not before it.
        is_class: Whether it declares a class.
    """

    text: str
    name: str | None
    words: frozenset[str]
    parameters: frozenset[str] = frozenset()
    is_class: bool = False


@cache
def _token() -> re.Pattern[str]:
    """Returns the compiled pattern; compiling it would take a millisecond of import."""
    return re.compile(_TOKEN, re.DOTALL | re.VERBOSE)


def stripped(text: str) -> str:
    """Returns a text without comments and needless white space, with all its lines."""
    return "".join([word for _, word in _items(text)])


def lean(files: Sequence[str], body: str) -> str:
    """Returns the declarations of files that a kernel's body uses, stripped.

    A declaration stays if its name occurs in the body, in a directive or in another
    declaration that stays. All overloads and specializations of a name stay, except
    overloads with a parameter of one of the files' classes that nothing else mentions:
    no value of such a class exists. A declaration that is removed leaves its line
    breaks.

    Args:
        files: Texts of declarations.
        body: The text that uses them.

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
    """Returns the pieces that a body uses, directly or through others."""
    classes = {piece.name for piece in pieces if piece.is_class}
    used = set(_words(_items(body)))
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


def _words(items: Iterable[_Item]) -> frozenset[str]:
    """Returns all identifiers, also those in directives."""
    items = list(items)
    words = {text for kind, text in items if kind == "word"}
    for kind, text in items:
        if kind == "directive":
            words.update(re.findall(_WORD, text))
    return frozenset(words)


def _items(text: str) -> list[_Item]:
    """Returns tokens, directives, line breaks, and spaces between tokens that need one.

    Directives keep one space wherever they have any, because a space before the
    parameters of a macro has a meaning.
    """
    items: list[_Item] = []
    directive = ""
    previous, spaced = "", False
    for found in _token().finditer(text):
        kind = found.lastgroup or ""
        space, word = found.group("space", kind)
        if kind == "newline":
            if directive:
                items.append(("directive", directive))
            items.append((kind, word))
            directive, previous, spaced = "", "", False
        elif kind in ("comment", "continuation"):
            spaced = spaced or bool(space) or kind == "comment"
            breaks = "\n" * word.count("\n")
            if directive:
                directive += breaks.replace("\n", "\\\n")
            elif kind == "continuation":
                items.append(("newline", word))
            elif breaks:
                items.append(("newline", breaks))
                previous = ""
        else:
            # All words need the same space, which keeps the cache of pairs small.
            shape = "a" if kind == "word" else word
            needed = previous and (spaced or space)
            if directive or (word == "#" and not previous):
                directive += f" {word}" if needed else word
            else:
                if needed and _must_be_apart(previous, shape):
                    items.append(("space", " "))
                items.append((kind, word))
            previous, spaced = shape, False
    if directive:
        items.append(("directive", directive))
    return items


@cache
def _must_be_apart(first: str, second: str) -> bool:
    """Returns whether two tokens would be read differently without space."""
    pair = first[-1] + second[0]
    if re.fullmatch(r"[\w\"']{2}|\.\.", pair):
        return True
    found = _token().match(first + second)
    return found is not None and found.end() > len(first)


@cache
def _pieces(text: str) -> tuple[_Piece, ...]:
    """Returns the declarations of a text and what stands between them."""
    items = _items(text)
    pieces = []
    at = 0
    while at < len(items):
        if items[at][0] in ("newline", "space", "directive"):
            part = items[at : at + 1]
            pieces.append(_Piece(part[0][1], None, _words(part)))
        else:
            part = items[at : _last(items, at) + 1]
            pieces.append(_declaration(part))
        at += len(part)
    return tuple(pieces)


def _declaration(part: Sequence[_Item]) -> _Piece:
    name = _name(part)
    text = "".join([word for _, word in part])
    head = _after_template(part, 0)
    if name is None or _is_class(part, head):
        return _Piece(text, name, _words(part), is_class=name is not None)
    return _Piece(text, name, _words(part), _parameters(part, name))


def _parameters(part: Sequence[_Item], name: str) -> frozenset[str]:
    """Returns the words of a function's parameters that do not occur before them."""
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
    return _words(part[opening:end]) - _words(part[:opening])


def _last(items: Sequence[_Item], start: int) -> int:
    """Returns the last item of the declaration that begins at `start`.

    An unfinished declaration has all items.
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


def _after_template(items: Sequence[_Item], at: int) -> int:
    """Returns the first item behind `template <...>`, or the last one of all."""
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


def _following(items: Sequence[_Item], at: int) -> int:
    """Returns the next token or directive, or the last item."""
    at += 1
    while at < len(items) and items[at][0] in _BETWEEN:
        at += 1
    return min(at, len(items) - 1)


def _is_class(items: Sequence[_Item], at: int) -> bool:
    """Returns whether a class is declared, rather than what has its type."""
    name = _following(items, at)
    behind = items[_following(items, name)][1]
    return items[at][1] in _CLASSES and behind in ("{", "<", ":", ";")


def _name(part: Sequence[_Item]) -> str | None:
    """Returns the name that a declaration declares, None if it has to stay."""
    items = [
        item for item in part[_after_template(part, 0) :] if item[0] not in _BETWEEN
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
    several = texts[-1] == ";" and "," in _outside_of_brackets(texts[at:])
    return None if several else texts[at - 1]


def _is_complete(texts: Sequence[str]) -> bool:
    """Returns whether a declaration has its end and as many brackets as it opens."""
    ends = texts[-1:] in (["}"], [";"]) and texts[0] not in _CLOSING
    return ends and sum(_BRACKETS.get(text, 0) for text in texts) == 0


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
