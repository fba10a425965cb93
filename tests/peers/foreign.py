"""A kernel function of somebody else's header, run by the emulator as it stands.

A custom kernel's body calls it: arguments go to its parameters by name, Metal's
attributes where it asks for them, and what the caller leaves out is what an unset
buffer is on a GPU.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import pytest

import metal_emulator

_PARAMETER = re.compile(
    r"(?P<type>[^*&]*?)\s*(?P<by>[*&]?)\s*(?P<name>\w+)\s*(?P<attribute>\[\[.*\]\])?$",
    re.S,
)
_ATTRIBUTE = re.compile(r"\[\[(\w+)\]\]$")
_STRUCT = re.compile(r"\w*Params$")
_SPLIT = re.compile(r",(?![^\[]*\]\])")


@contextmanager
def reports(message: str) -> Iterator[None]:
    """Runs kernels in trace mode, which must stop with a report."""
    with (
        metal_emulator.emulated(trace=True),
        pytest.raises(metal_emulator.EmulatorError, match=message),
    ):
        yield


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel function; `attribute` is empty for memory."""

    type: str
    by: str
    name: str
    attribute: str

    def argument(self, given: Mapping[str, object]) -> str:
        """What the call passes."""
        if self.attribute:
            return self.attribute
        if self.name not in given:
            return "nullptr" if self.by == "*" else "unset"
        cast = f"({self.type}*)" if _STRUCT.search(self.type) else ""
        return cast + _own(self.name)


def _own(name: str) -> str:
    """A name from which MLX makes no other: it adds `x_shape` to an input `x`."""
    return f"{name}_argument"


def parameters(header: str, kernel: str) -> list[Parameter]:
    """The parameters of `[[kernel]] void kernel(...)`."""
    start = re.search(rf"\[\[kernel\b[^\n]*\]\] void {kernel}\(", header)
    if start is None:
        raise ValueError(f"kernel={kernel!r} is not in the header")
    text = header[start.end() : header.index(") {", start.end())]
    return [_parameter(piece.strip()) for piece in _SPLIT.split(text)]


def _parameter(text: str) -> Parameter:
    found = _PARAMETER.match(text)
    assert found is not None, text
    attribute = _ATTRIBUTE.match(found["attribute"] or "")
    name = attribute[1] if attribute else ""
    return Parameter(found["type"], found["by"], found["name"], name)


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """One call of a foreign kernel."""

    kernel: str  # Its name
    template: Sequence[object]  # Its template arguments, as Metal text
    groups: tuple[int, int, int]  # Threadgroups in x, y and z
    threads: tuple[int, int, int]  # Threads of a threadgroup in x, y and z
    inputs: Mapping[str, mx.array | int]  # Arrays and integers by parameter name
    output: str  # The parameter that is written
    shape: tuple[int, ...]  # Of the output
    dtype: mx.Dtype  # Of the output
    constants: Mapping[str, bool]  # Values of function constants

    def run(self, header: str) -> mx.array:
        """Runs it out of that header, function constants defined behind it."""
        given = {**self.inputs, self.output: None}
        arguments = [p.argument(given) for p in parameters(header, self.kernel)]
        template = ", ".join(map(_metal, self.template))
        call = f"{self.kernel}<{template}>({', '.join(arguments)});"
        kernel = metal_emulator.metal_kernel(
            name=f"run_{self.kernel}",
            input_names=[*map(_own, self.inputs)],
            output_names=[_own(self.output)],
            source=f"const int unset = 0;\n{call}\n",
            header=header + self._definitions(),
        )
        (result,) = kernel(
            inputs=list(self.inputs.values()),
            output_shapes=[self.shape],
            output_dtypes=[self.dtype],
            grid=tuple(g * t for g, t in zip(self.groups, self.threads, strict=True)),
            threadgroup=self.threads,
        )
        return result

    def _definitions(self) -> str:
        return "".join(
            f"constant bool {name} = {_metal(value)};\n"
            for name, value in self.constants.items()
        )


def _metal(value: object) -> str:
    """A template argument as Metal text."""
    names = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat"}
    if isinstance(value, mx.Dtype):
        return names[value]
    return str(value).lower() if isinstance(value, bool) else str(value)
