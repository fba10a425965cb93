"""An implementation of `mx.fast.metal_kernel` that runs on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from metal_emulator import engine, modes, tracing
from metal_emulator.arrays import (
    info_arguments,
    input_argument,
    output_argument,
    output_array,
)
from metal_emulator.compiling import build, compiler
from metal_emulator.compiling.limited import RefusedError
from metal_emulator.dispatch import Dispatch, record
from metal_emulator.errors import CompileError, EmulatorError
from metal_emulator.language import frontend
from metal_emulator.language.lines import SourceMap
from metal_emulator.memory import Argument, MappedArgument, mapped
from metal_emulator.outputs import check_outputs
from metal_emulator.reports.compile_errors import compile_message
from metal_emulator.reports.context import FaultContext
from metal_emulator.reports.faults import fault_message
from metal_emulator.reports.memory_faults import canary_message

# Read at import, because `emulated` replaces it.
_stock = mx.fast.metal_kernel


PROGRAMS = 256
"""Instances, by shapes and template arguments, that a kernel keeps loaded."""


@dataclass(frozen=True)
class _Program:
    """A compiled instance of a kernel."""

    name: str
    source: SourceMap
    dispatch: Dispatch
    buffers: tuple[frontend.Buffer, ...]
    kernel: engine.Kernel
    traced: bool


def _compiled(
    name: str, header: str, dispatch: Dispatch, options: modes.Options
) -> _Program:
    translation = frontend.translate(dispatch.kernel, dispatch.text)
    source = SourceMap(dispatch.text, header, translation.body_line)
    found = compiler.find()
    if found is None:
        raise EmulatorError(
            f"no Metal kernel can be compiled: {compiler.unavailable()}"
        )
    try:
        path = build.kernel_library(
            found,
            translation.text,
            options.trace,
            tensor_layout=options.tensor_layout,
        )
    except RefusedError as refused:
        message = compile_message(name, source, str(refused))
        raise CompileError(message) from None
    try:
        kernel = engine.Kernel.load(path)
    except OSError as error:  # a function that is declared, but has no body
        raise CompileError(f"kernel {name} does not link: {error}") from None
    return _Program(name, source, dispatch, translation.buffers, kernel, options.trace)


class MetalKernel:
    """A custom kernel that runs on the CPU, called like a kernel of MLX."""

    def __init__(self, name: str, header: str, stock: Callable[..., Any]) -> None:
        self._name = name
        self._header = header
        self._stock = stock
        self._programs: dict[tuple[Any, ...], _Program] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """Runs the kernel immediately and returns its outputs.

        The arguments and errors are those of `mx.fast.metal_kernel`. The inputs are
        evaluated first.

        Raises:
            EmulatorError: If the kernel violates a rule of Metal, or inside
                `mx.compile`.
            CompileError: If the source does not compile.
        """
        arrays = [_as_array(value) for value in inputs]
        _evaluate(self._name, arrays)
        call = {
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "grid": grid,
            "threadgroup": threadgroup,
            "template": template,
            "stream": stream,
        }
        program = self._program(arrays, call)
        if verbose:
            print(program.dispatch.text)
        return _execute(program, arrays, output_shapes, output_dtypes, init_value)

    def _program(self, arrays: list[Any], call: dict[str, Any]) -> _Program:
        options = modes.options.get()
        key = (options.trace, options.tensor_layout, *_key(arrays, call))
        program = self._programs.pop(key, None)
        if program is None:
            dispatch = record(
                lambda *blanks: self._stock(inputs=list(blanks), **call), arrays
            )
            program = _compiled(self._name, self._header, dispatch, options)
        self._programs[key] = program  # in order of last use
        while len(self._programs) > PROGRAMS:
            self._programs.pop(next(iter(self._programs)), None)
        return program


def _key(arrays: list[Any], call: dict[str, Any]) -> tuple[Any, ...]:
    template = call["template"]
    return (
        *((a.shape, a.dtype) for a in arrays),
        tuple(map(tuple, call["output_shapes"])),
        tuple(call["output_dtypes"]),
        tuple(call["grid"]),
        tuple(call["threadgroup"]),
        # True and 1 are equal, but not the same template argument.
        tuple((name, type(value), value) for name, value in template or ()),
        repr(call["stream"]),
    )


def _as_array(value: Any) -> Any:
    return mx.array(value) if isinstance(value, bool | int | float) else value


def _evaluate(name: str, arrays: list[Any]) -> None:
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


def _arguments(program: _Program, arrays: list[mx.array]) -> list[Argument]:
    result: list[Argument] = []
    names = (buffer.name for buffer in program.buffers)
    dispatch = program.dispatch
    for array, info in zip(arrays, dispatch.info, strict=True):
        raw, memory = input_argument(next(names), array, dispatch.ensure_row_contiguous)
        result += [memory, *info_arguments(raw, info, names)]
    return result


def _check_sizes(dispatch: Dispatch) -> None:
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


def _execute(
    program: _Program,
    arrays: list[mx.array],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[mx.Dtype],
    init_value: float | None,
) -> list[mx.array]:
    dispatch = program.dispatch
    _check_sizes(dispatch)
    arguments = _arguments(program, arrays)
    outputs = program.buffers[len(arguments) :]
    for output, shape, dtype in zip(outputs, shapes, dtypes, strict=True):
        arguments.append(output_argument(output.name, shape, dtype, init_value))
    with mapped(arguments) as buffers:
        traced = _run(program, buffers) if all(dispatch.grid) else None
        first = len(buffers) - len(shapes)
        written = buffers[first:]
        _check_canaries(program.name, written)
        if traced is not None:
            memories = traced.memories[first : len(buffers)]
            pairs = list(zip(written, dtypes, strict=True))
            check_outputs(program.name, arrays, pairs, memories)
        return [
            output_array(buffer, shape, dtype)
            for buffer, shape, dtype in zip(written, shapes, dtypes, strict=True)
        ]


def _run(program: _Program, buffers: Sequence[MappedArgument]) -> tracing.Trace | None:
    """Runs the kernel and returns its trace, or None outside of trace mode."""
    dispatch = program.dispatch
    kernel, source = program.kernel, program.source
    traced = tracing.request(kernel, buffers) if program.traced else None
    outcome = engine.run(
        kernel,
        buffers,
        dispatch.grid,
        dispatch.clamped_threadgroup,
        _options(dispatch),
        traced,
    )
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


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, Any] | None = None,
) -> MetalKernel:
    """Returns a kernel that runs on the CPU.

    Arguments and errors are those of `mx.fast.metal_kernel`. `compile_options` has no
    effect: the emulator always uses safe math.
    """
    stock: Any = _stock(
        name,
        input_names,
        output_names,
        source,
        header,
        ensure_row_contiguous,
        atomic_outputs,
        compile_options,
    )
    return MetalKernel(name, header, stock)
