"""Random initializers: a value, or an error; the process lives."""

from collections.abc import Callable
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


class Expression:
    """A C++ expression of int, and its value or why it has none."""

    def __init__(self, text: str, value: Callable[[], int]) -> None:
        self.text = text
        try:
            self.value: int | ArithmeticError | IndexError = value()
        except (ArithmeticError, IndexError) as error:
            self.value = error

    def __repr__(self) -> str:
        return f"{self.text} = {self.value!r}"

    def get(self) -> int:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


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


OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: fitting(a + b),
    "-": lambda a, b: fitting(a - b),
    "*": lambda a, b: fitting(a * b),
    "/": quotient,
    "%": lambda a, b: a - b * quotient(a, b),
}


def literals() -> st.SearchStrategy[Expression]:
    numbers = st.one_of(st.integers(-2, 8), st.integers(-(2**31) + 1, 2**31 - 1))
    return numbers.map(lambda n: Expression(f"({n})", lambda: n))


def larger(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    operations = st.builds(
        lambda a, operator, b: Expression(
            f"({a.text} {operator} {b.text})",
            lambda: OPERATORS[operator](a.get(), b.get()),
        ),
        inner,
        st.sampled_from(sorted(OPERATORS)),
        inner,
    )
    elements = inner.map(
        lambda at: Expression(f"table[{at.text}]", lambda: element(at.get()))
    )
    choices = st.builds(
        lambda a, b, c: Expression(
            f"({a.text} ? {b.text} : {c.text})", lambda: b.get() if a.get() else c.get()
        ),
        *(inner, inner, inner),
    )
    return st.one_of(operations, elements, choices)


EXPRESSIONS = st.recursive(literals(), larger, max_leaves=6)


@drawn(12, 75, expression=EXPRESSIONS)
def test_an_initializer_has_its_value_or_is_refused(expression: Expression) -> None:
    """Clang wraps what overflows; that runs nothing either."""
    header = f"{HEADER}constant int value = {expression.text};\n"
    allowed: AbstractContextManager[object] = pytest.raises(
        metal_emulator.CompileError, match="program scope"
    )
    if isinstance(expression.value, int):
        allowed = nullcontext()
    elif isinstance(expression.value, OverflowError):
        allowed = suppress(metal_emulator.CompileError)
    with allowed:
        out = each_thread("value", header=header, dtype=mx.int32)
        if isinstance(expression.value, int):
            assert out[0] == expression.value
