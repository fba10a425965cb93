"""The entries of a text: its kernels, and instances of templates by their host names.

`template [[host_name("add_half")]] kernel void add<half>(device half* y);` makes an
entry `add_half`. A file can have hundreds of them, so each becomes a macro call of
which only the chosen one defines something: the others are not compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from metal_emulator.language import function_constants
from metal_emulator.language.kernel_functions import (
    KernelFunction,
    Parameter,
    kernel_functions,
)
from metal_emulator.language.tokens import Tokens

ALIAS = "mslemu_entry"
"""Name of the chosen instance."""
_MACRO = "MSLEMU_INSTANCE_"
_MACRO_NAME = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.M)
_HOST_NAME = re.compile(r'host_name\s*\(\s*"(?P<name>[^"]*)"\s*\)')


@dataclass(frozen=True)
class Entry:
    """What a host can launch.

    Attributes:
        name: Its name for the host.
        kernel: The kernel function.
        instance: The instance as written, such as "add<half>", or "" for the function.
        number: Number of the instantiation in the text, or -1.
        arguments: The template arguments of an instance, as text, by parameter; empty
            if macros hide them.
    """

    name: str
    kernel: KernelFunction
    instance: str = ""
    number: int = -1
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def template(self) -> tuple[str, ...]:
        """Names of the template parameters that a call has to give."""
        return () if self.instance else self.kernel.template

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of the function, in order."""
        return self.kernel.parameters

    def __str__(self) -> str:
        template = f" <{', '.join(self.template)}>" if self.template else ""
        instance = f" = {self.instance}" if self.instance else ""
        given = (
            str(each)
            for each in self.parameters
            if each.is_memory or each.attribute == "threadgroup"
        )
        return f"{self.name}{template}{instance}\n    {', '.join(given)}"


@dataclass(frozen=True)
class _Instantiation:
    """`template [[host_name("x")]] kernel t f<half>;`: its tokens `begin` to `end`."""

    name: str
    function: str
    begin: int
    first: int
    last: int
    end: int


def entries(tokens: Tokens) -> list[Entry]:
    """Returns the entries of a text; none for the body of a kernel."""
    kernels = list(kernel_functions(tokens))
    functions = {kernel.name: kernel for kernel in kernels}
    macros = frozenset(_MACRO_NAME.findall(tokens.read(0, len(tokens))))
    instances = []
    for number, each in enumerate(_instantiations(tokens)):
        if kernel := functions.get(each.function):
            instance = tokens.read_line(each.first, each.last + 1)
            arguments = _arguments(kernel, instance, macros)
            name = each.name or instance
            instances.append(Entry(name, kernel, instance, number, arguments))
    # The name of a template may be the host name of its instance.
    names = {entry.name for entry in instances}
    own = (Entry(kernel.host_name, kernel) for kernel in kernels)
    return [*(entry for entry in own if entry.name not in names), *instances]


def prepared(
    tokens: Tokens, constants: Mapping[str | int, function_constants.Value]
) -> str:
    """Returns a text that defines what `chosen` names, with values of constants."""
    function_constants.give(tokens, constants)
    for kernel in kernel_functions(tokens):
        _make_static(tokens, kernel.keyword)
    for number, each in enumerate(_instantiations(tokens)):
        tokens.blank_range(each.begin, each.first)
        tokens[each.begin].written = f"{_MACRO}{number}("
        tokens[each.end].written = ")"
        tokens.blank_range(each.last + 1, each.end)
    return "".join(token.written for token in tokens)


def chosen(entry: Entry | None, text: str) -> str:
    """Returns definitions of the macros in a prepared text, on one line each."""
    count = text.count(_MACRO)
    lines = [f"#define {_MACRO}{number}(...)" for number in range(count)]
    if entry and entry.number >= 0:
        lines[entry.number] += f" constexpr auto& {ALIAS} = __VA_ARGS__;"
    return "".join(f"{line}\n" for line in lines)


def checkable(tokens: Tokens, entry: Entry | None) -> str:
    """Returns a text with the instance of one entry, for the static check."""
    for each in _instantiations(tokens):
        instance = tokens.read_line(each.first, each.last + 1)
        if entry is None or entry.name != (each.name or instance):
            tokens.blank_range(each.begin, each.end + 1)
    return "".join(token.written for token in tokens)


def _make_static(tokens: Tokens, keyword: int) -> None:
    """Makes a kernel a function that is compiled only if it is called."""
    bracket = tokens.before(tokens.before(keyword))
    if tokens.text(tokens.before(keyword)) == "[":
        tokens[tokens.closing(bracket)].written += " static"
    else:
        tokens[keyword].written = "static"


def _instantiations(tokens: Tokens) -> Iterator[_Instantiation]:
    for begin in range(len(tokens)):
        if tokens.text(begin) != "template" or tokens.directive(begin) >= 0:
            continue
        at = tokens.after(begin)
        while tokens.text(at) == "[":
            at = tokens.after(tokens.closing(at))
        head = tokens.read(begin, at)
        if tokens.text(at) == "kernel":
            at = tokens.after(at)
        elif not re.search(r"\bkernel\b", head):
            continue
        if found := _instantiated(tokens, begin, _type_end(tokens, at) + 1):
            yield found


def _type_end(tokens: Tokens, at: int) -> int:
    """Returns the last token of `void`, `decltype(f<half>)` or the name of a type."""
    if tokens.text(at) == "decltype":
        return tokens.closing(tokens.after(at))
    return at


def _instantiated(tokens: Tokens, begin: int, at: int) -> _Instantiation | None:
    """Returns the instantiation whose function's name is the first one from `at`."""
    first = name = tokens.after(at - 1)
    while tokens.text(tokens.after(name)) == "::":
        name = tokens.after(tokens.after(name))
    angle = tokens.after(name)
    last = tokens.closing_angle(angle) if tokens.text(angle) == "<" else -1
    end = tokens.after(last)
    if tokens.text(end) == "(":
        end = tokens.after(tokens.closing(end))
    if last < 0 or tokens.text(end) != ";":
        return None
    host_name = _HOST_NAME.search(tokens.read(begin, first))
    return _Instantiation(
        host_name["name"] if host_name else "",
        tokens.text(name),
        begin,
        first,
        last,
        end,
    )


def _arguments(
    kernel: KernelFunction, instance: str, macros: frozenset[str]
) -> Mapping[str, str]:
    """Returns the template arguments by parameter; none if one is a macro."""
    if not macros.isdisjoint(re.findall(r"\w+", instance)):
        return {}
    inner = instance.partition("<")[2].rpartition(">")[0]
    return dict(zip(kernel.template, _split(inner), strict=False))


def _split(arguments: str) -> list[str]:
    """Splits template arguments at the commas outside of brackets."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character in "<([") - (character in ">)]")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]
