"""Calls of whole kernels, with a value for every parameter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metal_emulator.arrays import (
    bytes_argument,
    input_argument,
    output_argument,
    raw_array,
)
from metal_emulator.language.declaration import plain_type
from metal_emulator.language.entries import ALIAS, Entry
from metal_emulator.language.kernel_functions import Parameter
from metal_emulator.memory import Argument

_DTYPES = {
    "bool": mx.bool_,
    **dict.fromkeys(("float", "float32_t"), mx.float32),
    **dict.fromkeys(("half", "float16_t"), mx.float16),
    **dict.fromkeys(("bfloat", "bfloat16_t"), mx.bfloat16),
    **dict.fromkeys(("short", "int16_t"), mx.int16),
    **dict.fromkeys(("ushort", "uint16_t"), mx.uint16),
    **dict.fromkeys(("int", "int32_t"), mx.int32),
    **dict.fromkeys(("uint", "uint32_t"), mx.uint32),
    **dict.fromkeys(("long", "int64_t"), mx.int64),
    **dict.fromkeys(("ulong", "uint64_t", "size_t"), mx.uint64),
}
"""Types of elements that are checked against an array's dtype; others are not."""
_BYTES = {"char": mx.int8, "int8_t": mx.int8, "uchar": mx.uint8, "uint8_t": mx.uint8}
"""Types that stand for any bytes; a number has this dtype."""
_VECTOR = re.compile(r"[234](x[234])?$")
_TRIPLES = frozenset(
    {"thread_position_in_grid", "thread_position_in_threadgroup"}
    | {"threadgroup_position_in_grid", "threadgroups_per_grid", "threads_per_grid"}
    | {"threads_per_threadgroup", "dispatch_threads_per_threadgroup"}
    | {"grid_size", "grid_origin"}
)
"""Attributes that are uint3; the others are uint."""
ATTRIBUTES = _TRIPLES | frozenset(
    {"thread_index_in_threadgroup", "thread_index_in_simdgroup"}
    | {"thread_index_in_quadgroup", "simdgroup_index_in_threadgroup"}
    | {"quadgroup_index_in_threadgroup", "simdgroups_per_threadgroup"}
    | {"quadgroups_per_threadgroup", "dispatch_simdgroups_per_threadgroup"}
    | {"dispatch_quadgroups_per_threadgroup", "thread_execution_width"}
    | {"threads_per_simdgroup"}
)
"""The attributes of threads, as in include/kernel.h."""


@dataclass(frozen=True, kw_only=True)
class BoundCall:
    """A call of an entry."""

    entry: Entry  # The entry
    inputs: tuple[str, ...]  # Names of the inputs, in order
    outputs: tuple[str, ...]  # Names of the outputs, in order
    values: dict[str, Any]  # Values by parameter; of outputs, what they begin with
    template: dict[str, str]  # Template arguments as text, by parameter
    threadgroup_memory: dict[str, int]  # Bytes of the parameters in threadgroup memory

    def arrays(self) -> list[mx.array]:
        """Returns the arrays among the values."""
        return [value for value in self.values.values() if isinstance(value, mx.array)]

    def text(self) -> str:
        """Returns the call as C++."""
        numbers = self._buffers()
        arguments = (self._argument(each, numbers) for each in self.entry.parameters)
        function = ALIAS if self.entry.instance else instance(self.entry, self.template)
        return f"{function}({', '.join(arguments)});"

    def arguments(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[mx.Dtype],
        init_value: float | None,
    ) -> list[Argument]:
        """Returns the memory of all parameters, in order."""
        for what, given in (("output_shapes", shapes), ("output_dtypes", dtypes)):
            if len(given) != len(self.outputs):
                raise ValueError(
                    f"kernel {self.entry.name}: {what} has {len(given)} items, "
                    f"expected {len(self.outputs)} ({', '.join(self.outputs)})"
                )
        types = zip(shapes, dtypes, strict=True)
        outputs = dict(zip(self.outputs, types, strict=True))
        result: list[Argument] = []
        numbers = self._buffers()
        for parameter in self.entry.parameters:
            name = parameter.name
            if numbers.get(name) != len(result):  # no buffer of its own
                continue
            if name in outputs:
                shape, dtype = outputs[name]
                self._check(parameter, dtype)
                start = self.values.get(name)
                result.append(output_argument(name, shape, dtype, init_value, start))
            else:
                result.append(self._input(parameter, self.values[name]))
        return result

    def _buffers(self) -> dict[str, int]:
        """Returns the number of each parameter's buffer, if it is set.

        Inputs that are one array share its buffer, as on a GPU.
        """
        numbers: dict[str, int] = {}
        arrays: dict[int, int] = {}
        count = 0
        for name in (each.name for each in self.entry.parameters if each.is_memory):
            value, is_input = self.values.get(name), name in self.inputs
            if is_input and value is None:
                continue
            shared = is_input and isinstance(value, mx.array)
            numbers[name] = arrays.get(id(value), count) if shared else count
            if shared:
                arrays.setdefault(id(value), count)
            count += numbers[name] == count
        return numbers

    def _argument(self, parameter: Parameter, numbers: Mapping[str, int]) -> str:
        """Returns an argument as C++."""
        name = parameter.name
        if parameter.attribute == "threadgroup" and parameter.type.endswith("&"):
            return f'emu::ThreadgroupReference<__COUNTER__>{{"{name}"}}'
        if parameter.attribute == "threadgroup":
            kind = f"char[{self.threadgroup_memory[name]}], __COUNTER__"
            return f'emu::Pointer{{&emu::threadgroup_variable<{kind}>("{name}")}}'
        if not parameter.is_memory:
            return _attribute(parameter)
        if name not in numbers:
            return "nullptr"
        if not parameter.type.endswith("&"):
            return f"emu::pointer({numbers[name]})"
        form = "mutable_reference" if parameter.is_written else "reference"
        return f"emu::{form}({numbers[name]})"

    def _input(self, parameter: Parameter, value: Any) -> Argument:
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes_argument(parameter.name, bytes(value))
        if not isinstance(value, mx.array):
            return bytes_argument(parameter.name, self._number(parameter, value))
        self._check(parameter, value.dtype)
        return input_argument(parameter.name, value, True)[1]

    def _number(self, parameter: Parameter, value: Any) -> bytes:
        """Returns a number in its parameter's type."""
        types = {**_DTYPES, **_BYTES}
        dtypes = [types[word] for word in self._words(parameter) if word in types]
        if not isinstance(value, bool | int | float) or not dtypes:
            raise self._wrong(parameter, "an array or bytes", repr(value))
        number = mx.array(value, dtypes[0])
        if isinstance(value, int) and number.item() != value:
            raise self._wrong(parameter, "a number of that type", repr(value))
        return raw_array(number).tobytes()

    def _check(self, parameter: Parameter, dtype: mx.Dtype) -> None:
        """Checks the dtype of an array; uint8 is any type's bytes."""
        words = (_VECTOR.sub("", word) for word in self._words(parameter))
        dtypes = [_DTYPES[word] for word in words if word in _DTYPES]
        if dtypes and dtype not in (*dtypes, mx.uint8):
            raise self._wrong(
                parameter, "an array of that type or of uint8", str(dtype)
            )

    def _wrong(self, parameter: Parameter, expected: str, given: str) -> ValueError:
        return ValueError(
            f"kernel {self.entry.name}: parameter {parameter.name!r} is "
            f"{parameter.type}, expected {expected}, not {given:.60}"
        )

    def _words(self, parameter: Parameter) -> list[str]:
        """Returns the words of a parameter's type, template parameters replaced."""
        known = {**self.entry.arguments, **self.template}
        words = re.findall(r"\w+", parameter.type)
        given = " ".join(known.get(word, word) for word in words)
        return re.findall(r"\w+", plain_type(given))


def instance(entry: Entry, template: Mapping[str, str]) -> str:
    """Returns the function of an entry with template arguments, as Metal text."""
    name = entry.kernel.name
    return f"{name}<{', '.join(template.values())}>" if entry.template else name


def _attribute(parameter: Parameter) -> str:
    """Returns an attribute of a thread in the parameter's type, as C++."""
    value = f"emu::attribute::{parameter.attribute}()"
    kind = parameter.type.replace("const", "").strip()
    size = re.search(r"[23]$", kind)
    if parameter.attribute in _TRIPLES:
        value += {"2": ".xy", "3": ""}[size[0]] if size else ".x"
    return f"emu::make<{kind}>({value})"
