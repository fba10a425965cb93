"""Metal text to C++ text, token by token, line by line.

Clang reads most of Metal as C++ once the shim headers are in front of it. What it does
not read is rewritten here: constructors and casts of vectors, threadgroup variables,
literals of half and bfloat. No rewrite adds or removes a line break, so every message of
the compiler and every debug line is a line of the Metal text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mlx_marlin.emulator.errors import CompileError

_TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/|\\\n)
  | (?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
  | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<mark>::|->|\[\[|\]\]|.)
    """,
    re.VERBOSE | re.DOTALL,
)

_ELEMENTS = "bool char uchar short ushort int uint long ulong half bfloat float".split()
_VECTORS = frozenset(
    f"{packed}{element}{size}"
    for packed in ("", "packed_")
    for element in _ELEMENTS
    for size in (2, 3, 4)
)
_VECTOR_TEMPLATES = frozenset({"vec", "packed_vec"})
_HALF = re.compile(r"(?P<digits>(?!0[xX]).*?)(?P<suffix>[hH]|bf|BF)$")
_OPENING = {"(": ")", "[": "]", "{": "}"}
_QUALIFIERS = "const volatile device constant threadgroup thread".split()
_SPACES = frozenset({"device", "threadgroup", "thread"})
_TYPE_WORDS = frozenset([*_ELEMENTS, *_QUALIFIERS, "size_t", "auto", "unsigned"])
_NOT_A_CAST = frozenset({"sizeof", "alignof", "decltype", "operator"})


@dataclass
class Token:
    """A piece of text and what becomes of it.

    Attributes:
        kind: space, text, number, name or mark.
        text: As read; the rules look at this only.
        written: As written out.
    """

    kind: str
    text: str
    written: str


def tokens_of(text: str) -> list[Token]:
    """Cuts `text`; the pieces put together give it back."""
    return [Token(m.lastgroup or "", m[0], m[0]) for m in _TOKEN.finditer(text)]


class _Cursor:
    """Steps over tokens that mean something."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens

    def after(self, at: int) -> int:
        at += 1
        while at < len(self.tokens) and self.tokens[at].kind == "space":
            at += 1
        return at

    def before(self, at: int) -> int:
        at -= 1
        while at >= 0 and self.tokens[at].kind == "space":
            at -= 1
        return at

    def text(self, at: int) -> str:
        return self.tokens[at].text if 0 <= at < len(self.tokens) else ""

    def closing(self, at: int) -> int:
        """The bracket that closes the one at `at`, or the end."""
        wanted = [_OPENING[self.text(at)]]
        while wanted and at < len(self.tokens) - 1:
            at += 1
            word = self.text(at)
            if word in _OPENING and self.tokens[at].kind == "mark":
                wanted.append(_OPENING[word])
            elif word == wanted[-1]:
                wanted.pop()
        return at

    def closing_angle(self, at: int) -> int:
        """The `>` that closes the `<` at `at`, or -1 if it is a comparison."""
        depth = 1
        while at < len(self.tokens) - 1:
            at += 1
            word = self.text(at)
            if word in "([" and word:
                at = self.closing(at)
            elif word == "<":
                depth += 1
            elif word == ">":
                depth -= 1
                if depth == 0:
                    return at
            elif word in (";", "{", "}"):
                return -1
        return -1

    def line_end(self, at: int) -> int:
        """The space with which the line of a directive ends."""
        while at < len(self.tokens) - 1:
            at += 1
            if self.tokens[at].kind == "space" and self.text(at).startswith("\n"):
                break
        return at

    def items(self, opening: int, closing: int) -> Iterator[int]:
        """First tokens of the items of a bracketed list."""
        yield self.after(opening)
        at = self.after(opening)
        while at < closing:
            if self.text(at) == ",":
                yield self.after(at)
            at = self.after(self.closing(at) if self.text(at) in _OPENING else at)

    def read(self, begin: int, end: int) -> str:
        return "".join(token.text for token in self.tokens[begin:end])


def _aliases(cursor: _Cursor) -> Iterator[str]:
    """Names that may stand for a vector: aliases and template parameters."""
    for at, token in enumerate(cursor.tokens):
        if token.text in ("using", "typename", "class"):
            name = cursor.after(at)
            follower = cursor.text(cursor.after(name))
            wanted = ("=",) if token.text == "using" else (",", ">", "=")
            if follower in wanted and name < len(cursor.tokens):
                yield cursor.text(name)
        elif token.text == "typedef":
            end = at
            while cursor.text(end) not in (";", ""):
                end += 1
            yield cursor.text(cursor.before(end))


def _type_end(cursor: _Cursor, at: int, types: frozenset[str]) -> int:
    """Where a vector type that begins at `at` ends (its last token), or -1."""
    word = cursor.text(at)
    if word == "metal" and cursor.text(cursor.after(at)) == "::":
        return _type_end(cursor, cursor.after(cursor.after(at)), types)
    if word in _VECTOR_TEMPLATES:
        angle = cursor.after(at)
        return cursor.closing_angle(angle) if cursor.text(angle) == "<" else -1
    return at if cursor.tokens[at].kind == "name" and word in types else -1


def _operand_end(cursor: _Cursor, at: int) -> int:
    """Last token of the operand of a cast that begins at `at`."""
    while cursor.text(at) in ("-", "+", "!", "~", "*", "&"):
        at = cursor.after(at)
    end = at
    if cursor.text(at) == "(":
        end = cursor.closing(at)
    while True:
        following = cursor.after(end)
        word = cursor.text(following)
        if word in ("(", "["):
            end = cursor.closing(following)
        elif word in (".", "->", "::"):
            end = cursor.after(following)
        elif word == "<" and cursor.text(end) == "as_type":
            end = cursor.closing_angle(following)
        else:
            return end


def _definitions(cursor: _Cursor) -> Iterator[tuple[int, int, int]]:
    """Functions and classes outside of all braces: first token, `{`, `}`."""
    start = at = cursor.after(-1)
    while at < len(cursor.tokens):
        word = cursor.text(at)
        if word == "#":
            start = at = cursor.after(cursor.line_end(at))
        elif word == "{" and cursor.text(start) not in ("namespace", "extern"):
            end = cursor.closing(at)
            yield start, at, end
            start = at = cursor.after(end)
        elif word in (";", "{", "}"):
            start = at = cursor.after(at)
        else:
            at = cursor.after(at)


def _drop_space_overloads(cursor: _Cursor) -> None:
    """Leaves out functions that differ from an earlier one only in address spaces.

    With one address space they would be the same function twice.
    """
    seen = set()
    for start, brace, end in _definitions(cursor):
        words = [t.text for t in cursor.tokens[start:brace] if t.kind != "space"]
        words = ["const" if word == "constant" else word for word in words]
        head = " ".join(word for word in words if word not in _SPACES)
        head = head.replace("const const", "const")
        if "(" in head and head in seen:
            for token in cursor.tokens[start : end + 1]:
                token.written = "\n" * token.text.count("\n")
                token.kind, token.text = "space", token.written
        seen.add(head)


class _Rewriter:
    """One pass over the tokens; every rule looks at one position."""

    def __init__(self, text: str) -> None:
        self.cursor = _Cursor(tokens_of(text))
        self.types = _VECTORS | frozenset(_aliases(self.cursor))

    def run(self) -> str:
        _drop_space_overloads(self.cursor)
        tokens = self.cursor.tokens
        for at in range(len(tokens)):
            kind, text = tokens[at].kind, tokens[at].text
            if kind == "number":
                self._literal(at)
            elif text == "threadgroup":
                self._threadgroup_variable(at)
            elif text == "static_cast":
                tokens[at].written = "emu::cast"
            elif kind == "name":
                self._constructor(at)
            elif text == "(":
                self._cast(at)
        return "".join(token.written for token in tokens)

    def _literal(self, at: int) -> None:
        found = _HALF.match(self.cursor.text(at))
        if found:
            kind = "half" if found["suffix"] in "hH" else "bfloat"
            self.cursor.tokens[at].written = f"{found['digits']}_{kind}"

    def _constructor(self, at: int) -> None:
        cursor = self.cursor
        if cursor.text(cursor.before(at)) in (".", "->", "::", "struct", "class"):
            return
        end = _type_end(cursor, at, self.types)
        if end < 0:
            return
        following = cursor.after(end)
        if cursor.text(following) != "(":
            self._initialised_variable(at, end, following)
        else:
            cursor.tokens[at].written = "emu::make<" + cursor.tokens[at].written
            cursor.tokens[end].written += ">"

    def _initialised_variable(self, at: int, end: int, name: int) -> None:
        """`float4 v(a, b);`, but not the declaration of a function."""
        cursor = self.cursor
        opening = cursor.after(name)
        if name >= len(cursor.tokens) or cursor.tokens[name].kind != "name":
            return
        if cursor.text(opening) != "(" or cursor.text(cursor.after(opening)) == ")":
            return
        closing = cursor.closing(opening)
        if cursor.text(cursor.after(closing)) not in (";", ","):
            return
        if any(self._is_parameter(begin) for begin in cursor.items(opening, closing)):
            return
        kind = cursor.read(at, end + 1)
        cursor.tokens[opening].written = f" = emu::make<{kind}>("

    def _is_parameter(self, at: int) -> bool:
        """Whether a list item begins with a type that is not called."""
        cursor = self.cursor
        end = _type_end(cursor, at, self.types)
        if end < 0 and cursor.text(at) in _TYPE_WORDS:
            end = at
        return end >= 0 and cursor.text(cursor.after(end)) != "("

    def _cast(self, at: int) -> None:
        """`(float4)value`, which clang would take for a change of bits."""
        cursor = self.cursor
        begin = cursor.after(at)
        if begin >= len(cursor.tokens):
            return
        end = _type_end(cursor, begin, self.types)
        if end < 0 or cursor.text(cursor.after(end)) != ")":
            return
        if cursor.text(cursor.before(at)) in _NOT_A_CAST | {">"}:
            return
        if cursor.tokens[cursor.before(at)].kind == "name" and (
            cursor.text(cursor.before(at)) != "return"
        ):
            return
        close = cursor.after(end)
        operand = cursor.after(close)
        if operand >= len(cursor.tokens) or not self._begins_operand(operand):
            return
        last = _operand_end(cursor, operand)
        cursor.tokens[at].written = "emu::make<"
        cursor.tokens[close].written = ">("
        cursor.tokens[last].written += ")"

    def _begins_operand(self, at: int) -> bool:
        token = self.cursor.tokens[at]
        if token.kind == "name":
            return token.text not in ("const", "thread", "volatile")
        return token.kind == "number" or token.text in ("(", "-", "~")

    def _threadgroup_variable(self, at: int) -> None:
        cursor = self.cursor
        previous = cursor.text(cursor.before(at))
        if previous not in ("", "{", "}", ";", ")", ":"):
            return
        declaration = _Declaration.parse(cursor, cursor.after(at))
        if declaration is None:
            return
        tokens = cursor.tokens
        shared = "".join(
            f" {declaration.type} (&{name}){dimensions} = "
            f"emu::threadgroup_variable<{declaration.type} {dimensions}, __COUNTER__>"
            f'("{name}");'
            for name, dimensions in declaration.variables
        )
        breaks = cursor.read(at, declaration.end + 1).count("\n")
        tokens[at].written = " ".join(shared.split("\n")) + "\n" * breaks
        for gone in range(at + 1, declaration.end + 1):
            tokens[gone].written = ""


@dataclass
class _Declaration:
    """`threadgroup type name[dimensions], ...;`."""

    type: str
    variables: list[tuple[str, str]]
    end: int

    @classmethod
    def parse(cls, cursor: _Cursor, begin: int) -> _Declaration | None:
        """None if the text at `begin` declares a pointer or a reference."""
        name = begin
        at = cursor.after(begin)
        while cursor.text(at) not in ("[", ",", ";", "=", ""):
            if cursor.text(at) in ("*", "&", "(", ")", "{"):
                return None
            if cursor.text(at) == "<":
                at = cursor.closing_angle(at)
            name = at
            at = cursor.after(at)
        kind = cursor.read(begin, name).strip()
        if not kind or cursor.text(at) == "=":
            return None
        variables = []
        while True:
            dimensions = ""
            while cursor.text(at) == "[":
                close = cursor.closing(at)
                dimensions += cursor.read(at, close + 1)
                at = cursor.after(close)
            variables.append((cursor.text(name), dimensions))
            if cursor.text(at) != ",":
                return cls(kind, variables, at)
            name = cursor.after(at)
            at = cursor.after(name)


_SIGNATURE = re.compile(
    r"\[\[kernel\]\] void (?P<name>\S+)\((?P<parameters>.*?)\) \{\n", re.S
)
_PARAMETER = re.compile(r"  device [^\n]* \[\[buffer\(\d+\)\]\]")
_INSTANCE = re.compile(r"\ntemplate \[\[host_name\(.*\Z", re.S)
_BUFFER = re.compile(r"(?P<by>[*&]) (?P<name>\w+) \[\[buffer\((?P<number>\d+)\)\]\]")
_ATTRIBUTE = re.compile(r"\[\[(?P<name>\w+)\]\]")


@dataclass(frozen=True)
class Buffer:
    """A kernel parameter that is memory."""

    name: str
    number: int


@dataclass(frozen=True)
class Translation:
    """A kernel as C++.

    Attributes:
        text: The translation unit, lines marked as lines of the Metal text.
        buffers: Its memory parameters, in order.
        body_line: Line of the Metal text on which the body begins, counted from 1.
    """

    text: str
    buffers: tuple[Buffer, ...]
    body_line: int


def translate(kernel: str, text: str) -> Translation:
    """Translates what MLX has written.

    Args:
        kernel: Name of the kernel function.
        text: Metal source.

    Raises:
        CompileError: If MLX has closed the list of parameters too early. It does so for
            two outputs and a shape, if the source mentions no attribute.
    """
    start = text.rindex(f"[[kernel]] void {kernel}(")
    found = _SIGNATURE.match(text, start)
    if found is None or _PARAMETER.match(text, found.end()):
        raise CompileError(
            f"{kernel}: MLX writes an invalid signature for several outputs together with "
            "a shape, strides or rank; mention an attribute in the source, for instance "
            "thread_position_in_grid"
        )
    instance = _INSTANCE.search(text, found.end())
    body = text[: instance.start()] if instance else text
    buffers, arguments = _parameters(found["parameters"])
    specialised = kernel
    if instance:
        specialised = re.search(r"decltype\((.*)\) ", instance[0], re.S)[1]  # type: ignore[index]
    call = f"{specialised}({', '.join(arguments)});"
    unit = (
        '#include "kernel.h"\n'
        f'#line 1 "kernel.metal"\n{_Rewriter(body).run()}\n'
        '#line 1 "entry"\n#undef kernel\n'
        f'extern "C" void mslemu_kernel() {{ {call} }}\n'
    )
    return Translation(unit, buffers, text.count("\n", 0, found.end()) + 1)


def _parameters(text: str) -> tuple[tuple[Buffer, ...], list[str]]:
    buffers: list[Buffer] = []
    arguments: list[str] = []
    for line in text.split("\n"):
        if found := _BUFFER.search(line):
            buffers.append(Buffer(found["name"], int(found["number"])))
            form = "pointer" if found["by"] == "*" else "reference"
            arguments.append(f"emu::{form}({found['number']})")
        elif attribute := _ATTRIBUTE.search(line):
            arguments.append(f"emu::attribute::{attribute['name']}()")
    return tuple(buffers), arguments
