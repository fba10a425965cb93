"""Makes kernels: the only module that asks MLX, or the emulator, for one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, cast

import mlx.core as mx

from mlx_marlin import state
from mlx_marlin.backends import selection
from mlx_marlin.backends.base import KernelCall, Prepared
from mlx_marlin.backends.build import IN_CONSTANT
from mlx_marlin.backends.launch import Launch, TemplateValue
from mlx_marlin.backends.source import Source
from mlx_marlin.weights.dtypes import dtype

Compilations = dict[str, Callable[[], None]]
"""What compiles kernels, by their names. Threads may run them at the same time."""
Prepare = Callable[[Launch], Prepared]
"""Prepares the kernel of a launch."""

Watch = Callable[[], AbstractContextManager[None]]
"""Returns a context around each evaluation of kernels."""

_deferred: ContextVar[Compilations | None] = ContextVar("deferred", default=None)
_watch: ContextVar[Watch] = ContextVar("watch", default=nullcontext)


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


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Has `evaluation` enter a context of `watch`."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def evaluation() -> AbstractContextManager[None]:
    """Returns the context in which kernels are evaluated.

    What a back end compiles when a graph is built, it compiles outside of the context.
    Metal compiles a kernel when MLX evaluates it.
    """
    return _watch.get()()


def lazily(launch: Launch, prepare: Prepare) -> KernelCall:
    """Returns a CUDA kernel that is prepared and built by its first call.

    Plans are made on any machine; kernels can be built only where MLX has CUDA.
    """
    built: list[KernelCall] = []

    def call(**arguments: Any) -> list[mx.array]:
        if not built:
            built.append(_prepared(launch, prepare))
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
            compile_options={"math_mode": "safe"},  # exp(-inf) is 0
        ),
    )
    if selection.backend() == "emulator":
        return _eager(built)
    reason = selection.missing()
    return built if reason is None else _without_device(text.name, built, reason)


def _eager(built: KernelCall) -> KernelCall:
    """Returns a kernel of the emulator, whose calls compile and evaluate it."""
    compile = getattr(built, "compile", None)

    def call(**arguments: Any) -> list[mx.array]:
        if _watch.get() is nullcontext:
            return built(**arguments)
        if compile is not None:
            compile(**arguments)
        with evaluation():
            return built(**arguments)

    return call


def _without_device(name: str, built: KernelCall, reason: str) -> KernelCall:
    """Returns a kernel that can only be traced: a call outside of a trace fails."""

    def call(**arguments: Any) -> list[mx.array]:
        try:
            return built(**arguments)
        except RuntimeError as error:  # "No Metal back-end."
            raise ValueError(f"the kernel {name} cannot run: {reason}") from error

    return call


def readable(array: mx.array) -> mx.array:
    """Returns an array that the kernels can read: pads small ones where needed."""
    if array.size >= IN_CONSTANT or not selection.traits().pads_small_inputs:
        return array
    return mx.pad(array.flatten(), (0, IN_CONSTANT - array.size))


def template(
    values: Sequence[tuple[str, TemplateValue]],
) -> list[tuple[str, mx.Dtype | int | bool]]:
    """Returns template arguments with dtypes of MLX instead of their names."""
    return [
        (name, dtype(value) if isinstance(value, str) else value)
        for name, value in values
    ]


def _prepared(launch: Launch, prepare: Prepare) -> KernelCall:
    if not mx.cuda.is_available():
        reason = selection.missing() or "MLX has no CUDA device here"
        raise ValueError(f"the kernel {launch.source.name} cannot run: {reason}")
    prepared = prepare(launch)
    if prepared.compile is not None:
        compilations = _deferred.get()
        if compilations is None:
            prepared.compile()
        else:
            compilations[prepared.name] = prepared.compile
    return _cuda_kernel(prepared.source, launch.shared_bytes)


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
    from metal_emulator import metal_kernel

    return metal_kernel
