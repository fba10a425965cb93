"""Runs plans: the only file that asks MLX for a kernel. It decides nothing.

Which implementation answers is one function, `backend`: Metal or CUDA where MLX has it,
the emulator on a CPU-only MLX, stock MLX where none can run.
"""

import math
import os
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, Protocol, cast

import mlx.core as mx

from mlx_marlin import layout, source
from mlx_marlin.dense_plan import DensePlan
from mlx_marlin.formats import TILE_K, TILE_N
from mlx_marlin.gather_plan import GatherPlan
from mlx_marlin.kernels import SIMD_WIDTH
from mlx_marlin.plan import Plan
from mlx_marlin.problem import PLAIN, Problem

BACKENDS = ("metal", "cuda", "emulator", "stock")
ON_GPU = ("metal", "cuda")
"""Those where stock MLX runs on the same GPU."""
ENVIRONMENT = "MLX_MARLIN_BACKEND"
IN_CONSTANT = 8
"""MLX hands inputs of fewer elements over in Metal's `constant` address space, which
our kernels' `device` pointers do not reach. CUDA has no such rule."""
REPACK_THREADS = 256
"""Threads that move some tiles of a weight."""
ROWS_OF_THREAD = 4
"""Rows of a column that a thread of the reduce finishes; the shader says the same."""
REMEMBERED = 4096
"""Plans that `plans_built` tells of."""

Product = Callable[..., mx.array]
"""From x [..., k], m rows in all, codes, scales and biases to y [..., n]; with an
epilogue, bias [n], multiplier [..., n] and residual [..., n] follow, those that it has
not as any array. Of a batch of products x is [batch, m, k], y [batch, m, n], and a
weight's arrays have the batch as a first dimension. With parts, there is a tuple of y
[..., columns], and callers know it."""


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
    wish = forced_backend()
    if wish is not None:
        return wish
    if mx.metal.is_available():
        return "metal"
    if mx.default_device() != mx.Device(mx.cpu):
        return "cuda" if mx.cuda.is_available() else "stock"
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
    for cached in (backend, forced_backend, _kernel, _cuda_kernel):
        cached.cache_clear()
    _built.clear()


def plans_built() -> list[Plan]:
    """Returns the plans that were prepared last, oldest first, each once."""
    return list(dict.fromkeys(list(_built)))


def product(plan: Plan) -> Product:
    """Builds the call that runs a plan.

    Returns:
        A function from x [..., k] in the problem's dtype, codes, scales and biases in
        the problem's layout (packed: biases are interleaved with the scales, and the
        argument is not read, unless it is a global scale, float32 [2]) to y [..., n] in
        the problem's dtype. If the problem has an epilogue, bias, multiplier and
        residual follow, in the problem's dtype; those that it leaves out are not read.
        With parts, there is a tuple of results, [..., columns] each.
    """
    _built.append(plan)
    multiply = _multiply(plan)
    if not plan.finishes:
        return multiply
    reduce = reduction(plan)
    return lambda x, w, scales, biases, *finish: reduce(
        multiply(x, w, scales, biases), *finish, rows=x.shape[:-1]
    )


def dense_product(plan: DensePlan) -> Product:
    """Builds the call that decodes a weight and multiplies it with MLX's own product.

    Returns:
        A function as `product` builds it, without an epilogue's arrays. Of several
        weights, x and the weights are broadcast, and both may have any dimensions
        before their own.
    """
    decoders = [_decoder(plan, block) for block in plan.chunks]

    def multiply(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array
    ) -> mx.array:
        parts = []
        for decode in decoders:
            weight = decode(w, scales, biases)
            if plan.problem.batch > 1:
                whole = weight.reshape(*w.shape[:-3], plan.padded_n, -1)
                weight = whole[..., : plan.problem.n, :]
            parts.append(x @ (weight.T if plan.transposed else weight))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    return multiply


def gather_product(plan: GatherPlan) -> Callable[..., mx.array]:
    """Builds the call that multiplies rows by the experts that they chose.

    Returns:
        A function from x [rows, k] in the problem's dtype, codes, scales and biases
        [experts, n, ...], the row of x and the expert of each pair (uint32 [pairs]) to
        y [pairs, n] in the problem's dtype.
    """
    problem = plan.problem
    kernel = _kernel(source.gather_source())
    template = _template(source.gather_template(plan))
    shape = mx.array((problem.m, problem.n, problem.k), mx.int32)
    grid = (plan.num_threadgroups * plan.threads, 1, 1)

    def multiply(*arrays: mx.array) -> mx.array:
        return kernel(
            inputs=(*map(_readable, arrays), shape),
            template=template,
            grid=grid,
            threadgroup=(plan.threads, 1, 1),
            output_shapes=((problem.m, problem.n),),
            output_dtypes=(_dtype(problem.dtype),),
        )[0]

    return multiply


def dequantized(plan: DensePlan) -> Callable[[mx.array, mx.array, mx.array], mx.array]:
    """Builds the call that decodes a whole weight.

    Returns:
        A function from codes, scales and biases to the weight [n, k] in the problem's
        dtype.
    """
    problem = plan.problem
    return _decoder(plan, (0, plan.rows, 0, problem.k))


def repack(
    to: str, *, n: int, k: int, bits: int, group_size: int
) -> Callable[[mx.array], mx.array]:
    """Builds the call that moves codes from a layout to the other.

    Args:
        to: The layout that they come to, "mlx" or "marlin".
        n: Rows of a weight.
        k: Columns of a weight.
        bits: Bits of a code.
        group_size: Weights along k that share a scale.

    Returns:
        A function from the codes of one weight or a batch, uint32 [..., n,
        k * bits / 32] or [..., n tiles, k tiles, words], to the other of these.
    """
    kernel = _kernel(source.repack_source(to))
    template = _template(
        source.repack_template(bits, layout.order_of_group(group_size))
    )
    n_tiles, k_tiles = (-(-n // TILE_N), -(-k // TILE_K))
    native = (n, k * bits // 32)
    packed = (n_tiles, k_tiles, layout.tile_words(bits))
    given, made = (native, packed) if to == "marlin" else (packed, native)
    threads = REPACK_THREADS * -(-k_tiles // source.repack_tiles(bits))
    shape = mx.array((n, k), mx.int32)

    def move(w: mx.array) -> mx.array:
        batch = w.shape[: w.ndim - len(given)]
        return kernel(
            inputs=(_readable(w), shape),
            template=template,
            grid=(threads, n_tiles, math.prod(batch)),
            threadgroup=(REPACK_THREADS, 1, 1),
            output_shapes=((*batch, *made),),
            output_dtypes=(mx.uint32,),
        )[0]

    return move


def _decoder(
    plan: DensePlan, block: tuple[int, int, int, int]
) -> Callable[[mx.array, mx.array, mx.array], mx.array]:
    problem = plan.problem
    on_cuda = backend() == "cuda"
    text = source.decoding_source(problem) if on_cuda else source.dequantize_source()
    kernel = _lazily(text, 0) if on_cuda else _kernel(text)
    template = _template(source.weight_template(problem))
    _, rows, _, length = block
    steps = length // (32 if problem.group_size == 32 else TILE_K)
    threads = SIMD_WIDTH * -(-rows // TILE_N) * steps
    shape = mx.array((plan.rows, problem.k, *block), mx.int32)
    inputs = _inputs(text, source.OPERANDS[1:], {"shape": shape, "numbers": shape})
    dtype = _dtype(problem.dtype)

    def decode(w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        if problem.global_scale:
            biases = biases.view(mx.uint8)
        return kernel(
            inputs=inputs(_readable(w), _readable(scales), _readable(biases)),
            template=template,
            grid=(threads, 1, 1),
            threadgroup=(min(threads, 128), 1, 1),
            output_shapes=((rows, length),),
            output_dtypes=(dtype,),
        )[0]

    return decode


def reduction(plan: Plan) -> Callable[..., mx.array]:
    """Builds the call that adds a split plan's partial sums, in ascending k.

    Returns:
        A function from float32 of `workspace_shape`, and the epilogue's arrays if there
        is one, to y [m, n] in the problem's dtype, or [*rows, n].
    """
    problem = plan.problem
    text = _reduce_source(plan)
    kernel = _kernel_of(plan, text)
    template = _template(source.reduce_template(plan))
    numbers = _numbers(plan, source.finishing_schedule(plan))
    inputs = _inputs(text, ("partials", *source.FINISHING), numbers)
    threads = problem.batch * -(-problem.m // ROWS_OF_THREAD) * problem.n
    columns = _columns(text, problem)

    def reduce(
        partials: mx.array,
        *finish: mx.array,
        rows: tuple[int, ...] = problem.result_shape[:-1],
    ) -> mx.array:
        results = kernel(
            inputs=inputs(_readable(partials), *map(_readable, finish)),
            template=template,
            grid=(threads, 1, 1),
            threadgroup=(min(threads, 256), 1, 1),
            output_shapes=[(*rows, n) for n in columns],
            output_dtypes=[_dtype(problem.dtype)] * len(columns),
        )
        return _in_parts(results, problem)

    return reduce


_built: deque[Plan] = deque(maxlen=REMEMBERED)


def _kernel_of(plan: Plan, text: source.Source) -> KernelCall:
    """Returns a plan's kernel."""
    if not plan.on_cuda:
        return _kernel(text)
    return _lazily(text, plan.threadgroup_bytes if "x" in text.input_names else 0)


def _lazily(text: source.Source, shared_memory: int) -> KernelCall:
    """Returns a CUDA kernel that its first call builds.

    Only a machine with CUDA can have it, and any machine may plan.
    """
    built = cache(partial(_cuda_kernel, text, shared_memory))

    def call(**arguments: Any) -> list[mx.array]:
        return built()(**arguments)

    return call


@cache
def _cuda_kernel(text: source.Source, shared_memory: int) -> KernelCall:
    if not mx.cuda.is_available():
        others = ", ".join(each for each in BACKENDS if each != "cuda")
        raise ValueError(
            f"the kernel {text.name} needs a CUDA device, and MLX has none here: "
            f"{ENVIRONMENT}={os.environ.get(ENVIRONMENT)!r}, expected one of {others}"
        )
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
            atomic_outputs=text.atomic,
        ),
    )


def _factory() -> Callable[..., object]:
    if backend() != "emulator":
        return mx.fast.metal_kernel
    from mlx_marlin.emulator import metal_kernel

    return metal_kernel


def _multiply(plan: Plan) -> Product:
    problem = plan.problem
    fused = problem.epilogue != PLAIN and not plan.is_split
    atomic = plan.reduction == "atomic"
    text = _product_source(plan, fused, atomic)
    kernel = _kernel_of(plan, text)
    dtype = mx.float32 if plan.is_split else _dtype(problem.dtype)
    by_slots = plan.reduction == "workspace"
    slots = plan.workspace_shape if by_slots else None
    template = _template(source.product_template(plan))
    grid = (plan.num_threadgroups * plan.threads, 1, 1)
    threadgroup = (plan.threads, 1, 1)
    arrays = (*source.OPERANDS, *source.FINISHING)
    inputs = _inputs(text, arrays, _numbers(plan, source.schedule(plan)))
    words = problem.n * problem.k * problem.bits // 32
    least = problem.batch * min(problem.n * problem.groups, words)
    small = least < IN_CONSTANT
    start: dict[str, float] = {"init_value": 0.0} if atomic else {}
    columns = _columns(text, problem)

    def multiply(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *finish: mx.array
    ) -> mx.array:
        if problem.global_scale:
            biases = biases.view(mx.uint8)
        if small:
            w, scales, biases = _readable(w), _readable(scales), _readable(biases)
        rows = x.shape[:-1]
        results = kernel(
            inputs=inputs(x, w, scales, biases, *map(_readable, finish)),
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=[slots] if slots else [(*rows, n) for n in columns],
            output_dtypes=[dtype] * len(columns),
            **start,
        )
        return results[0] if plan.is_split else _in_parts(results, problem)

    return multiply


def _columns(text: source.Source, problem: Problem) -> tuple[int, ...]:
    """Returns the columns of each array that a kernel writes."""
    return (problem.n,) if text.output_names == ("out",) else problem.epilogue.parts


def _in_parts(results: list[mx.array], problem: Problem) -> mx.array:
    """Returns a result, or with parts all of them: a tuple, as callers know.

    Where a kernel wrote them one after the other, they are taken apart without a copy.
    """
    parts = problem.epilogue.parts
    if not parts:
        return results[0]
    if len(results) == 1:
        flat, rows = results[0].flatten(), results[0].shape[:-1]
        ends = [math.prod(rows) * end for end in accumulate(parts)]
        results = [
            flat[end - math.prod(rows) * columns : end].reshape(*rows, columns)
            for end, columns in zip(ends, parts, strict=True)
        ]
    return cast(mx.array, tuple(results))


def _product_source(plan: Plan, fused: bool, atomic: bool) -> source.Source:
    if plan.on_cuda:
        return source.cuda_product_source(plan)
    return source.product_source(plan.kernel, fused, atomic)


def _reduce_source(plan: Plan) -> source.Source:
    if plan.on_cuda:
        return source.sums_source(plan)
    return source.reduce_source(plan.problem.epilogue != PLAIN)


def _numbers(plan: Plan, schedule: tuple[int, ...]) -> dict[str, mx.array]:
    """Returns a plan's numbers by the names that texts have for them.

    On Metal they arrive in `constant`, where they belong: they are never padded.
    """
    named = {
        "shape": source.shape(plan),
        "schedule": schedule,
        "parts": source.parts(plan),
        "numbers": source.numbers(plan),
    }
    return {name: mx.array(each, mx.int32) for name, each in named.items()}


def _inputs(
    text: source.Source, names: Sequence[str], numbers: dict[str, mx.array]
) -> Callable[..., list[mx.array]]:
    """Returns what picks a kernel's inputs from arrays of these names and numbers."""

    def inputs(*arrays: mx.array) -> list[mx.array]:
        given = numbers | dict(zip(names, arrays, strict=False))
        return [given[name] for name in text.input_names]

    return inputs


def _readable(array: mx.array) -> mx.array:
    """Pads an array that MLX would hand over in `constant`."""
    if array.size >= IN_CONSTANT or backend() == "cuda":
        return array
    return mx.pad(array.flatten(), (0, IN_CONSTANT - array.size))


def _template(
    values: dict[str, source.TemplateValue],
) -> list[tuple[str, mx.Dtype | int | bool]]:
    return [
        (name, _dtype(value) if isinstance(value, str) else value)
        for name, value in values.items()
    ]


def _dtype(name: str) -> mx.Dtype:
    return cast(mx.Dtype, getattr(mx, name))
