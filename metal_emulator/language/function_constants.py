"""Function constants: `constant bool x [[function_constant(0)]];`.

A definition `constant bool x = true;` later in the text sets the value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from metal_emulator.language.declaration import STATEMENT_ENDS
from metal_emulator.language.tokens import Tokens

_LITERAL = re.compile(r"-?(true|false|0[xX][0-9a-fA-F]+|\d[\d.]*)[uUlLfF]*")


def specialise(tokens: Tokens) -> None:
    """Rewrites the function constants of a text, and queries for their values."""
    declared, queries = (
        [at for at in range(len(tokens)) if tokens.text(at) == word]
        for word in ("function_constant", "is_function_constant_defined")
    )
    definitions = dict(_definitions(tokens)) if declared or queries else {}
    for at in queries:
        _replace_query(tokens, at, definitions)
    for at in declared:
        _declare(tokens, at, definitions)


def _declare(tokens: Tokens, at: int, definitions: dict[str, int]) -> None:
    """Rewrites the constant with the attribute at `at`.

    A literal value moves there, since it may initialise other constants. Without one
    the declaration becomes extern: a kernel that uses a constant without a definition
    does not link.
    """
    opening = tokens.before(tokens.before(at))
    if tokens.text(opening) != "[":  # in `[[buffer(0), function_constant(x)]]`
        return
    begin = _statement_begin(tokens, at)
    end = tokens.closing(opening)
    if tokens.text(begin) != "constant" or tokens.text(tokens.after(end)) != ";":
        return
    name = tokens.text(tokens.before(opening))
    tokens.blank_range(opening, end + 1)
    sign = semicolon = definitions.get(name, at)
    while tokens.text(semicolon) not in (";", ""):
        semicolon = tokens.after(semicolon)
    value = tokens.read_line(sign + 1, semicolon)
    if _LITERAL.fullmatch(value):
        tokens[opening].written = f"= {value}"
        tokens.blank_range(_statement_begin(tokens, sign), semicolon + 1)
    else:
        tokens[begin].written = f"extern {tokens[begin].written}"


def _replace_query(tokens: Tokens, at: int, definitions: dict[str, int]) -> None:
    """Replaces `is_function_constant_defined(x)` by true or false."""
    opening = tokens.after(at)
    name = tokens.text(tokens.after(opening))
    tokens.blank_range(at, tokens.closing(opening) + 1)
    tokens[at].written = str(name in definitions).lower()


def _definitions(tokens: Tokens) -> Iterator[tuple[str, int]]:
    """Yields the name of every constant with a value, and the `=` before that."""
    for sign in range(len(tokens)):
        if tokens.text(sign) != "=" or tokens.text(sign + 1) == "=":
            continue
        name = tokens.before(sign)
        if tokens.text(_statement_begin(tokens, name)) == "constant":
            yield tokens.text(name), sign


def _statement_begin(tokens: Tokens, at: int) -> int:
    """Returns the `constant` before a name, or the end of the previous statement."""
    while tokens.text(at) not in {"constant", *STATEMENT_ENDS}:
        at = tokens.before(at)
    return at
