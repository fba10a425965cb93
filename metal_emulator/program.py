"""Compiled kernels: what `metal_kernel` and `library` compile, keep and run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from metal_emulator import engine, modes, tracing
from metal_emulator.arrays import output_array
from metal_emulator.compiling import build, compiler
from metal_emulator.compiling.limited import RefusedError
from metal_emulator.dispatch import Dispatch
from metal_emulator.errors import CompileError, EmulatorError
from metal_emulator.language.function_constants import unset_message
from metal_emulator.language.lines import SourceMap
from metal_emulator.memory import Argument, MappedArgument, mapped
from metal_emulator.outputs import check_outputs
from metal_emulator.reports.compile_errors import compile_message
from metal_emulator.reports.context import FaultContext
from metal_emulator.reports.faults import fault_message
from metal_emulator.reports.memory_faults import canary_message

PROGRAMS = 256
"""Instances, by shapes and template arguments, that a kernel keeps loaded."""


@dataclass(frozen=True)
class Program:
    """A compiled instance of a kernel.

    Attributes:
        name: Name of the kernel.
        source: Names the lines of its text.
        kernel: The loaded library.
        traced: Whether it checks every access to memory.
    """

    name: str
    source: SourceMap
    kernel: engine.Kernel
    traced: bool

    @classmethod
    def compiled(
        cls, name: str, source: SourceMap, text: str, options: modes.Options
    ) -> Program:
        """Compiles a C++ translation unit, or finds it in the cache.

        Raises:
            CompileError: If it does not compile, or lacks a function or the value of a
                function constant.
            EmulatorError: If no compiler is available.
        """
        found = compiler.find()
        if found is None:
            raise EmulatorError(
                f"no Metal kernel can be compiled: {compiler.unavailable()}"
            )
        try:
            path = build.kernel_library(
                found, text, options.trace, tensor_layout=options.tensor_layout
            )
        except RefusedError as refused:
            message = compile_message(name, source, str(refused))
            raise CompileError(message) from None
        try:
            kernel = engine.Kernel.load(path)
        except OSError as error:  # something that is declared, but not defined
            reason = unset_message(source.text, str(error))
            reason = reason or f"does not link: {error}"
            raise CompileError(f"kernel {name} {reason}") from None
        return cls(name, source, kernel, options.trace)


class Programs:
    """The programs of a kernel, of which the last used ones stay loaded."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Any] = {}

    def get(
        self, key: tuple[Any, ...], options: modes.Options, make: Callable[[], Any]
    ) -> Any:
        """Returns what `make` returned for a key and the options of compilation."""
        key = (options.trace, options.tensor_layout, *key)
        program = self._kept.pop(key, None) or make()
        self._kept[key] = program  # in order of last use
        while len(self._kept) > PROGRAMS:
            self._kept.pop(next(iter(self._kept)), None)
        return program


def evaluated(name: str, inputs: Sequence[Any]) -> list[Any]:
    """Returns the inputs of a kernel, numbers as arrays, evaluated."""
    arrays = [_as_array(value) for value in inputs]
    try:
        mx.eval(arrays)
    except ValueError as error:
        if "function transformations" not in str(error):
            raise
        raise EmulatorError(
            f"kernel {name}: the emulator runs kernels immediately and cannot be "
            "traced by mx.compile, mx.vmap or mx.export_function. Run without them "
            "(mx.disable_compile() turns mx.compile off), or use stock MLX: "
            "MLX_MARLIN_BACKEND=stock."
        ) from None
    return arrays


def _as_array(value: Any) -> Any:
    return mx.array(value) if isinstance(value, bool | int | float) else value


def check_sizes(dispatch: Dispatch) -> None:
    """Checks the sizes of a dispatch."""
    threads = math.prod(dispatch.threadgroup)
    if threads > engine.MAX_THREADS:
        raise ValueError(
            f"Thread group size ({threads}) is greater than  the maximum allowed "
            f"threads per threadgroup ({engine.MAX_THREADS})."
        )
    if min(dispatch.grid) < 0 or min(dispatch.threadgroup) < 1:
        raise ValueError(
            f"grid={dispatch.grid} must not be negative and threadgroup="
            f"{dispatch.threadgroup} must be positive"
        )


def execute(
    program: Program,
    dispatch: Dispatch,
    arguments: Sequence[Argument],
    inputs: Sequence[mx.array],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[mx.Dtype],
) -> list[mx.array]:
    """Runs a kernel and returns its outputs."""
    with mapped(arguments) as buffers:
        traced = _run(program, dispatch, buffers) if all(dispatch.grid) else None
        places = [at for at, argument in enumerate(arguments) if argument.writable]
        written = [buffers[at] for at in places]
        _check_canaries(program.name, written)
        if traced is not None:
            memories = [traced.memories[at] for at in places]
            pairs = list(zip(written, dtypes, strict=True))
            check_outputs(program.name, inputs, pairs, memories)
        return [
            output_array(buffer, shape, dtype)
            for buffer, shape, dtype in zip(written, shapes, dtypes, strict=True)
        ]


def _run(
    program: Program, dispatch: Dispatch, buffers: Sequence[MappedArgument]
) -> tracing.Trace | None:
    """Runs the kernel and returns its trace, or None outside of trace mode."""
    kernel, source = program.kernel, program.source
    sizes = dispatch.grid, dispatch.clamped_threadgroup
    while True:
        traced = tracing.request(kernel, buffers) if program.traced else None
        outcome = engine.run(kernel, buffers, *sizes, _options(dispatch), traced)
        if not kernel.learns_copy(outcome.report):
            break
        for buffer in buffers:
            buffer.fill()
    if outcome.report.fault:
        fault = FaultContext(program.name, kernel, source, buffers, outcome)
        raise EmulatorError(fault_message(fault))
    launches = modes.launches.get()
    if traced is not None and launches is not None:
        launches.append(
            tracing.launch_counters(
                program.name, kernel, source, buffers, dispatch.threadgroups, traced
            )
        )
    return traced


def _options(dispatch: Dispatch) -> modes.Options:
    """Returns this context's options, with `resident` at most the threadgroups."""
    options = modes.options.get()
    if options.resident <= dispatch.threadgroups:
        return options
    return replace(options, resident=max(1, dispatch.threadgroups))


def _check_canaries(name: str, outputs: Sequence[MappedArgument]) -> None:
    for buffer in outputs:
        if side := buffer.canary():
            raise EmulatorError(canary_message(name, buffer, side))
