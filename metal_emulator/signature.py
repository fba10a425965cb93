"""Calls of whole kernels: arguments for the parameters of their signatures."""

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
from metal_emulator.language.entries import ALIAS, Entry
from metal_emulator.language.whole_kernel import Parameter
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
_NUMBERS = frozenset(
    {"thread_index_in_threadgroup", "thread_index_in_simdgroup"}
    | {"thread_index_in_quadgroup", "simdgroup_index_in_threadgroup"}
    | {"quadgroup_index_in_threadgroup", "simdgroups_per_threadgroup"}
    | {"quadgroups_per_threadgroup", "dispatch_simdgroups_per_threadgroup"}
    | {"dispatch_quadgroups_per_threadgroup", "thread_execution_width"}
    | {"threads_per_simdgroup"}
)
_ARGUMENT = re.compile(r"[\w:<>*&(), .-]+")


@dataclass(frozen=True)
class Signature:
    """The parameters of an entry.

    Attributes:
        entry: The entry.
        inputs: Names of the memory parameters that are read, in order.
        outputs: Names of the others.
    """

    entry: Entry
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, entry: Entry, outputs: Sequence[str] | None) -> Signature:
        """Checks the parameters of an entry.

        Args:
            entry: The entry.
            outputs: Names of the outputs, or None for all that may be written.

        Raises:
            ValueError: If the emulator does not have such a parameter, or an output is
                none that may be written.
        """
        for each in entry.parameters:
            known = each.is_memory or each.attribute in _TRIPLES | _NUMBERS
            if not each.name or not (known or each.attribute == "threadgroup"):
                raise ValueError(
                    f"kernel {entry.name}: parameter {str(each)!r}, expected a buffer, "
                    "threadgroup memory or an attribute of threads"
                )
        memory = [each for each in entry.parameters if each.is_memory]
        written = [each.name for each in memory if each.is_written]
        chosen = written if outputs is None else list(outputs)
        if unknown := [name for name in chosen if name not in written]:
            raise ValueError(
                f"kernel {entry.name}: output {unknown[0]!r}, expected a parameter in "
                f"device memory that is not const ({', '.join(written) or 'none'})"
            )
        inputs = tuple(each.name for each in memory if each.name not in chosen)
        return cls(entry, inputs, tuple(name for name in written if name in chosen))

    @property
    def threadgroup_memory(self) -> tuple[str, ...]:
        """Names of the parameters in threadgroup memory, in order."""
        parameters = self.entry.parameters
        return tuple(p.name for p in parameters if p.attribute == "threadgroup")

    def bind(
        self, inputs: Sequence[Any] | Mapping[str, Any], template: Mapping[str, Any]
    ) -> Call:
        """Returns a call with values for the inputs, in order or by name.

        Raises:
            ValueError: If a value is missing, superfluous or of another type.
        """
        if not isinstance(inputs, Mapping):
            if len(inputs) != len(self.inputs):
                raise ValueError(
                    f"kernel {self.entry.name}: {len(inputs)} inputs, expected "
                    f"{len(self.inputs)} ({', '.join(self.inputs)})"
                )
            inputs = dict(zip(self.inputs, inputs, strict=True))
        for name in self.inputs:
            if name not in inputs:
                raise ValueError(
                    f"kernel {self.entry.name}: parameter {name!r} needs an input or "
                    "output of its name"
                )
        known = {*self.inputs, *self.outputs}
        if unknown := [name for name in inputs if name not in known]:
            raise ValueError(
                f"kernel {self.entry.name}: input {unknown[0]!r}, expected one of "
                f"{', '.join(self.inputs) or 'no parameters'}"
            )
        return Call(self, dict(inputs), self._template(template))

    def instance(self, template: Mapping[str, Any]) -> str:
        """Returns the instance of a template with these arguments, as Metal text.

        Raises:
            ValueError: If an argument is missing or of another type.
        """
        return _instance(self.entry, self._template(template))

    def _template(self, given: Mapping[str, Any]) -> dict[str, str]:
        """Returns the template arguments as text, by parameter."""
        wanted = self.entry.template
        if unknown := [name for name in given if name not in wanted]:
            raise ValueError(
                f"kernel {self.entry.name}: template argument {unknown[0]!r}, expected "
                f"one of {', '.join(wanted) or 'none'}"
            )
        # Parameters behind the last argument have defaults, or clang says what lacks.
        names = [name for name in wanted if name in given]
        if names != list(wanted[: len(names)]):
            missing = next(name for name in wanted if name not in given)
            raise ValueError(
                f"kernel {self.entry.name}: template parameter {missing!r} has no value"
            )
        return {name: metal_text(given[name]) for name in names}


@dataclass(frozen=True)
class Call:
    """Values for the inputs of a signature.

    Attributes:
        signature: The signature.
        values: Values by parameter; of outputs, what they begin with.
        template: Template arguments as text, by parameter.
    """

    signature: Signature
    values: dict[str, Any]
    template: dict[str, str]

    def arrays(self) -> list[mx.array]:
        """Returns the arrays among the values."""
        return [value for value in self.values.values() if isinstance(value, mx.array)]

    def text(self, threadgroup_memory: Mapping[str, int]) -> str:
        """Returns the call as C++.

        Args:
            threadgroup_memory: Bytes of the parameters in threadgroup memory.

        Raises:
            ValueError: If one has no size.
        """
        entry = self.signature.entry
        wanted = self.signature.threadgroup_memory
        for name in {*wanted} ^ {*threadgroup_memory}:
            raise ValueError(
                f"kernel {entry.name}: parameter {name!r} needs threadgroup memory of "
                f"its name"
                if name in wanted
                else f"kernel {entry.name}: threadgroup memory {name!r}, expected "
                f"{', '.join(wanted) or 'none'}"
            )
        numbers = self._buffers()
        arguments = (
            self._argument(each, numbers, threadgroup_memory)
            for each in entry.parameters
        )
        function = ALIAS if entry.instance else _instance(entry, self.template)
        return f"{function}({', '.join(arguments)});"

    def arguments(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[mx.Dtype],
        init_value: float | None,
    ) -> list[Argument]:
        """Returns the memory of all parameters, in order.

        Raises:
            ValueError: If a value or an output is not of its parameter's type.
        """
        names = self.signature.outputs
        for what, given in (("output_shapes", shapes), ("output_dtypes", dtypes)):
            if len(given) != len(names):
                raise ValueError(
                    f"kernel {self.signature.entry.name}: {what} has {len(given)} "
                    f"items, expected {len(names)} ({', '.join(names)})"
                )
        types = dict(zip(names, zip(shapes, dtypes, strict=True), strict=True))
        result: list[Argument] = []
        buffers = self._buffers()
        for parameter in self.signature.entry.parameters:
            if buffers.get(parameter.name) != len(result):  # no buffer of its own
                continue
            if parameter.name in types:
                shape, dtype = types[parameter.name]
                self._check(parameter, dtype)
                start = self.values.get(parameter.name)
                result.append(
                    output_argument(parameter.name, shape, dtype, init_value, start)
                )
            else:
                result.append(self._input(parameter, self.values[parameter.name]))
        return result

    def _buffers(self) -> dict[str, int]:
        """Returns the number of each parameter's buffer, if it is set.

        Inputs that are one array share its buffer, as on a GPU.
        """
        numbers: dict[str, int] = {}
        arrays: dict[int, int] = {}
        count = 0
        for parameter in self.signature.entry.parameters:
            name, value = parameter.name, self.values.get(parameter.name)
            is_input = name in self.signature.inputs
            if not parameter.is_memory or (is_input and value is None):
                continue
            shared = is_input and isinstance(value, mx.array)
            numbers[name] = arrays.get(id(value), count) if shared else count
            if shared:
                arrays.setdefault(id(value), count)
            count += numbers[name] == count
        return numbers

    def _argument(
        self,
        parameter: Parameter,
        numbers: Mapping[str, int],
        threadgroup_memory: Mapping[str, int],
    ) -> str:
        """Returns an argument as C++."""
        name = parameter.name
        if parameter.attribute == "threadgroup":
            size = threadgroup_memory[name]
            kind = f"char[{size}], __COUNTER__"
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
        words = self._words(parameter)
        dtypes = [{**_DTYPES, **_BYTES}[w] for w in words if w in {**_DTYPES, **_BYTES}]
        if not isinstance(value, bool | int | float) or not dtypes:
            raise ValueError(
                f"kernel {self.signature.entry.name}: parameter {parameter.name!r} is "
                f"{parameter.type}, expected an array, or bytes, not {value!r:.40}"
            )
        number = mx.array(value, dtypes[0])
        if isinstance(value, int) and number.item() != value:
            raise ValueError(
                f"kernel {self.signature.entry.name}: parameter {parameter.name!r} is "
                f"{parameter.type}, expected a number of that type, not {value!r:.40}"
            )
        return raw_array(number).tobytes()

    def _check(self, parameter: Parameter, dtype: mx.Dtype) -> None:
        """Checks the dtype of an array; uint8 is any type's bytes."""
        words = (_VECTOR.sub("", word) for word in self._words(parameter))
        dtypes = [_DTYPES[word] for word in words if word in _DTYPES]
        if dtypes and dtype not in (*dtypes, mx.uint8):
            raise ValueError(
                f"kernel {self.signature.entry.name}: parameter {parameter.name!r} is "
                f"{parameter.type}, expected an array of that type or of uint8, not "
                f"{dtype}"
            )

    def _words(self, parameter: Parameter) -> list[str]:
        """Returns the words of a parameter's type, template parameters replaced."""
        known = {**self.signature.entry.arguments, **self.template}
        words = re.findall(r"\w+", parameter.type)
        return re.findall(r"\w+", " ".join(known.get(word, word) for word in words))


def _instance(entry: Entry, template: Mapping[str, str]) -> str:
    name = entry.kernel.name
    return f"{name}<{', '.join(template.values())}>" if entry.template else name


def _attribute(parameter: Parameter) -> str:
    """Returns an attribute of a thread in the parameter's type, as C++."""
    value = f"emu::attribute::{parameter.attribute}()"
    kind = parameter.type.replace("const", "").strip()
    size = re.search(r"[23]$", kind)
    if parameter.attribute in _TRIPLES:
        value += {"2": ".xy", "3": ""}[size[0]] if size else ".x"
    return f"emu::make<{kind}>({value})" if size else f"{kind}({value})"


def metal_text(value: object) -> str:
    """Returns a template argument as Metal text.

    Raises:
        ValueError: If it is no dtype, number, or text of a type or number.
    """
    if isinstance(value, mx.Dtype):
        name = str(value).removeprefix("mlx.core.")
        return name if name == "bool" else {"float32": "float"}.get(name, f"{name}_t")
    if isinstance(value, bool | int):
        return str(value).lower()
    if isinstance(value, str) and _ARGUMENT.fullmatch(value):
        return value
    raise ValueError(
        f"template argument {value!r:.60}, expected a dtype, a number or Metal text"
    )
