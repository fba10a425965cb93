"""Function constants: `constant bool x [[function_constant(0)]];`.

A definition `constant bool x = true;` later in the text sets the value.
"""

from __future__ import annotations

from collections.abc import Iterator

from mlx_marlin.emulator.language.declaration import STATEMENT_ENDS
from mlx_marlin.emulator.language.tokens import Tokens


def declare(tokens: Tokens, at: int) -> None:
    """Rewrites the constant with the attribute at `at` to an extern declaration.

    A kernel that uses a constant without a definition does not link.
    """
    opening = tokens.before(tokens.before(at))
    if tokens.text(opening) != "[":  # in `[[buffer(0), function_constant(x)]]`
        return
    begin = _statement_begin(tokens, at)
    end = tokens.closing(opening)
    if tokens.text(begin) == "constant" and tokens.text(tokens.after(end)) == ";":
        tokens.blank_range(opening, end + 1)
        tokens[begin].written = f"extern {tokens[begin].written}"


def replace_query(tokens: Tokens, at: int) -> None:
    """Replaces `is_function_constant_defined(x)` by true or false."""
    opening = tokens.after(at)
    name = tokens.text(tokens.after(opening))
    tokens.blank_range(at, tokens.closing(opening) + 1)
    tokens[at].written = str(any(_definitions(tokens, name))).lower()


def _definitions(tokens: Tokens, name: str) -> Iterator[bool]:
    """Yields for every assignment to `name` whether it defines a constant."""
    for at in range(len(tokens)):
        sign = tokens.after(at)
        is_comparison = tokens.text(sign + 1) == "="
        if tokens.text(at) == name and tokens.text(sign) == "=" and not is_comparison:
            yield tokens.text(_statement_begin(tokens, at)) == "constant"


def _statement_begin(tokens: Tokens, at: int) -> int:
    """Returns the `constant` before a name, or the end of the previous statement."""
    while tokens.text(at) not in {"constant", *STATEMENT_ENDS}:
        at = tokens.before(at)
    return at
