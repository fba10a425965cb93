"""Function constants: `constant bool x [[function_constant(0)]];`.

Their values are given by index or name, or by a definition `constant bool x = true;`
later in the text.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from metal_emulator.language.declaration import STATEMENT_ENDS, plain_type
from metal_emulator.language.tokens import Tokens

Value = bool | int | float | Sequence["bool | int | float"]
"""The value of a constant: a number, or as many as a vector has components."""

_LITERAL = re.compile(r"-?(true|false|0[xX][0-9a-fA-F]+|\d[\d.]*)[uUlLfF]*")
_INTEGER = re.compile(
    r"(?P<unsigned>u?)(?P<name>char|short|int(8|16|32|64)_t|int|long)"
)
_BITS = {"char": 8, "short": 16, "int": 32, "long": 64}
_FLOATING = frozenset({"half", "float", "bfloat"})
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+(.+?)[ \t]*(?://.*)?$", re.M)
_VECTOR = re.compile(r"(?P<scalar>[a-z]+)(?P<size>[234])")


@dataclass(frozen=True)
class FunctionConstant:
    """A function constant of a text."""

    name: str  # The name
    type: str  # Its type, as `plain_type`
    index: int | None  # Its index, or None if it is no sum of numbers and macros
    begin: int  # The token `constant`
    attribute: int  # The `[` of its attribute

    def __str__(self) -> str:
        index = "" if self.index is None else f" ({self.index})"
        return f"{self.name}{index}: {self.type}"

    def literal(self, value: Value) -> str:
        """Returns a value as Metal text."""
        vector = _VECTOR.fullmatch(self.type)
        if not vector:
            return self._scalar(self.type, value)
        parts = value if isinstance(value, Sequence) else ()
        if len(parts) != int(vector["size"]):
            raise ValueError(
                f"constant {self.name}={value!r}, expected {vector['size']} numbers "
                f"({self.type})"
            )
        scalars = (self._scalar(vector["scalar"], part) for part in parts)
        return f"{self.type}({', '.join(scalars)})"

    def _scalar(self, kind: str, value: object) -> str:
        if kind == "bool" and value in (False, True):
            return str(bool(value)).lower()
        if isinstance(value, int) and value in _range(kind):
            return str(int(value))
        if kind in _FLOATING and isinstance(value, float | int):
            with contextlib.suppress(OverflowError):  # an integer beyond all floats
                return f"{kind}({_float(float(value))})"
        raise ValueError(
            f"constant {self.name}={value!r}, expected a value of {self.type}"
        )


def _float(value: float) -> str:
    """Returns a number as Metal text."""
    if math.isnan(value):
        return "NAN"
    return repr(value).replace("inf", "INFINITY")


def _range(kind: str) -> range:
    """Returns the values of a type of integers; none for other types."""
    found = _INTEGER.fullmatch(kind)
    if found is None:
        return range(0)
    bits = int(found[3] or _BITS[found["name"]])
    return (
        range(2**bits)
        if found["unsigned"]
        else range(-(2 ** (bits - 1)), 2 ** (bits - 1))
    )


def function_constants(tokens: Tokens) -> Iterator[FunctionConstant]:
    """Yields the function constants that a text declares."""
    macros: dict[str, str] | None = None
    for at in range(len(tokens)):
        opening = tokens.before(tokens.before(at))
        # `[[buffer(0), function_constant(x)]]` is the attribute of a parameter.
        if tokens.text(at) != "function_constant" or tokens.text(opening) != "[":
            continue
        begin = _statement_begin(tokens, at)
        follower = tokens.after(tokens.closing(opening))
        if tokens.text(begin) != "constant" or tokens.text(follower) != ";":
            continue
        if macros is None:
            macros = dict(_MACRO.findall(tokens.read(0, len(tokens))))
        name = tokens.before(opening)
        bracket = tokens.after(at)
        index = tokens.read_line(bracket + 1, tokens.closing(bracket))
        kind = tokens.read_line(begin + 1, name).removeprefix("const ")
        yield FunctionConstant(
            tokens.text(name), plain_type(kind), _sum(index, macros), begin, opening
        )


def _sum(text: str, macros: Mapping[str, str], depth: int = 8) -> int | None:
    """Returns the value of a sum of numbers and macros, or None for other text."""
    terms = [term.strip() for term in text.strip("() ").split("+")]
    total = 0
    for term in terms:
        found = int(term) if re.fullmatch(r"\d+", term) else None
        if found is None and term in macros and depth:
            found = _sum(macros[term], macros, depth - 1)
        if found is None:
            return None
        total += found
    return total


def give(tokens: Tokens, constants: Mapping[str | int, Value]) -> None:
    """Writes the values of constants into a text."""
    known = list(function_constants(tokens))
    chosen: dict[str, str] = {}
    for key, value in constants.items():
        found = [each for each in known if key in (each.name, each.index)]
        if not found:
            names = ", ".join(map(str, known)) or "none"
            raise ValueError(f"constant {key!r}, expected one of the text: {names}")
        for each in found:
            if each.name in chosen:
                raise ValueError(f"constant {each.name} is given by name and by index")
            chosen[each.name] = each.literal(value)
    definitions = dict(_definitions(tokens)) if chosen else {}
    for each in known:
        if each.name in chosen:
            _set(tokens, each, chosen[each.name], definitions)


def specialise(tokens: Tokens) -> None:
    """Rewrites the function constants of a text, and queries for their values.

    A literal value moves to the declaration, since it may initialise other constants.
    Without one the declaration becomes extern: a kernel that uses a constant without a
    definition does not link.
    """
    declared = list(function_constants(tokens))
    queries = [
        at
        for at in range(len(tokens))
        if tokens.text(at) == "is_function_constant_defined"
    ]
    definitions = dict(_definitions(tokens)) if declared or queries else {}
    for at in queries:
        _replace_query(tokens, at, definitions)
    for constant in declared:
        value = _value(tokens, definitions.get(constant.name))
        if _LITERAL.fullmatch(value):
            _set(tokens, constant, value, definitions)
            continue
        end = tokens.closing(constant.attribute)
        tokens.blank_range(constant.attribute, end + 1)
        begin = tokens[constant.begin]
        begin.written = f"extern {begin.written}"


def _value(tokens: Tokens, sign: int | None) -> str:
    """Returns the value behind a `=`, or "" without one."""
    if sign is None:
        return ""
    return tokens.read_line(sign + 1, _semicolon(tokens, sign))


def _semicolon(tokens: Tokens, at: int) -> int:
    while tokens.text(at) not in (";", ""):
        at = tokens.after(at)
    return at


def _set(
    tokens: Tokens, constant: FunctionConstant, value: str, definitions: dict[str, int]
) -> None:
    """Writes a value where the constant is declared, and blanks its definition."""
    end = tokens.closing(constant.attribute)
    tokens.blank_range(constant.attribute, end + 1)
    tokens[constant.attribute].written = f"= {value}"
    if sign := definitions.get(constant.name):
        begin = _statement_begin(tokens, sign)
        tokens.blank_range(begin, _semicolon(tokens, sign) + 1)


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


def unset_message(text: str, loader: str) -> str:
    """Returns that a function constant lacks its value, or "" if none is missing."""
    for constant in function_constants(Tokens(text)):
        # A name in a namespace has its length before it.
        if re.search(rf"(\b|_|\d){re.escape(constant.name)}(\b|E)", loader):
            key = constant.name if constant.index is None else constant.index
            return (
                f"uses the function constant {constant}, which has no value: expected "
                f"constants={{{key!r}: ...}}, or --constant {constant.name}=..."
            )
    return ""
