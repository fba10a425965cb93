"""An implementation of `mx.fast.metal_kernel` that runs on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metal_emulator import modes
from metal_emulator.arrays import info_arguments, input_argument, output_argument
from metal_emulator.dispatch import Dispatch, record
from metal_emulator.errors import told_to_caller
from metal_emulator.language import frontend
from metal_emulator.language.lines import SourceMap
from metal_emulator.memory import Argument
from metal_emulator.program import (
    Program,
    Programs,
    check_sizes,
    evaluated,
    execute,
)

# Read at import, because `emulated` replaces it; pytest's plugin wraps it before.
_stock = inspect.unwrap(mx.fast.metal_kernel)


@dataclass(frozen=True)
class Recorded:
    """A compiled call: what MLX generates for it, and the program."""

    dispatch: Dispatch  # MLX's dispatch
    # The memory parameters of the signature that MLX has written
    buffers: tuple[frontend.Buffer, ...]
    program: Program  # The compiled kernel

    @classmethod
    def compiled(cls, name: str, header: str, dispatch: Dispatch) -> Recorded:
        """Compiles what MLX has generated, with this context's options."""
        translation = frontend.translate(dispatch.kernel, dispatch.text)
        source = SourceMap(dispatch.text, header, translation.body_line)
        program = Program.compiled(name, source, translation.text, modes.options.get())
        return cls(dispatch, translation.buffers, program)

    def run(
        self,
        arrays: list[mx.array],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[mx.Dtype],
        init_value: float | None = None,
    ) -> list[mx.array]:
        """Runs the kernel on evaluated inputs and returns its outputs."""
        check_sizes(self.dispatch)
        arguments = self._inputs(arrays)
        outputs = self.buffers[len(arguments) :]
        for output, shape, dtype in zip(outputs, shapes, dtypes, strict=True):
            arguments.append(output_argument(output.name, shape, dtype, init_value))
        return execute(self.program, self.dispatch, arguments, arrays, shapes, dtypes)

    def _inputs(self, arrays: list[mx.array]) -> list[Argument]:
        result: list[Argument] = []
        names = (buffer.name for buffer in self.buffers)
        copies = self.dispatch.ensure_row_contiguous
        for array, info in zip(arrays, self.dispatch.info, strict=True):
            raw, memory = input_argument(next(names), array, copies)
            result += [memory, *info_arguments(raw, info, names)]
        return result


class MetalKernel:
    """A custom kernel that runs on the CPU, called like a kernel of MLX.

    Attributes:
        stock: The kernel of MLX.
    """

    def __init__(self, name: str, header: str, stock: Callable[..., Any]) -> None:
        self._name = name
        self._header = header
        self.stock = stock
        self._programs = Programs()

    @told_to_caller
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
        arrays = evaluated(self._name, inputs)
        call = {
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "grid": grid,
            "threadgroup": threadgroup,
            "template": template,
            "stream": stream,
        }
        recorded = self._recorded(arrays, call)
        if verbose:
            print(recorded.dispatch.text)
        return recorded.run(arrays, output_shapes, output_dtypes, init_value)

    def compile(
        self,
        *,
        inputs: Sequence[Any],
        init_value: float | None = None,
        verbose: bool = False,
        **call: Any,
    ) -> None:
        """Compiles the kernel for a call with these arguments, and does not run it.

        Raises:
            EmulatorError: As for a call.
            CompileError: As for a call.
        """
        call = {"template": None, "stream": None, **call}
        self._recorded(evaluated(self._name, inputs), call)

    def _recorded(self, arrays: list[Any], call: dict[str, Any]) -> Recorded:
        def make() -> Recorded:
            dispatch = record(
                lambda *blanks: self.stock(inputs=list(blanks), **call), arrays
            )
            return Recorded.compiled(self._name, self._header, dispatch)

        found: Recorded = self._programs.get(
            _key(arrays, call), modes.options.get(), make
        )
        return found


@dataclass(frozen=True)
class DeferredKernel:
    """A kernel that is emulated if called inside of `emulated`, and else MLX's."""

    emulated: MetalKernel

    def __call__(self, *inputs: Any, **call: Any) -> Any:
        """Runs the kernel that `mx.fast.metal_kernel` would return now."""
        __tracebackhide__ = True  # for pytest
        inside = mx.fast.metal_kernel is metal_kernel
        return (self.emulated if inside else self.emulated.stock)(*inputs, **call)


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
