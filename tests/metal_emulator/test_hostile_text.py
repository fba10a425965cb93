"""Random initializers and compile bombs: a value, or an error; the process lives."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress

import mlx.core as mx
import pytest
from hypothesis import strategies as st

import metal_emulator
from metal_emulator.compiling import limited
from support.marks import needs_emulator
from support.metal_sources import each_thread, run
from support.profiles import drawn

pytestmark = needs_emulator
TABLE = (3, -7, 0, 2**31 - 1, -(2**31), 11)
HEADER = (
    f"constant int table[{len(TABLE)}] = {{{', '.join(map(str, TABLE))}}};\n"
    "constexpr int recursive(int n) { return n <= 0 ? 0 : 1 + recursive(n - 1); }\n"
)


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


@drawn(25, 75, expression=EXPRESSIONS)
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


RUNNING = ("recursive(1000000000)", "spin()", "*(constant int*)0", "value + 1", "seed")


@pytest.mark.parametrize("expression", RUNNING)
def test_an_initializer_that_would_run_is_refused(expression: str) -> None:
    header = f"{HEADER}int spin() {{ while (true) {{}} }}\nextern constant int seed;\n"
    with pytest.raises(metal_emulator.CompileError):
        each_thread("value", header=f"{header}constant int value = {expression};\n")


def templates(size: int) -> tuple[str, str]:
    header = (
        "template <long A, int N> struct F { static constexpr constant int v ="
        " F<2 * A, N - 1>::v + F<2 * A + 1, N - 1>::v; };\n"
        "template <long A> struct F<A, 0> { static constexpr constant int v = 1; };\n"
    )
    return header, f"out[0] = F<0, {size}>::v;"


def macros(size: int) -> tuple[str, str]:
    doubled = (f"#define M{n} M{n - 1}+M{n - 1}\n" for n in range(1, size + 1))
    return f"#define M0 1\n{''.join(doubled)}", f"out[0] = M{size};"


def arrays(size: int) -> tuple[str, str]:
    return f"constant int t[1 << {size % 31}] = {{1}};\n", "out[0] = t[int(out[1])];"


def private_arrays(size: int) -> tuple[str, str]:
    array = f"float t[1 << {size % 31}]"
    return "", f"{array}; t[int(out[1])] = 1; out[0] = t[int(out[2])];"


def nested(size: int) -> tuple[str, str]:
    return "", f"out[0] = {'(' * 8 * size}1{')' * 8 * size};"


def steps(size: int) -> tuple[str, str]:
    header = "constexpr int f(int n) { int s = 0; for (int i = 0; i < n; ++i) ++s; "
    return (
        f"{header}return s; }}\n",
        f"constexpr int s = f(1 << {size % 31}); out[0] = s;",
    )


BOMBS = (templates, macros, arrays, private_arrays, nested, steps)


@pytest.fixture(scope="module")
def limits() -> Iterator[None]:
    for trace in (False, True):  # what all kernels share is built before
        with metal_emulator.emulated(trace=trace):
            each_thread("1.0f")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limited, "SECONDS", 1)
        patch.setattr(limited, "MEMORY_BYTES", 1 << 30)
        patch.setattr(limited, "FILE_BYTES", 16 << 20)
        yield


@pytest.mark.usefixtures("limits")
@drawn(
    15,
    40,
    bomb=st.sampled_from(BOMBS),
    size=st.integers(0, 40),
    how=st.sampled_from(["run", "traced", "checked"]),
)
def test_a_bomb_of_any_size_ends(
    bomb: Callable[[int], tuple[str, str]], size: int, how: str
) -> None:
    header, body = bomb(size)
    with suppress(metal_emulator.EmulatorError):
        if how == "checked":
            kernel = f"kernel void f(device float* out [[buffer(0)]]) {{ {body} }}"
            metal_emulator.check_text(header + kernel)
        else:
            with metal_emulator.emulated(trace=how == "traced"):
                run(body, header=header, init_value=0)
