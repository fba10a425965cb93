"""Rewriting of Metal source to C++ for OpenCL, for the static check.

The rules are those of the emulator, except that address spaces are kept, and:

- Threadgroup variables become references, because OpenCL allows them only in functions
  that cannot be templates.
- Methods and array parameters without an address space are qualified with `thread`, as
  in Metal.
- Constructors and conversions lose `thread`, because temporaries have no address space
  in clang.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator

from metal_emulator.language import rewrite
from metal_emulator.language.tokens import Tokens
from metal_emulator.static.rules import array_parameters

_NO_METHOD = frozenset(
    ["static", "operator", "friend", "using", "typedef", "static_assert"]
) | {"alignas", "~", "=", ":"}


_FLOAT = re.compile(r"(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?[fF]?")


def _inexact(value: float) -> str:
    """Returns a float literal with the last bit of the mantissa set."""
    nearest = ctypes.c_float(value)
    bits = ctypes.c_uint32.from_buffer(nearest)
    bits.value |= 1
    return f"{nearest.value:.9e}f"


def translated(tokens: Tokens) -> str:
    """Returns the text for clang."""
    rewriter = StaticRewriter(tokens)
    heads, arrays = list(_methods(tokens)), list(array_parameters(tokens))
    for at in range(len(tokens)):
        rewriter.rewrite(at)
    for last in heads:
        tokens[last].written += " thread"
    for at in arrays:
        tokens[at].written = f"thread {tokens[at].written}"
    body = "".join(token.written for token in tokens)
    return f'#include "kernel.h"\n{body}\n'


class StaticRewriter(rewrite.Rewriter):
    """The emulator's rules, without the removal of address spaces."""

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(tokens)
        self.classes = _classes(tokens)

    def rewrite(self, at: int) -> None:
        """Applies every rule that the token at `at` begins."""
        qualifier = _constructor_space(self.tokens, at, self.classes)
        if qualifier >= 0:
            # Temporaries have no address space in clang; in Metal it is `thread`.
            self.tokens.blank(qualifier)
        if self.tokens.text(at) == "template":
            self._function_parameters(at)
        super().rewrite(at)

    def _function_parameters(self, at: int) -> None:
        """Rewrites `template <void (*f)(float)>`: clang accepts only references."""
        tokens = self.tokens
        opening = tokens.after(at)
        if tokens.text(opening) != "<":
            return
        for inner in range(opening, tokens.closing_angle(opening)):
            name = tokens.after(inner)
            closing = tokens.after(name)
            if (
                tokens.text(inner) == "*"
                and tokens.text(tokens.before(inner)) == "("
                and tokens.text(closing) == ")"
                and tokens.text(tokens.after(closing)) == "("
            ):
                tokens[inner].written = "&"

    def _literal(self, at: int) -> None:
        """Rewrites literals of bfloat and float.

        In this mode clang accepts `1.0h` but not `1.0bf`. It converts a float constant
        to bfloat implicitly if bfloat represents it exactly. Setting the last bit
        prevents that; the changed value does not matter, because nothing is run.
        """
        text = self.tokens.text(at)
        if text.lower().endswith("bf") and not text.lower().startswith("0x"):
            self._write_literal(at, f"bfloat({text[:-2]})")
        elif _FLOAT.fullmatch(text):
            self._write_literal(at, _inexact(float(text.rstrip("fF"))))

    def _runtime_array(self, at: int) -> None:
        """Does nothing: without a run no index is checked."""

    def _component(self, at: int) -> None:
        """Does nothing: there is no alignment check without a run."""

    def _threadgroup_variables(self, at: int) -> None:
        super()._threadgroup_variables(at)
        token = self.tokens[at]
        if "emu::threadgroup_variable<" in token.written:
            references = token.written.replace('"); ', '"); threadgroup ')
            token.written = f"threadgroup {references}"


def _classes(tokens: Tokens) -> frozenset[str]:
    """Returns the names of structs and classes."""
    return frozenset(
        tokens.text(tokens.after(at))
        for at in range(len(tokens))
        if tokens.text(at) in ("struct", "class")
    )


def _constructor_space(tokens: Tokens, at: int, classes: frozenset[str]) -> int:
    """Returns the `thread` that qualifies the constructor or conversion, or -1.

    Examples: `half8(float x) thread {` and `operator float() const thread {`.
    """
    opening = tokens.after(at)
    if tokens.text(at) == "operator":
        opening = tokens.after(opening)
    elif tokens.text(at) not in classes:
        return -1
    if tokens.text(opening) != "(":
        return -1
    qualifier = tokens.after(tokens.closing(opening))
    if tokens.text(qualifier) == "const":
        qualifier = tokens.after(qualifier)
    ends = tokens.text(tokens.after(qualifier)) in ("{", ":", ";", "noexcept")
    return qualifier if tokens.text(qualifier) == "thread" and ends else -1


def _methods(tokens: Tokens) -> Iterator[int]:
    """Yields the last token of the head of every method without an address space.

    Metal's default is `thread`; clang's differs.
    """
    for at in range(len(tokens)):
        if tokens.text(at) in ("struct", "class"):
            name = tokens.after(at)
            brace = _class_body(tokens, name)
            if brace >= 0:
                yield from _methods_of(tokens, tokens.text(name), brace)


def _class_body(tokens: Tokens, at: int) -> int:
    """Returns the `{` of a class that is defined at `at`, or -1."""
    while tokens.text(at) not in ("{", ";", ">", ",", "(", ")", "*", "&", "=", ""):
        at = max(at, tokens.closing_angle(at)) if tokens.text(at) == "<" else at
        at = tokens.after(at)
    return at if tokens.text(at) == "{" else -1


def _methods_of(tokens: Tokens, name: str, brace: int) -> Iterator[int]:
    end = tokens.closing(brace)
    at = tokens.after(brace)
    head: list[str] = []
    while at < end:
        word = tokens.text(at)
        access = head[-1:] in (["public"], ["protected"], ["private"])
        head = [] if word in (";", "{") or access else [*head, word]
        if word == "(":
            last = tokens.closing(at)
            if tokens.text(tokens.after(last)) == "const":
                last = tokens.after(last)
            follower = tokens.text(tokens.after(last))
            if (
                follower in ("{", ";")
                and head[-2] != name
                and _NO_METHOD.isdisjoint(head)
            ):
                yield last
            at = tokens.closing(at)
        elif word == "{":
            at = tokens.closing(at)
        elif word == "<":
            at = max(at, tokens.closing_angle(at))
        at = tokens.after(at)
