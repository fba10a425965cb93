"""Makes kernels: the only module that asks MLX, or the emulator, for one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import itemgetter
from typing import Any, cast

import mlx.core as mx

from mlx_marlin import state
from mlx_marlin.backends import selection
from mlx_marlin.backends.arguments import TemplateValue
from mlx_marlin.backends.base import KernelCall, Prepared
from mlx_marlin.backends.source import Source
from mlx_marlin.weights.dtypes import dtype, dtype_name

IN_CONSTANT = 8
"""MLX passes Metal inputs of fewer elements in the `constant` address space, which the
`device` pointers of our kernels cannot read."""


Template = tuple[tuple[str, TemplateValue], ...]
Dtypes = tuple[str, ...]
Compilations = dict[str, Callable[[], None]]
"""What compiles kernels, by their names. Threads may run them at the same time."""
Prepare = Callable[[Source, Template, Dtypes, Dtypes], Prepared]
"""Prepares a kernel with template arguments and the dtypes of inputs and outputs."""

_deferred: ContextVar[Compilations | None] = ContextVar("deferred", default=None)


@contextmanager
def deferred() -> Iterator[Compilations]:
    """Collects the kernels of calls instead of compiling them.

    Graphs that are built in this context must not be evaluated.
    """
    compilations: Compilations = {}
    token = _deferred.set(compilations)
    try:
        yield compilations
    finally:
        _deferred.reset(token)


def are_deferred() -> bool:
    """Returns whether calls are made only to collect their kernels."""
    return _deferred.get() is not None


def lazily(text: Source, shared_memory: int, prepare: Prepare) -> KernelCall:
    """Returns a CUDA kernel that is prepared and built by its first call.

    Plans are made on any machine; kernels can be built only where MLX has CUDA.

    Args:
        text: The kernel.
        shared_memory: Bytes of dynamic shared memory.
        prepare: Prepares the kernel with the arguments of its first call.
    """
    built: list[KernelCall] = []

    def call(**arguments: Any) -> list[mx.array]:
        if not built:
            built.append(_prepared(text, shared_memory, prepare, arguments))
        return built[0](**arguments)

    return call


@state.cache()
def kernel(text: Source) -> KernelCall:
    """Returns the kernel of a Metal text; cached."""
    built = cast(
        KernelCall,
        _factory()(
            name=text.name,
            input_names=list(text.input_names),
            output_names=list(text.output_names),
            header=text.header,
            source=text.source,
            atomic_outputs=text.atomic,
        ),
    )
    reason = selection.missing()
    return built if reason is None else _without_device(text.name, built, reason)


def _without_device(name: str, built: KernelCall, reason: str) -> KernelCall:
    """Returns a kernel that can only be traced: a call outside of a trace fails."""

    def call(**arguments: Any) -> list[mx.array]:
        try:
            return built(**arguments)
        except RuntimeError as error:  # "No Metal back-end."
            raise ValueError(f"the kernel {name} cannot run: {reason}") from error

    return call


def inputs_of(
    text: Source,
    names: Sequence[str],
    numbers: dict[str, mx.array],
    stand_ins: Mapping[str, str] | None = None,
) -> Callable[..., tuple[mx.array, ...]]:
    """Returns a function that picks the inputs of a kernel.

    Args:
        text: The kernel.
        names: Names of the arrays that the function takes, in order.
        numbers: Constant arrays by their names.
        stand_ins: For inputs that the kernel does not read, and that are not among the
            others: the name of an array that stands in for it.
    """
    stand_ins = stand_ins or {}
    constants = tuple(numbers.values())
    order = [*numbers, *names]
    found = (n if n in order else stand_ins[n] for n in text.input_names)
    pick = itemgetter(*map(order.index, found))

    def inputs(*arrays: mx.array) -> tuple[mx.array, ...]:
        picked: tuple[mx.array, ...] = pick((*constants, *arrays))
        return picked

    return inputs


def readable(array: mx.array) -> mx.array:
    """Returns an array that the kernels can read: pads small ones where needed."""
    if array.size >= IN_CONSTANT or not selection.traits().pads_small_inputs:
        return array
    return mx.pad(array.flatten(), (0, IN_CONSTANT - array.size))


def template(
    values: dict[str, TemplateValue],
) -> list[tuple[str, mx.Dtype | int | bool]]:
    """Returns template arguments with dtypes of MLX instead of their names."""
    return [
        (name, dtype(value) if isinstance(value, str) else value)
        for name, value in values.items()
    ]


def _prepared(
    text: Source, shared_memory: int, prepare: Prepare, arguments: dict[str, Any]
) -> KernelCall:
    if not mx.cuda.is_available():
        reason = selection.missing() or "MLX has no CUDA device here"
        raise ValueError(f"the kernel {text.name} cannot run: {reason}")
    prepared = prepare(
        text,
        tuple((name, _plain(value)) for name, value in arguments["template"]),
        tuple(dtype_name(array.dtype) for array in arguments["inputs"]),
        tuple(map(dtype_name, arguments["output_dtypes"])),
    )
    if prepared.compile is not None:
        compilations = _deferred.get()
        if compilations is None:
            prepared.compile()
        else:
            compilations[prepared.name] = prepared.compile
    return _cuda_kernel(prepared.source, shared_memory)


def _plain(value: mx.Dtype | int | bool) -> TemplateValue:
    """Returns a template argument with the name of a dtype instead of the dtype."""
    return dtype_name(value) if isinstance(value, mx.Dtype) else value


@state.cache()
def _cuda_kernel(text: Source, shared_memory: int) -> KernelCall:
    return cast(
        KernelCall,
        mx.fast.cuda_kernel(
            name=text.name,
            input_names=list(text.input_names),
            output_names=list(text.output_names),
            header=text.header,
            source=text.source,
            shared_memory=shared_memory,
        ),
    )


def _factory() -> Callable[..., object]:
    if selection.backend() != "emulator":
        return mx.fast.metal_kernel
    from mlx_marlin.emulator import metal_kernel

    return metal_kernel
