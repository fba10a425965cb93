"""Runs plans: the only file that asks MLX for a Metal kernel. It decides nothing.

Which implementation answers is one function, `backend`: Metal where MLX has it, the
emulator on a CPU-only MLX, stock MLX where neither can run.
"""

import os
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol, cast

import mlx.core as mx

from mlx_marlin import source
from mlx_marlin.plan import Plan

BACKENDS = ("metal", "emulator", "stock")
ENVIRONMENT = "MLX_MARLIN_BACKEND"
IN_CONSTANT = 8
"""MLX hands inputs of fewer elements over in Metal's `constant` address space, which
our kernels' `device` pointers do not reach."""
REMEMBERED = 4096
"""Plans that `plans_built` tells of."""

Product = Callable[[mx.array, mx.array, mx.array, mx.array], mx.array]
"""From x [m, k], codes, scales and biases to y [m, n]."""


class KernelCall(Protocol):
    """What `mx.fast.metal_kernel` returns, which MLX types as `object`."""

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, mx.Dtype | int | bool]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Adds one dispatch to the graph."""
        ...


@cache
def backend() -> str:
    """Returns what runs our kernels here: "metal", "emulator" or "stock".

    `MLX_MARLIN_BACKEND` overrides the choice. Asked once per process.
    """
    wish = forced_backend()
    if wish is not None:
        return wish
    if mx.metal.is_available():
        return "metal"
    if mx.default_device() != mx.Device(mx.cpu):
        return "stock"  # MLX's CUDA back end cannot run Metal
    from mlx_marlin import emulator

    reason = emulator.unavailable()
    if reason is None:
        return "emulator"
    warnings.warn(
        f"mlx_marlin: stock MLX serves every call, because there is no Metal here and "
        f"the emulator cannot run: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
    return "stock"


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


def forget() -> None:
    """Drops what was asked once and built once: back end, kernels, plans built."""
    for cached in (backend, forced_backend, _kernel):
        cached.cache_clear()
    _built.clear()


def plans_built() -> list[Plan]:
    """Returns the plans that were prepared last, oldest first, each once."""
    return list(dict.fromkeys(list(_built)))


def product(plan: Plan) -> Product:
    """Builds the call that runs a plan.

    Returns:
        A function from x [m, k] in the problem's dtype, codes, scales and biases in
        the problem's layout (packed: biases are interleaved with the scales, and the
        argument is not read) to y [m, n] in the problem's dtype.
    """
    _built.append(plan)
    multiply = _multiply(plan)
    if not plan.is_split:
        return multiply
    reduce = reduction(plan)
    return lambda x, w, scales, biases: reduce(multiply(x, w, scales, biases))


def reduction(plan: Plan) -> Callable[[mx.array], mx.array]:
    """Builds the call that adds a split plan's partial sums, in ascending k.

    Returns:
        A function from float32 [k_parallel, m, n] to y [m, n] in the problem's dtype.
    """
    kernel = _kernel(source.reduce_source())
    shape = (plan.problem.m, plan.problem.n)
    template = _template(source.reduce_template(plan))
    params = mx.array(source.params(plan), mx.int32)
    size = shape[0] * shape[1]

    def reduce(partials: mx.array) -> mx.array:
        return kernel(
            inputs=(partials, params),
            template=template,
            grid=(size, 1, 1),
            threadgroup=(min(size, 256), 1, 1),
            output_shapes=(shape,),
            output_dtypes=(_dtype(plan.problem.dtype),),
        )[0]

    return reduce


_built: deque[Plan] = deque(maxlen=REMEMBERED)


@cache
def _kernel(text: source.Source) -> KernelCall:
    return cast(
        KernelCall,
        _factory()(
            name=text.name,
            input_names=list(text.input_names),
            output_names=list(text.output_names),
            header=text.header,
            source=text.source,
        ),
    )


def _factory() -> Callable[..., object]:
    if backend() != "emulator":
        return mx.fast.metal_kernel
    from mlx_marlin.emulator import metal_kernel

    return metal_kernel


def _multiply(plan: Plan) -> Product:
    problem = plan.problem
    kernel = _kernel(source.product_source(plan.kernel))
    dtype = mx.float32 if plan.is_split else _dtype(problem.dtype)
    shape = plan.workspace_shape if plan.is_split else (problem.m, problem.n)
    template = _template(source.product_template(plan))
    grid = (plan.num_threadgroups * plan.threads, 1, 1)
    threadgroup = (plan.threads, 1, 1)
    params = mx.array(source.params(plan), mx.int32)
    sizes = (problem.n * problem.groups, problem.n * problem.k // 8)
    small = min(sizes) < IN_CONSTANT

    def multiply(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array
    ) -> mx.array:
        if small:
            w, scales, biases = _padded(w), _padded(scales), _padded(biases)
        return kernel(
            inputs=(x, w, scales, biases, params),
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=(shape,),
            output_dtypes=(dtype,),
        )[0]

    return multiply


def _padded(array: mx.array) -> mx.array:
    flat = array.flatten()
    return mx.pad(flat, (0, max(IN_CONSTANT - flat.size, 0)))


def _template(
    values: dict[str, source.TemplateValue],
) -> list[tuple[str, mx.Dtype | int | bool]]:
    return [
        (name, _dtype(value) if isinstance(value, str) else value)
        for name, value in values.items()
    ]


def _dtype(name: str) -> mx.Dtype:
    return cast(mx.Dtype, getattr(mx, name))
