"""Makes kernels: the only file that asks MLX, or the emulator, for one.

Which implementation answers is one function, `backend`: Metal or CUDA where MLX has it,
the emulator on a CPU-only MLX, stock MLX where none can run.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import Any, Protocol, cast

import mlx.core as mx

from mlx_marlin.kernel_arguments import TemplateValue
from mlx_marlin.plan import Plan
from mlx_marlin.source import Source

BACKENDS = ("metal", "cuda", "emulator", "stock")
ON_GPU = ("metal", "cuda")
"""Those where stock MLX runs on the same GPU."""
DEVICES = {"metal": "Metal", "cuda": "CUDA"}
"""What these are called."""
ENVIRONMENT = "MLX_MARLIN_BACKEND"
IN_CONSTANT = 8
"""MLX hands inputs of fewer elements over in Metal's `constant` address space, which
our kernels' `device` pointers do not reach. CUDA has no such rule."""


class KernelCall(Protocol):
    """What `mx.fast.metal_kernel` and `cuda_kernel` return, to MLX an `object`."""

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, mx.Dtype | int | bool]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        init_value: float | None = None,
    ) -> list[mx.array]:
        """Adds one dispatch to the graph."""
        ...


@cache
def backend() -> str:
    """Returns what runs our kernels here: "metal", "cuda", "emulator" or "stock".

    `MLX_MARLIN_BACKEND` overrides the choice. Asked once per process.
    """
    name, reason = choice()
    if name == "stock" and forced_backend() is None and not _default_is_gpu():
        warnings.warn(
            f"mlx_marlin: stock MLX serves every call, because {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return name


@cache
def choice() -> tuple[str, str]:
    """Returns the back end and why it is that one."""
    wish = forced_backend()
    if wish is not None:
        return wish, f"{ENVIRONMENT}={wish!r} is set"
    # Whatever the default device is now: it may be another one at the next call.
    for name in ON_GPU:
        if has_device(name):
            return name, f"MLX has a {DEVICES[name]} device"
    if _default_is_gpu():
        return "stock", "MLX's default device is a GPU without Metal and CUDA"
    from mlx_marlin import emulator

    reason = emulator.unavailable()
    if reason is None:
        return "emulator", "MLX has no GPU here, and the emulator can compile kernels"
    return "stock", (f"there is no Metal here and the emulator cannot run: {reason}")


@cache
def forced_backend() -> str | None:
    """Returns the back end that `MLX_MARLIN_BACKEND` asks for, if any.

    Raises:
        ValueError: If it names none of ours.
    """
    wish = os.environ.get(ENVIRONMENT)
    if wish and wish not in BACKENDS:
        raise ValueError(f"{ENVIRONMENT}={wish!r} is not one of {', '.join(BACKENDS)}")
    return wish or None


def has_device(name: str) -> bool:
    """Returns whether MLX has a device for a back end of `ON_GPU`."""
    return bool(getattr(mx, name).is_available())


def missing() -> str | None:
    """Returns why the back end that is forced cannot compute here, or None.

    Graphs of its kernels can still be built and exported.
    """
    wish = forced_backend()
    if wish not in ON_GPU or has_device(wish):
        return None
    others = [each for each in BACKENDS if each not in ON_GPU or has_device(each)]
    return (
        f"{ENVIRONMENT}={wish!r} needs a {DEVICES[wish]} device, and MLX has none "
        f"here: expected {', '.join(others)}, or no value"
    )


def may_hand_over() -> bool:
    """Whether stock MLX, or MLX's plain product, may serve what is faster there.

    It runs on the same GPU then, and nobody insists on a back end to see it run.
    """
    return backend() in ON_GPU and forced_backend() is None


def forget() -> None:
    """Drops what was asked once and built once: back end, kernels."""
    for cached in (backend, choice, forced_backend, kernel, _cuda_kernel):
        cached.cache_clear()


def kernel_of(plan: Plan, text: Source) -> KernelCall:
    """Returns a plan's kernel."""
    if not plan.on_cuda:
        return kernel(text)
    return lazily(text, plan.threadgroup_bytes if "x" in text.input_names else 0)


def lazily(text: Source, shared_memory: int) -> KernelCall:
    """Returns a CUDA kernel that its first call builds.

    Only a machine with CUDA can have it, and any machine may plan.
    """
    built = cache(partial(_cuda_kernel, text, shared_memory))

    def call(**arguments: Any) -> list[mx.array]:
        return built()(**arguments)

    return call


@cache
def kernel(text: Source) -> KernelCall:
    """Returns the kernel of a Metal text, which is built once."""
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
    reason = missing()
    return built if reason is None else _without_device(text.name, built, reason)


def _without_device(name: str, built: KernelCall, reason: str) -> KernelCall:
    """Returns a kernel that can be traced; a call outside of a trace says why not."""

    def call(**arguments: Any) -> list[mx.array]:
        try:
            return built(**arguments)
        except RuntimeError as error:  # "No Metal back-end."
            raise ValueError(f"the kernel {name} cannot run: {reason}") from error

    return call


def inputs_of(
    text: Source, names: Sequence[str], numbers: dict[str, mx.array]
) -> Callable[..., tuple[mx.array, ...]]:
    """Returns what picks a kernel's inputs from arrays of these names and numbers."""
    constants = tuple(numbers.values())
    order = [*numbers, *names]
    pick = itemgetter(*map(order.index, text.input_names))

    def inputs(*arrays: mx.array) -> tuple[mx.array, ...]:
        picked: tuple[mx.array, ...] = pick((*constants, *arrays))
        return picked

    return inputs


def readable(array: mx.array) -> mx.array:
    """Pads an array that MLX would hand over in `constant`."""
    if array.size >= IN_CONSTANT or backend() == "cuda":
        return array
    return mx.pad(array.flatten(), (0, IN_CONSTANT - array.size))


def template(
    values: dict[str, TemplateValue],
) -> list[tuple[str, mx.Dtype | int | bool]]:
    """Returns template arguments as MLX takes them, with dtypes for their names."""
    return [
        (name, dtype(value) if isinstance(value, str) else value)
        for name, value in values.items()
    ]


def dtype(name: str) -> mx.Dtype:
    """Returns the dtype of a name."""
    return cast(mx.Dtype, getattr(mx, name))


def dtype_name(dtype: mx.Dtype) -> str:
    """Returns "float16" for `mx.float16`: the name that plans know a dtype by."""
    return str(dtype).removeprefix("mlx.core.")


@cache
def _cuda_kernel(text: Source, shared_memory: int) -> KernelCall:
    if not mx.cuda.is_available():
        reason = missing() or "MLX has no CUDA device here"
        raise ValueError(f"the kernel {text.name} cannot run: {reason}")
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
    if backend() != "emulator":
        return mx.fast.metal_kernel
    from mlx_marlin.emulator import metal_kernel

    return metal_kernel


def _default_is_gpu() -> bool:
    return mx.default_device() != mx.Device(mx.cpu)
