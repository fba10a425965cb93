"""Rewriting of Metal source to C++.

With the shim headers, clang accepts most of Metal as C++. The rest is rewritten here:
constructors and casts of vectors, threadgroup variables, literals of half and bfloat.
No rewrite adds or removes a line break, so the compiler's messages and debug lines name
lines of the Metal source.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from metal_emulator.language import conditionals, function_constants
from metal_emulator.language.components import checked_component
from metal_emulator.language.declaration import (
    SPACES,
    STATEMENT_ENDS,
    Declaration,
    is_declarator,
)
from metal_emulator.language.tokens import Tokens

_INTEGERS = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong")
_SCALARS = ("bool", *_INTEGERS, "half", "bfloat", "float")
VECTORS = frozenset(
    f"{packed}{scalar}{size}"
    for packed in ("", "packed_")
    for scalar in _SCALARS
    for size in (2, 3, 4)
)
_VECTOR_TEMPLATES = frozenset({"vec", "packed_vec"})
_HALF = re.compile(r"(?P<digits>(?!0[xX]).*?)(?P<suffix>[hH]|bf|BF)$")
_UNSUFFIXED = re.compile(r"(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?$")
_QUALIFIERS = ("const", "volatile", "constant", *SPACES)
_TYPE_WORDS = frozenset([*_SCALARS, *_QUALIFIERS, "size_t", "auto", "unsigned"])
_UNARY = frozenset("-+!~*&")
_NOT_BEFORE_CONSTRUCTOR = frozenset([".", "->", "::", "struct", "class", "operator"])
_TEXTS = 128
"""Rewritten texts that are cached: kernels have many shapes, but few dtypes."""


@functools.lru_cache(_TEXTS)
def rewritten(text: str) -> str:
    """Returns Metal source as C++ with the same lines."""
    tokens = Tokens(text)
    overloads = list(_space_overloads(tokens))
    if overloads:  # of what the preprocessor leaves
        tokens = Tokens(conditionals.active(text))
        overloads = list(_space_overloads(tokens))
    for start, end in overloads:
        tokens.blank_range(start, end + 1)
    rewriter = Rewriter(tokens)
    for at in range(len(tokens)):
        rewriter.rewrite(at)
    return "".join(token.written for token in tokens)


def definitions(tokens: Tokens) -> Iterator[tuple[int, int, int]]:
    """Yields functions and classes at file scope: first token, `{` and `}`."""
    start = at = tokens.after(-1)
    while at < len(tokens):
        word = tokens.text(at)
        if word == "#":
            start = at = tokens.after(tokens.line_end(at))
        elif word == "{" and tokens.text(start) not in ("namespace", "extern"):
            end = tokens.closing(at)
            yield start, at, end
            start = at = tokens.after(end)
        elif word in (";", "{", "}"):
            start = at = tokens.after(at)
        else:
            at = tokens.after(at)


def _space_overloads(tokens: Tokens) -> Iterator[tuple[int, int]]:
    """Yields definitions that differ from an earlier one only in address spaces.

    Without address spaces they would be redefinitions, if the preprocessor leaves both.
    A definition that is spelled
    exactly like the first is kept: it is in another namespace, or an error that clang
    reports.
    """
    first: dict[str, str] = {}
    for start, brace, end in definitions(tokens):
        words = [tokens.text(at) for at in range(start, brace) if not tokens.space(at)]
        spelled = " ".join(words)
        words = ["const" if word == "constant" else word for word in words]
        head = " ".join(word for word in words if word not in SPACES)
        if first.setdefault(head.replace("const const", "const"), spelled) != spelled:
            yield start, end


def _type_end(tokens: Tokens, at: int, names: frozenset[str]) -> int:
    """Returns the last token of the type at `at` if it is in `names` or a `vec`.

    Returns -1 otherwise.
    """
    while tokens.text(at) == "metal" and tokens.text(tokens.after(at)) == "::":
        at = tokens.after(tokens.after(at))
    word = tokens.text(at)
    if word in _VECTOR_TEMPLATES:
        angle = tokens.after(at)
        return tokens.closing_angle(angle) if tokens.text(angle) == "<" else -1
    return at if tokens.named(at) and word in names else -1


def _operand_end(tokens: Tokens, at: int) -> int:
    """Returns the last token of the operand of a cast that begins at `at`."""
    at = _skip_prefixes(tokens, at)
    end = tokens.closing(at) if tokens.text(at) == "(" else at
    while True:
        following = tokens.after(end)
        word = tokens.text(following)
        if word in ("(", "["):
            end = tokens.closing(following)
        elif word in (".", "->", "::"):
            end = tokens.after(following)
        elif word == "<" and tokens.text(end) == "as_type":
            end = tokens.closing_angle(following)
        else:
            return end


def _skip_prefixes(tokens: Tokens, at: int) -> int:
    """Skips unary operators and casts such as `(half4)value`."""
    while True:
        inner = tokens.after(tokens.closing(at)) if tokens.text(at) == "(" else at
        if tokens.text(at) in _UNARY:
            at = tokens.after(at)
        elif inner != at and (tokens.named(inner) or tokens.number(inner)):
            at = inner
        else:
            return at


@dataclass(frozen=True)
class _Names:
    """Names of types.

    `vectors` are vectors, `types` include template parameters, `buffers` are those of
    memory that a caller gives.
    """

    vectors: frozenset[str]
    types: frozenset[str]
    buffers: frozenset[str]

    @classmethod
    def of(cls, tokens: Tokens) -> _Names:
        vectors, types = set(VECTORS), set(VECTORS)
        buffers: set[str] = set()
        for at in range(len(tokens)):
            word = tokens.text(at)
            name = tokens.after(at)
            follower = tokens.after(name)
            if word in ("device", "constant"):
                buffers.add(tokens.text(name))
            elif word in ("typename", "class") and tokens.text(follower) in (
                ",",
                ">",
                "=",
            ):
                types.add(tokens.text(name))
            elif word == "using" and tokens.text(follower) == "=":
                types.add(tokens.text(name))
                if _type_end(tokens, tokens.after(follower), frozenset(vectors)) >= 0:
                    vectors.add(tokens.text(name))
            elif word == "typedef":
                end = _type_end(tokens, name, frozenset(vectors))
                if end >= 0:
                    vectors.add(tokens.text(tokens.after(end)))
                    types.add(tokens.text(tokens.after(end)))
        return cls(frozenset(vectors), frozenset(types), frozenset(buffers))


class Rewriter:
    """The rewrite rules. A rule examines one position and changes later tokens."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.names = _Names.of(tokens)
        function_constants.specialise(tokens)

    def rewrite(self, at: int) -> None:
        """Applies every rule that the token at `at` begins."""
        token = self.tokens[at]
        if token.kind == "number":
            self._literal(at)
        elif token.text == "threadgroup":
            self._threadgroup_variables(at)
        elif token.text == "template":
            self._host_name(at)
        elif token.text == "typedef":
            self._runtime_array(at)
        elif token.text == "static_cast":
            token.written = "emu::cast"
        elif token.kind == "name":
            self._constructor(at)
            self._initialised_vector(at)
        elif token.text == "(":
            self._cast(at)
        elif token.text in (".", "->"):
            self._component(at)

    def _host_name(self, at: int) -> None:
        """Removes the attributes of an instantiation, which C++ does not allow.

        `template [[host_name("f")]] [[kernel]] void f<half>(...);`
        """
        tokens = self.tokens
        at = tokens.after(at)
        while tokens.text(at) == "[":
            closing = tokens.closing(at)
            tokens.blank_range(at, closing + 1)
            at = tokens.after(closing)

    def _runtime_array(self, at: int) -> None:
        """Rewrites `typedef uint name[1];` of a buffer, which has any length.

        So naga writes an array without a bound; trace mode would check the index.
        """
        tokens = self.tokens
        end = tokens.after(at)
        while tokens.text(end) not in (";", ""):
            end = tokens.after(end)
        length = tokens.before(tokens.before(end))
        name = tokens.before(tokens.before(length))
        if tokens.read_line(name + 1, end) == "[1]" and (
            tokens.text(name) in self.names.buffers
        ):
            tokens.blank(length)

    def _component(self, at: int) -> None:
        checked_component(self.tokens, at)

    def _literal(self, at: int) -> None:
        if found := _HALF.match(self.tokens.text(at)):
            kind = "half" if found["suffix"] in "hH" else "bfloat"
            self._write_literal(at, f"{found['digits']}_{kind}")
        elif _UNSUFFIXED.match(self.tokens.text(at)):
            # Metal has no double. clang's flag for that is lost inside of templates.
            self._write_literal(at, f"{self.tokens.text(at)}f")

    def _write_literal(self, at: int, literal: str) -> None:
        """Replaces a literal; a cast before it may have written behind it."""
        token = self.tokens[at]
        token.written = token.written.replace(token.text, literal, 1)

    def _constructor(self, at: int) -> None:
        """Rewrites `float4(a, b)` to a call of emu::make."""
        tokens = self.tokens
        before = tokens.text(tokens.before(at))
        if before in _NOT_BEFORE_CONSTRUCTOR:
            return
        end = _type_end(tokens, at, self.names.types)
        opening = tokens.after(end)
        if end < 0 or tokens.text(opening) != "(":
            return
        # `float4(*p)[2]` without a qualifier is an element of a vector.
        declares = is_declarator(tokens, opening) and (
            before in _QUALIFIERS
            or "&" in tokens.read(opening, tokens.closing(opening))
        )
        if not declares:
            tokens[at].written = "emu::make<" + tokens[at].written
            tokens[end].written += ">"

    def _initialised_vector(self, at: int) -> None:
        """Rewrites `float4 v(a, b);` unless it declares a function."""
        tokens = self.tokens
        end = _type_end(tokens, at, self.names.vectors)
        if end < 0:
            return
        name = tokens.after(end)
        opening = tokens.after(name)
        if not tokens.named(name) or tokens.text(opening) != "(":
            return
        closing = tokens.closing(opening)
        items = list(tokens.items(opening, closing))
        if tokens.text(tokens.after(closing)) not in (";", ",") or not items:
            return
        if not any(self._is_parameter(begin) for begin in items):
            tokens[opening].written = f" = emu::make<{tokens.read(at, end + 1)}>("

    def _is_parameter(self, at: int) -> bool:
        """Returns whether a list item begins with a type that is not called."""
        tokens = self.tokens
        end = _type_end(tokens, at, self.names.types)
        if end < 0 and tokens.text(at) in _TYPE_WORDS:
            end = at
        return end >= 0 and tokens.text(tokens.after(end)) != "("

    def _cast(self, at: int) -> None:
        """Rewrites `(float4)value`, which clang would treat as a bit cast."""
        tokens = self.tokens
        previous = tokens.before(at)
        if tokens.named(previous) and tokens.text(previous) != "return":
            return
        end = _type_end(tokens, tokens.after(at), self.names.types)
        close = tokens.after(end)
        operand = tokens.after(close)
        if end < 0 or tokens.text(close) != ")" or not self._begins_operand(operand):
            return
        tokens[at].written = "emu::make<"
        tokens[close].written = ">("
        tokens[_operand_end(tokens, operand)].written += ")"

    def _begins_operand(self, at: int) -> bool:
        tokens = self.tokens
        if tokens.named(at):
            return tokens.text(at) not in _QUALIFIERS
        return tokens.number(at) or tokens.text(at) in _UNARY | {"("}

    def _threadgroup_variables(self, at: int) -> None:
        """Rewrites `threadgroup float tile[32];` to a reference to runtime memory."""
        tokens = self.tokens
        if tokens.text(tokens.before(at)) == "[":  # `[[threadgroup(0)]]`
            tokens[at].written = "threadgroup_memory"
        if tokens.before_statement(at) not in STATEMENT_ENDS:
            return
        declaration = Declaration.parse(tokens, tokens.after(at))
        if declaration is None:
            return
        references = "; ".join(
            f"auto& {name} = emu::threadgroup_variable<"
            f'{declaration.type} {dimensions}, __COUNTER__>("{name}")'
            for name, dimensions in declaration.variables
        )
        if tokens.text(declaration.end) == ";":
            references += ";"
        tokens.blank_range(at, declaration.end + 1)
        tokens[at].written = references
