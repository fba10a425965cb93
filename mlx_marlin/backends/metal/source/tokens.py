"""Tokenizer of Metal text: tokens, directives, line breaks and necessary spaces.

It covers the language of `shaders/`, which has no raw strings.
"""

import re
from collections.abc import Iterable
from functools import cache

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

Item = tuple[str, str]
"""Kind and text of a token, a directive, a line break or a necessary space."""
BETWEEN = ("newline", "space")
"""Kinds of items that are no part of a declaration's tokens."""


@cache
def _token() -> re.Pattern[str]:
    """Returns the compiled pattern; compiling it at import would take a millisecond."""
    return re.compile(_TOKEN, re.DOTALL | re.VERBOSE)


def items_of(text: str) -> list[Item]:
    """Returns the items of a text; of spaces only those that tokens need between them.

    Directives keep one space wherever they have any, because a space before the
    parameters of a macro is significant.
    """
    items: list[Item] = []
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
            # All words need the same spaces; one shape keeps the cache of pairs small.
            shape = "a" if kind == "word" else word
            needed = previous and (spaced or space)
            if directive or (word == "#" and not previous):
                directive += f" {word}" if needed else word
            else:
                if needed and _need_space(previous, shape):
                    items.append(("space", " "))
                items.append((kind, word))
            previous, spaced = shape, False
    if directive:
        items.append(("directive", directive))
    return items


def identifiers(items: Iterable[Item]) -> frozenset[str]:
    """Returns all identifiers, including those in directives."""
    items = list(items)
    words = {text for kind, text in items if kind == "word"}
    for kind, text in items:
        if kind == "directive":
            words.update(re.findall(_WORD, text))
    return frozenset(words)


@cache
def _need_space(first: str, second: str) -> bool:
    """Returns whether two tokens need a space between them."""
    pair = first[-1] + second[0]
    if re.fullmatch(r"[\w\"']{2}|\.\.", pair):
        return True
    found = _token().match(first + second)
    return found is not None and found.end() > len(first)
