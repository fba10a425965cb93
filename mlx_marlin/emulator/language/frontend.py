"""A kernel as MLX writes it, as a C++ translation unit."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlx_marlin.emulator.errors import CompileError
from mlx_marlin.emulator.language.rewrite import rewritten

_SIGNATURE = re.compile(
    r"\[\[kernel\]\] void (?P<name>\S+)\((?P<parameters>.*?)\) \{\n", re.S
)
_PARAMETER = re.compile(r"  device [^\n]* \[\[buffer\(\d+\)\]\]")
_INSTANCE = re.compile(r"\ntemplate \[\[host_name\(.*\Z", re.S)
_BUFFER = re.compile(r"(?P<by>[*&]) (?P<name>\w+) \[\[buffer\((?P<number>\d+)\)\]\]")
_ATTRIBUTE = re.compile(r"\[\[(?P<name>\w+)\]\]")
_KERNEL = "mslemu_rewritten_kernel"
"""What a kernel is called meanwhile: MLX's name for it differs with every instance."""


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
            f"{kernel}: MLX writes an invalid signature for several outputs together "
            "with a shape, strides or rank; mention an attribute in the source, for "
            "instance thread_position_in_grid"
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
        f'#line 1 "kernel.metal"\n{_rewritten(kernel, body)}\n'
        '#line 1 "entry"\n#undef kernel\n'
        f'extern "C" void mslemu_kernel() {{ {call} }}\n'
    )
    return Translation(unit, buffers, text.count("\n", 0, found.end()) + 1)


def _rewritten(kernel: str, body: str) -> str:
    """`rewritten`, once for all instances of a template."""
    nameless = re.sub(rf"\b{re.escape(kernel)}\b", _KERNEL, body)
    return rewritten(nameless).replace(_KERNEL, kernel)


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
