"""Kernel functions of a text, with their signatures."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from metal_emulator.language.declaration import plain_type
from metal_emulator.language.tokens import Tokens

_ATTRIBUTES = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)
_ATTRIBUTE = re.compile(r"(?P<name>\w+)\s*(?:\((?P<argument>.*?)\))?\s*(?:,|$)")
_CONDITION = "function_constant"
_HOST_NAME = re.compile(r'host_name\s*\(\s*"(?P<name>[^"]*)"\s*\)')
_MEMORY = frozenset({"", "buffer"})


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel."""

    type: str  # The text before the name, including `*` or `&`, as `plain_type`
    name: str  # The name, or "" if it is not understood
    attribute: str  # The Metal attribute without arguments, or ""
    # The argument of the attribute, or ""; also "" if a function constant decides
    # whether there is the parameter
    index: str

    @property
    def is_memory(self) -> bool:
        """Whether the caller gives a buffer or a number."""
        return self.attribute in _MEMORY

    @property
    def is_written(self) -> bool:
        """Whether its type allows the kernel to write it."""
        words = re.findall(r"\w+", self.type)
        return self.is_memory and "device" in words and "const" not in words

    def __str__(self) -> str:
        attribute = "" if self.is_memory else f" [[{self.attribute}]]"
        return f"{self.type} {self.name}{attribute}"


@dataclass(frozen=True)
class KernelFunction:
    """A kernel function of a text."""

    name: str  # The name
    template: tuple[str, ...]  # Names of the template parameters, in order
    parameters: tuple[Parameter, ...]  # The parameters, in order
    host_name: str  # Its name for the host: that of its attribute, or `name`
    keyword: int  # The token `kernel`


def kernel_functions(tokens: Tokens) -> Iterator[KernelFunction]:
    """Yields the kernel functions that a text defines; none for a body."""
    for at in range(len(tokens)):
        if tokens.text(at) != "kernel" or tokens.directive(at) >= 0:
            continue
        begin, following = at, tokens.after(at)
        if tokens.text(tokens.before(at)) == "[":
            begin = tokens.before(tokens.before(at))
            following = tokens.after(tokens.closing(begin))
        name = tokens.after(following)
        opening = tokens.after(name)
        if tokens.text(following) != "void" or tokens.text(opening) != "(":
            continue
        closing = tokens.closing(opening)
        if tokens.text(tokens.after(closing)) != "{":
            continue
        begin = _attributes_begin(tokens, begin)
        host_name = _HOST_NAME.search(tokens.read(begin, name))
        yield KernelFunction(
            tokens.text(name),
            tuple(_template(tokens, begin)),
            tuple(_parameters(tokens, opening, closing)),
            host_name["name"] if host_name else tokens.text(name),
            at,
        )


def _attributes_begin(tokens: Tokens, at: int) -> int:
    """Returns the first `[` of the attributes before a position, or the position."""
    while tokens.text(closing := tokens.before(at)) == "]":
        at = tokens.opening(closing)
    return at


def _template(tokens: Tokens, kernel: int) -> Iterator[str]:
    """Yields the names of the template parameters of a kernel."""
    angle = tokens.before(kernel)
    if tokens.text(angle) != ">":
        return
    head = angle
    while head >= 0 and tokens.text(head) != "template":
        head = tokens.before(head)
    starts = [*_items(tokens, tokens.after(head), angle), angle + 1]
    for begin, end in itertools.pairwise(starts):
        name = tokens.read_line(begin, end - 1).rstrip(" ,").partition("=")[0]
        # `void (*f)(float)` is a function.
        function = re.search(r"\([*&]\s*(\w+)\s*\)", name)
        yield function[1] if function else re.findall(r"\w+", name)[-1]


def _parameters(tokens: Tokens, opening: int, closing: int) -> Iterator[Parameter]:
    starts = [*_items(tokens, opening, closing), closing + 1]
    for begin, end in itertools.pairwise(starts):
        text = tokens.read_line(begin, end - 1).rstrip(" ,")
        words = re.match(r"(.*?)(\w+)$", _ATTRIBUTES.sub("", text).strip(), re.DOTALL)
        kind, name = (words[1], words[2]) if words else (text, "")
        kind = plain_type(" ".join(kind.split()))
        yield Parameter(kind, name, *_attribute(kind, text))


def _attribute(kind: str, text: str) -> tuple[str, str]:
    """Returns the attribute of a parameter and its argument."""
    given = {
        found["name"]: found["argument"] or ""
        for each in _ATTRIBUTES.findall(text)
        for found in _ATTRIBUTE.finditer(each.strip())
    }
    conditional = given.pop(_CONDITION, None) is not None
    space = "threadgroup" if re.search(r"\bthreadgroup\b", kind) else ""
    name, index = next(iter(given.items()), (space, ""))
    return name, "" if conditional else index


def _items(tokens: Tokens, opening: int, closing: int) -> Iterator[int]:
    """Yields the first tokens of a list's items; `vec<T, 4>` is inside of one."""
    end = opening
    for begin in tokens.items(opening, closing):
        if begin < end:  # behind a comma of template arguments
            continue
        yield begin
        at = begin
        while at < closing and tokens.text(at) != ",":
            if tokens.text(at) == "<":
                at = max(at, tokens.closing_angle(at))
            at = tokens.after(at)
        end = at
