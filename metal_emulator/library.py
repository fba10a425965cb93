"""Whole `.metal` files: their kernels, called like those of `metal_kernel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from metal_emulator import modes
from metal_emulator.dispatch import Dispatch
from metal_emulator.errors import told_to_caller
from metal_emulator.language import conditionals, entries, function_constants, includes
from metal_emulator.language.entries import Entry
from metal_emulator.language.function_constants import FunctionConstant, Value
from metal_emulator.language.lines import SourceMap
from metal_emulator.language.rewrite import rewritten
from metal_emulator.language.tokens import Tokens
from metal_emulator.program import Program, Programs, check_sizes, evaluated, execute
from metal_emulator.signature import Signature
from metal_emulator.static.check import Operands, check_text

MOST_NAMES = 12
"""Entries that an error lists."""


class Library:
    """The kernels of a text.

    Attributes:
        name: Name of the text, in messages.
        text: The text, with the files that it includes by names in quotes.
        entries: Its kernels, and instances of templates, that the preprocessor leaves,
            in order.
        constants: Its function constants.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self._active = conditionals.active(text)
        self._prepared: dict[str, str] = {}
        tokens = Tokens(self._active)
        self.entries: tuple[Entry, ...] = tuple(entries.entries(tokens))
        self.constants: tuple[FunctionConstant, ...] = tuple(
            function_constants.function_constants(tokens)
        )

    def function(
        self,
        name: str | None = None,
        constants: Mapping[str | int, Value] | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Function:
        """Returns a kernel.

        Args:
            name: Its host name; may be None if the text has one kernel.
            constants: Values of function constants, by name or index.
            outputs: Names of the parameters that are outputs; default: all that are in
                `device` memory and not const.

        Raises:
            ValueError: If there is no such kernel, constant or parameter, or a value is
                not of the constant's type.
        """
        return Function(self, self._entry(name), dict(constants or {}), outputs)

    def prepared(self, constants: Mapping[str | int, Value]) -> str:
        """Returns the text with values of constants, as `entries.prepared`."""
        key = repr(sorted(map(repr, constants.items())))
        if key not in self._prepared:
            self._prepared[key] = entries.prepared(Tokens(self._active), constants)
        return self._prepared[key]

    def _entry(self, name: str | None) -> Entry:
        found = [entry for entry in self.entries if name in (None, entry.name)]
        if len(found) == 1 or (found and name is not None):
            return found[0]
        names = [entry.name for entry in self.entries]
        known = ", ".join(names[:MOST_NAMES]) or "none: it is a body"
        if len(names) > MOST_NAMES:
            known += f" and {len(names) - MOST_NAMES} more"
        given = "no entry is named" if name is None else f"entry {name}"
        raise ValueError(f"{given}, expected a kernel of {self.name} ({known})")


def library(
    text: str, *, name: str = "text", include: Sequence[str | Path] = ()
) -> Library:
    """Returns the kernels of Metal source, such as the text of a `.metal` file.

    Args:
        text: Metal source with whole kernels.
        name: Name of the source in messages, such as the file name.
        include: Folders of the files that it includes by names in quotes.

    Raises:
        ValueError: If an included file is no text in UTF-8.
        CompileError: If its conditions exceed a limit of the compiler.
    """
    return Library(name, includes.flattened(text, name, [*map(Path, include)]))


class Function:
    """A kernel of a library, called like a kernel of `metal_kernel`.

    Attributes:
        name: Its host name.
        inputs: Names of the inputs, in order.
        outputs: Names of the outputs, in order.
        threadgroup_memory: Names of the parameters in threadgroup memory, in order.
    """

    def __init__(
        self,
        library: Library,
        entry: Entry,
        constants: dict[str | int, Value],
        outputs: Sequence[str] | None,
    ) -> None:
        self.name = entry.name
        self._library = library
        self._entry = entry
        self._constants = constants
        self._signature = Signature.of(entry, outputs)
        self.inputs, self.outputs = self._signature.inputs, self._signature.outputs
        self.threadgroup_memory = self._signature.threadgroup_memory
        self._prepared = library.prepared(constants)
        self._programs = Programs()

    @told_to_caller
    def __call__(
        self,
        *,
        inputs: Sequence[Any] | Mapping[str, Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        threadgroup_memory: Mapping[str, int] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """Runs the kernel immediately and returns its outputs.

        Args:
            inputs: An array, a number, bytes of a struct, or None for a buffer that is
                not set, for each of `inputs` in order or by name. Parameters with one
                array share its buffer. A value that is named like an output is what
                that begins with.
            output_shapes: The shape of each of `outputs`.
            output_dtypes: Their dtypes.
            grid: Threads in x, y and z.
            threadgroup: Threads of a threadgroup in x, y and z.
            template: Names and values of template parameters, for a template without an
                instance in the text: a dtype, a number, or Metal text such as "half4".
            threadgroup_memory: Bytes of the parameters in threadgroup memory, by name.
            init_value: What the other outputs begin with; None: they are unwritten.
            verbose: Whether to print the Metal text.
            stream: Ignored.

        Raises:
            ValueError: If a parameter has no value, or one of another type.
            EmulatorError: If the kernel violates a rule of Metal.
            CompileError: If the text does not compile, or a function constant that the
                kernel uses has no value.
        """
        call = self._signature.bind(
            inputs, dict(template or ()), threadgroup_memory or {}
        )
        arrays = evaluated(self.name, call.arrays())
        arguments = call.arguments(output_shapes, output_dtypes, init_value)
        dispatch = Dispatch(
            kernel=self.name,
            text=self._library.text,
            grid=grid,
            threadgroup=threadgroup,
            info=(),
            ensure_row_contiguous=True,
        )
        check_sizes(dispatch)
        program = self._program(call.text())
        if verbose:
            print(dispatch.text)
        return execute(
            program, dispatch, arguments, arrays, output_shapes, output_dtypes
        )

    @told_to_caller
    def check(
        self,
        template: Sequence[tuple[str, Any]] | None = None,
        macos: str | None = None,
    ) -> frozenset[Operands]:
        """Checks address spaces and types of the text with this kernel's instance.

        Args:
            template: As for a call.
            macos: As for `check_text`.

        Raises:
            CompileError: If the text violates a rule of Metal.
        """
        instances: tuple[str, ...] = ()
        if self._entry.template:
            instances = (self._signature.instance(dict(template or ())),)
        text = entries.checkable(Tokens(self._library.text), self._entry)
        return check_text(
            text, name=self._library.name, instances=instances, macos=macos
        )

    def _program(self, call: str) -> Program:
        def make() -> Program:
            text = self._unit(call)
            source = SourceMap(self._library.text, "", 1)
            return Program.compiled(self.name, source, text, options)

        options = modes.options.get()
        found: Program = self._programs.get((call,), options, make)
        return found

    def _unit(self, call: str) -> str:
        """Returns the C++ translation unit of a call."""
        return (
            '#include "kernel.h"\n'
            f"{entries.chosen(self._entry, self._prepared)}"
            f"{rewritten(self._prepared)}\n"
            '#line 1 "entry"\n#undef kernel\n'
            f'extern "C" void mslemu_kernel() {{ {call} }}\n'
        )
