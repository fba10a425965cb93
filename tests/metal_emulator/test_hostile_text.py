"""Random initializers: a value, or an error; the process lives."""

from contextlib import AbstractContextManager, nullcontext, suppress

import mlx.core as mx
import pytest
from hypothesis import strategies as st

import metal_emulator
from support.marks import needs_emulator
from support.metal_sources import each_thread
from support.profiles import drawn

pytestmark = needs_emulator
TABLE = (3, -7, 0, 2**31 - 1, -(2**31), 11)
HEADER = f"constant int table[{len(TABLE)}] = {{{', '.join(map(str, TABLE))}}};\n"


Expression = tuple[str, str]
"""An expression of int in C++, and in Python, which raises if it has no value."""


def fitting(value: int) -> int:
    if not -(2**31) <= value < 2**31:
        raise OverflowError
    return value


def quotient(a: int, b: int) -> int:
    return fitting(abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1))


def element(at: int) -> int:
    if at < 0:
        raise IndexError
    return TABLE[at]


OPERATORS = {
    "+": "fitting({} + {})",
    "-": "fitting({} - {})",
    "*": "fitting({} * {})",
    "/": "quotient({}, {})",
    "%": "({0} - {1} * quotient({0}, {1}))",
}


def literals() -> st.SearchStrategy[Expression]:
    numbers = st.one_of(st.integers(-2, 8), st.integers(-(2**31) + 1, 2**31 - 1))
    return numbers.map(lambda n: (f"({n})", f"({n})"))


def larger(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    operations = st.builds(
        lambda a, sign, b: (
            f"({a[0]} {sign} {b[0]})",
            OPERATORS[sign].format(a[1], b[1]),
        ),
        *(inner, st.sampled_from(sorted(OPERATORS)), inner),
    )
    elements = inner.map(lambda at: (f"table[{at[0]}]", f"element({at[1]})"))
    choices = st.builds(
        lambda a, b, c: (
            f"({a[0]} ? {b[0]} : {c[0]})",
            f"({b[1]} if {a[1]} else {c[1]})",
        ),
        *(inner, inner, inner),
    )
    return st.one_of(operations, elements, choices)


EXPRESSIONS = st.recursive(literals(), larger, max_leaves=6)


@drawn(20, expression=EXPRESSIONS)
def test_an_initializer_has_its_value_or_is_refused(expression: Expression) -> None:
    """Clang wraps what overflows; that runs nothing either."""
    text, python = expression
    header = f"{HEADER}constant int value = {text};\n"
    allowed: AbstractContextManager[object] = nullcontext()
    value = None
    try:
        value = eval(python)
    except OverflowError:
        allowed = suppress(metal_emulator.CompileError)
    except (ArithmeticError, IndexError):
        allowed = pytest.raises(metal_emulator.CompileError, match="program scope")
    with allowed:
        out = each_thread("value", header=header, dtype=mx.int32)
        assert value is None or out[0] == value
