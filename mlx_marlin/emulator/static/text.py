"""The text of a static check: Metal, as clang's C++ for OpenCL reads it.

Address spaces stay. The rest is what the emulator rewrites too, and three differences:
threadgroup variables become references, because OpenCL wants them in functions that
cannot be templates; methods of which nothing else is said get `thread` objects, as in
Metal; constructors and conversions lose `thread`, because temporaries have no address
space in clang.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator

from mlx_marlin.emulator.language import rewrite
from mlx_marlin.emulator.language.tokens import Tokens

_NO_METHOD = frozenset(
    ["static", "operator", "friend", "using", "typedef", "static_assert"]
) | {"alignas", "~", "=", ":"}


_FLOAT = re.compile(r"(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?[fF]?")


def _inexact(value: float) -> str:
    """A float literal as it is, but for its last bit."""
    nearest = ctypes.c_float(value)
    bits = ctypes.c_uint32.from_buffer(nearest)
    bits.value |= 1
    return f"{nearest.value:.9e}f"


def translated(tokens: Tokens) -> str:
    """The text for clang."""
    rewriter = StaticRewriter(tokens)
    heads = list(_methods(tokens))
    for at in range(len(tokens)):
        rewriter.rewrite(at)
    for last in heads:
        tokens[last].written += " thread"
    body = "".join(token.written for token in tokens)
    return f'#include "kernel.h"\n{body}\n'


class StaticRewriter(rewrite.Rewriter):
    """The emulator's rules, with address spaces kept."""

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(tokens)
        self.classes = _classes(tokens)

    def rewrite(self, at: int) -> None:
        """Applies every rule that the token at `at` begins."""
        qualifier = _constructor_space(self.tokens, at, self.classes)
        if qualifier >= 0:
            # Temporaries are in no space in clang, in Metal in `thread`.
            self.tokens.blank(qualifier)
        if self.tokens.text(at) == "template":
            self._function_parameters(at)
        super().rewrite(at)

    def _function_parameters(self, at: int) -> None:
        """`template <void (*f)(float)>`: clang takes functions by reference only."""
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
        """Clang knows `1.0h` in this mode, not `1.0bf`, and lets floats become bfloat.

        It does so where bfloat holds the constant exactly. With the last bit set,
        bfloat does not hold it; and nothing is run.
        """
        text = self.tokens.text(at)
        if text.lower().endswith("bf") and not text.lower().startswith("0x"):
            self.tokens[at].written = f"bfloat({text[:-2]})"
        elif _FLOAT.fullmatch(text):
            self.tokens[at].written = _inexact(float(text.rstrip("fF")))

    def _component(self, at: int) -> None:
        """No check at run time: nothing is run."""

    def _threadgroup_variables(self, at: int) -> None:
        super()._threadgroup_variables(at)
        token = self.tokens[at]
        if "emu::threadgroup_variable<" in token.written:
            references = token.written.replace('"); ', '"); threadgroup ')
            token.written = f"threadgroup {references}"


def _classes(tokens: Tokens) -> frozenset[str]:
    """Names of structs and classes."""
    return frozenset(
        tokens.text(tokens.after(at))
        for at in range(len(tokens))
        if tokens.text(at) in ("struct", "class")
    )


def _constructor_space(tokens: Tokens, at: int, classes: frozenset[str]) -> int:
    """Where `thread` qualifies the constructor or conversion named at `at`, or -1.

    For instance `half8(float x) thread {` and `operator float() const thread {`.
    """
    named = tokens.after(at)
    if tokens.text(at) == "operator":
        named = tokens.after(named)
    elif tokens.text(at) not in classes:
        return -1
    if tokens.text(named) != "(":
        return -1
    behind = tokens.after(tokens.closing(named))
    if tokens.text(behind) == "const":
        behind = tokens.after(behind)
    ends = tokens.text(tokens.after(behind)) in ("{", ":", ";")
    return behind if tokens.text(behind) == "thread" and ends else -1


def _methods(tokens: Tokens) -> Iterator[int]:
    """Last tokens of the heads of methods that say nothing of their object's space.

    It is `thread` then, and clang's default is another.
    """
    for at in range(len(tokens)):
        if tokens.text(at) in ("struct", "class"):
            name = tokens.after(at)
            brace = _class_body(tokens, name)
            if brace >= 0:
                yield from _methods_of(tokens, tokens.text(name), brace)


def _class_body(tokens: Tokens, at: int) -> int:
    """The `{` of a class that is defined at `at`, or -1."""
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
