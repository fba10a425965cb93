"""`mx.fast.metal_kernel` for machines without Metal."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_marlin.emulator import compiler, engine, frontend, report
from mlx_marlin.emulator.lines import SourceMap
from mlx_marlin.emulator.errors import CompileError, EmulatorError
from mlx_marlin.emulator.trace import Trace, record

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Kept at import: a test may put this module's `metal_kernel` in its place.
_stock = mx.fast.metal_kernel

_PROCESSORS = os.cpu_count() or 1


@dataclass(frozen=True)
class Options:
    """How the emulator runs: shuffle seed, number of host threads."""

    seed: int
    workers: int


_options: ContextVar[Options | None] = ContextVar("emulated", default=None)


@contextmanager
def emulated(*, seed: int = 0, workers: int | None = None) -> Iterator[Options]:
    """Sets how kernels run inside the block.

    Args:
        seed: Chooses the order in which threadgroups and simdgroups run. A correct
            kernel gives the same result for every seed.
        workers: Host threads; the number of processors if None.
    """
    options = Options(seed, workers or _PROCESSORS)
    before = _options.set(options)
    try:
        yield options
    finally:
        _options.reset(before)


def _current() -> Options:
    return _options.get() or Options(0, _PROCESSORS)


@dataclass(frozen=True)
class _Program:
    """A compiled kernel and what reports say about it."""

    name: str
    source: SourceMap
    trace: Trace
    buffers: tuple[frontend.Buffer, ...]
    kernel: engine.Kernel


def _compiled(name: str, header: str, trace: Trace) -> _Program:
    translation = frontend.translate(trace.kernel, trace.text)
    source = SourceMap(trace.text, header, translation.body_line)
    found = compiler.find()
    if found is None:
        raise EmulatorError(
            f"no Metal kernel can be compiled: {compiler.unavailable()}"
        )
    try:
        path = compiler.kernel_library(found, translation.text)
    except compiler.Refused as refused:
        message = report.compile_message(name, source, str(refused))
        raise CompileError(message) from None
    return _Program(name, source, trace, translation.buffers, engine.Kernel.load(path))


class MetalKernel:
    """A custom kernel that runs on the CPU; called like MLX's."""

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
        """Runs the kernel now and returns its outputs.

        The arguments and errors are those of `mx.fast.metal_kernel`. The inputs are
        evaluated first.

        Raises:
            EmulatorError: If the kernel misbehaves, or inside `mx.compile`.
            CompileError: If its text is not Metal.
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
            print(program.trace.text)
        return _execute(program, arrays, output_shapes, output_dtypes, init_value)

    def _program(self, arrays: list[Any], call: dict[str, Any]) -> _Program:
        key = _key(arrays, call)
        program = self._programs.get(key)
        if program is None:
            trace = record(
                lambda *blanks: self._stock(inputs=list(blanks), **call), arrays
            )
            program = _compiled(self._name, self._header, trace)
            self._programs[key] = program
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
        template and tuple((name, type(value), value) for name, value in template),
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
            f"kernel {name}: the emulator runs at once and cannot be traced by "
            "mx.compile, mx.vmap or mx.export_function. Run without them "
            "(mx.disable_compile() turns mx.compile off), or let stock MLX compute: "
            "MLX_MARLIN_BACKEND=stock."
        ) from None


def _raw(array: mx.array) -> npt.NDArray[Any]:
    """The array's memory as NumPy sees it, bfloat16 as uint16; no copy."""
    import numpy as np

    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.asarray(array)


@functools.cache
def _fresh_residue() -> int:
    """Address modulo 16 of an array at the start of its buffer, for this MLX."""
    fresh = _raw(mx.zeros((64,), mx.uint8))
    return int(fresh.ctypes.data) % 16


def _input(
    name: str, array: mx.array, copy_strided: bool
) -> tuple[Any, engine.Argument]:
    """The memory of an input, and the array that its strides describe."""
    import numpy as np

    raw = _raw(array)
    residue = (raw.ctypes.data - _fresh_residue()) % 16
    if not raw.flags.c_contiguous:
        if not copy_strided:
            return raw, _strided(name, raw, residue)
        raw, residue = np.ascontiguousarray(raw), 0
    contents = raw.reshape(-1).view(np.uint8)
    return raw, engine.Argument(name, contents, contents.size, residue)


def _strided(name: str, raw: npt.NDArray[Any], residue: int) -> engine.Argument:
    """All bytes between the first and the last element of a view, in memory order."""
    import numpy as np

    reach = [(n - 1) * step for n, step in zip(raw.shape, raw.strides, strict=True)]
    before = -sum(step for step in reach if step < 0)
    size = before + sum(step for step in reach if step > 0) + raw.itemsize
    block = (ctypes.c_uint8 * size).from_address(raw.ctypes.data - before)
    contents = np.frombuffer(block, np.uint8)
    return engine.Argument(name, contents, size, (residue - before) % 16, origin=before)


def _arguments(program: _Program, arrays: list[mx.array]) -> list[engine.Argument]:
    import numpy as np

    result = []
    names = iter(program.buffers)
    for array, info in zip(arrays, program.trace.info, strict=True):
        name = next(names).name
        raw, argument = _input(name, array, program.trace.ensure_row_contiguous)
        result.append(argument)
        if array.ndim == 0:
            continue
        values = (
            np.array(raw.shape, np.int32),
            np.array(raw.strides, np.int64) // max(1, raw.itemsize),
            np.array([raw.ndim], np.int32),
        )
        for wanted, value in zip(info, values, strict=True):
            if wanted:
                contents = value.view(np.uint8)
                result.append(
                    engine.Argument(next(names).name, contents, contents.size, 0)
                )
    return result


def _output(
    name: str, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None
) -> engine.Argument:
    import numpy as np

    size = math.prod(shape) * dtype.size
    contents = None
    if init_value is not None:
        contents = (
            _raw(mx.full(tuple(shape), init_value, dtype)).reshape(-1).view(np.uint8)
        )
    return engine.Argument(name, contents, size, 0, writable=True)


def _check_sizes(trace: Trace) -> None:
    threads = math.prod(trace.threadgroup)
    if threads > engine.MAX_THREADS:
        raise ValueError(
            f"Thread group size ({threads}) is greater than  the maximum allowed threads "
            f"per threadgroup ({engine.MAX_THREADS})."
        )
    if min(trace.grid) < 0 or min(trace.threadgroup) < 1:
        raise ValueError(
            f"grid={trace.grid} must not be negative and threadgroup="
            f"{trace.threadgroup} must be positive"
        )


def _execute(
    program: _Program,
    arrays: list[mx.array],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[mx.Dtype],
    init_value: float | None,
) -> list[mx.array]:
    arguments = _arguments(program, arrays)
    names = program.buffers[len(arguments) :]
    for buffer, shape, dtype in zip(names, shapes, dtypes, strict=True):
        arguments.append(_output(buffer.name, shape, dtype, init_value))
    _check_sizes(program.trace)
    options = _current()
    trace = program.trace
    group = tuple(min(a, b) for a, b in zip(trace.threadgroup, trace.grid, strict=True))
    with engine.placed(arguments) as buffers:
        if all(trace.grid):
            outcome = engine.run(
                program.kernel,
                buffers,
                trace.grid,
                group,
                options.seed,
                options.workers,
            )
            if outcome.report.fault:
                scene = report.Scene(
                    program.name, program.kernel, program.source, buffers, outcome
                )
                raise EmulatorError(report.fault_message(scene))
        outputs = buffers[len(buffers) - len(shapes) :]
        for placed in outputs:
            if side := placed.canary():
                raise EmulatorError(report.canary_message(program.name, placed, side))
        return [
            _collect(placed, shape, dtype)
            for placed, shape, dtype in zip(outputs, shapes, dtypes, strict=True)
        ]


def _collect(placed: engine.Placed, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    if not placed.argument.size:
        return mx.zeros(tuple(shape), dtype)
    import numpy as np

    contents = placed.contents()
    if dtype == mx.bfloat16:
        return mx.array(contents.view(np.uint16).reshape(shape)).view(mx.bfloat16)
    return mx.array(contents.view(_NUMPY[dtype]).reshape(shape))


_NUMPY = {
    mx.bool_: "bool",
    mx.int8: "int8",
    mx.int16: "int16",
    mx.int32: "int32",
    mx.int64: "int64",
    mx.uint8: "uint8",
    mx.uint16: "uint16",
    mx.uint32: "uint32",
    mx.uint64: "uint64",
    mx.float16: "float16",
    mx.float32: "float32",
    mx.complex64: "complex64",
}


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
    """Makes a kernel that runs on the CPU, from the arguments of `mx.fast.metal_kernel`."""
    stock = _stock(
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
