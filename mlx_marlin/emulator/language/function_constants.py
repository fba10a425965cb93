"""Function constants: `constant bool x [[function_constant(0)]];`.

Their value is that of a definition `constant bool x = true;` further down in the text.
"""

from __future__ import annotations

from collections.abc import Iterator

from mlx_marlin.emulator.language.declaration import STATEMENT_ENDS
from mlx_marlin.emulator.language.tokens import Tokens


def declare(tokens: Tokens, at: int) -> None:
    """Makes a declaration of what has the attribute at `at`.

    Without a definition, the kernel links only as long as it does not use it.
    """
    opening = tokens.before(tokens.before(at))
    if tokens.text(opening) != "[":  # in `[[buffer(0), function_constant(x)]]`
        return
    begin = _statement_begin(tokens, at)
    end = tokens.closing(opening)
    if tokens.text(begin) == "constant" and tokens.text(tokens.after(end)) == ";":
        for gone in range(opening, end + 1):
            tokens.blank(gone)
        tokens[begin].written = f"extern {tokens[begin].written}"


def replace_query(tokens: Tokens, at: int) -> None:
    """Replaces `is_function_constant_defined(x)` by whether x has a value."""
    opening = tokens.after(at)
    name = tokens.text(tokens.after(opening))
    for gone in range(at, tokens.closing(opening) + 1):
        tokens.blank(gone)
    tokens[at].written = str(any(_gives_value(tokens, name))).lower()


def _gives_value(tokens: Tokens, name: str) -> Iterator[bool]:
    for at in range(len(tokens)):
        sign = tokens.after(at)
        compared = tokens.text(sign + 1) == "="
        if tokens.text(at) == name and tokens.text(sign) == "=" and not compared:
            yield tokens.text(_statement_begin(tokens, at)) == "constant"


def _statement_begin(tokens: Tokens, at: int) -> int:
    """The `constant` before a name, or what ends the statement before."""
    while tokens.text(at) not in {"constant", *STATEMENT_ENDS}:
        at = tokens.before(at)
    return at
