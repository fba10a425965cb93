"""Operands of measured products: activations, and weights larger than the cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from mlx_marlin.backends import selection
from mlx_marlin.backends.graph import Product
from mlx_marlin.measure.timing import Weight
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products.packing import pack
from mlx_marlin.products.reference.weight import dequantize
from mlx_marlin.weights.bit_streams import codes_of_words
from mlx_marlin.weights.formats import SUPER_BLOCK
from mlx_marlin.weights.packed_weight import PackedWeight

ARRAYS = 3
"""Arrays of a weight in one layout."""
MOST_WEIGHTS = 256
"""Most weights of a problem. A model's own small weights are in the cache too."""
CODEBOOK = tuple((place - 7.5) * (1 + place / 2**20) for place in range(16))
"""Numbers that no half holds."""
TOLERANCES = {"float16": 0.01, "bfloat16": 0.05, "float32": 0.01}
"""Largest error of an element, relative to the root mean square of all elements.
Rounding errors, also of TF32, are less than a third of it. A missing split causes an
error of about 1."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Operands:
    """The arrays of a problem."""

    problem: Problem  # The problem
    x: mx.array  # Activations [m, k]
    # The first weight in MLX's layout: codes, scales, and biases or zero points
    native: Weight
    weights: tuple[Weight, ...]  # The weights in each layout that is read


def weight_count(problem: Problem, device: PlanningDevice) -> int:
    """Returns how many weights exceed the caches together."""
    return min(device.cache_bytes // problem.weight_bytes + 1, MOST_WEIGHTS)


def check(problem: Problem) -> None:
    """Checks that stock MLX supports a problem's group size and has its scales."""
    if problem.global_scale:
        raise ValueError("plans are compared with stock MLX, which has no global scale")
    sizes = problem.format.group_sizes
    if problem.group_size not in sizes:
        raise ValueError(
            f"group_size={problem.group_size} is not one of {sizes}: plans are "
            f"compared with stock MLX, which supports no other sizes"
        )


def operands(
    problem: Problem, count: int, layouts: Sequence[str] | None = None
) -> Operands:
    """Returns operands with random values, which are the same in each call.

    `layouts`: those of the weights, one beside another; None for the problem's own.
    """
    check(problem)
    chosen = [replace(problem, layout=each) for each in layouts or [problem.layout]]
    x = mx.random.normal((problem.m, problem.k), key=mx.random.key(0))
    natives = [_native(problem, seed) for seed in range(1, count + 1)]
    made = Operands(
        problem=problem,
        x=x.astype(getattr(mx, problem.dtype)),
        native=natives[0],
        weights=tuple(
            sum((_in_layout(each, native) for each in chosen), ()) for native in natives
        ),
    )
    mx.eval(made.x, made.native, made.weights)
    return made


def reading(index: int, call: Product) -> Product:
    """Returns a call that reads the arrays of one layout, and all that follow."""
    return lambda x, *arrays: call(
        x,
        *arrays[ARRAYS * index : ARRAYS * (index + 1)],
        *arrays[len(arrays) - len(arrays) % ARRAYS :],
    )


def stock_product(problem: Problem) -> Product:
    """Returns stock MLX's product for a problem in MLX's layout."""
    multiply = partial(
        mx.quantized_matmul,
        group_size=problem.group_size,
        bits=problem.bits,
        mode=problem.mode,
    )
    if problem.format.codes == "affine":
        return multiply
    return lambda x, w, scales, _: multiply(x, w, scales)


def is_right(product: Product, inputs: Operands) -> bool:
    """Returns whether a product agrees with stock MLX's in float32."""
    problem = inputs.problem
    expected = _exact(problem, inputs.x.astype(mx.float32), inputs.native)
    actual = product(inputs.x, *inputs.weights[0]).astype(mx.float32)
    if actual.shape != expected.shape:
        return False
    error = mx.abs(actual - expected).max() / mx.sqrt(mx.square(expected).mean())
    # NaN compares as false.
    return bool((error <= TOLERANCES[problem.dtype]).item())


def _exact(problem: Problem, x: mx.array, native: Weight) -> mx.array:
    w, scales, biases = native
    if problem.format.codes != "floating" and not problem.format.has_super_blocks:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    if _is_of_mlx(problem) and selection.traits().stock_multiplies_float32:
        return stock_product(problem)(x, w, scales, biases)
    # Stock MLX has no such format, or, on CUDA (0.32.4), raises for 64 rows of float32
    # (measured: 5120→17408).
    return x @ _decoded(problem, w, scales, biases).T


def _is_of_mlx(problem: Problem) -> bool:
    return problem.format.codes in ("affine", "floating")


def stock_weight(problem: Problem, w: mx.array, *scales: mx.array) -> mx.array:
    """Returns a weight [n, k] that stock MLX dequantizes, in a dtype of its choice."""
    biases = scales[1] if problem.format.codes == "affine" else None
    size, bits = problem.group_size, problem.bits
    return mx.dequantize(w, scales[0], biases, size, bits, mode=problem.mode)


def _decoded(
    problem: Problem, w: mx.array, scales: mx.array, biases: mx.array
) -> mx.array:
    """Returns a weight [n, k] as float32."""
    if _is_of_mlx(problem):
        return stock_weight(problem, w, scales, biases).astype(mx.float32)
    if problem.format.has_super_blocks or problem.format.has_codebook:
        return dequantize(_packed(problem, (w, scales)), mx.float32)
    is_symmetric = problem.format.codes == "symmetric"
    zero = 2 ** (problem.bits - 1) if is_symmetric else biases[..., None]
    codes = codes_of_words(w, problem.bits).astype(mx.float32)
    groups = codes.reshape(problem.n, problem.groups, problem.group_size)
    return ((groups - zero) * scales[..., None]).reshape(problem.n, problem.k)


def _native(problem: Problem, seed: int) -> Weight:
    """Returns a random weight around zero, whose products are no larger than x.

    The third array of a format without biases and zero points is a placeholder.
    """
    if problem.format.has_super_blocks:
        return _of_super_blocks(problem, seed)
    keys = mx.random.split(mx.random.key(seed), 2)
    if problem.format.codes == "floating":
        values = mx.random.normal((problem.n, problem.k), key=keys[0]) / problem.k**0.5
        parts = mx.quantize(
            values, group_size=problem.group_size, bits=problem.bits, mode=problem.mode
        )
        return parts[0], parts[1], parts[1]
    # Bytes: MLX makes large random integers from floats, so their last bits are zero.
    codes = (problem.n, problem.k * problem.bits // 8)
    w = mx.random.randint(0, 256, codes, mx.uint8, key=keys[0]).view(mx.uint32)
    groups = (problem.n, problem.groups)
    size = mx.random.uniform(0.05, 0.15, groups, key=keys[1]) / problem.k**0.5
    dtype = getattr(mx, problem.scale_dtype)
    scales = size.astype(dtype)
    if problem.format.codes == "affine":
        middle = (2**problem.bits - 1) / 2
        return w, scales, (-middle * size).astype(dtype)
    zero = 2 ** (problem.bits - 1)
    return (
        w,
        scales,
        mx.random.randint(zero - 1, zero + 2, groups, key=keys[0]).astype(dtype),
    )


def _of_super_blocks(problem: Problem, seed: int) -> Weight:
    """Returns random codes, and equal scales in each super-block."""
    codes = (problem.n, problem.k * problem.bits // 8)
    key = mx.random.key(seed)
    w = mx.random.randint(0, 256, codes, mx.uint8, key=key).view(mx.uint32)
    _, words = problem.format.records(SUPER_BLOCK, problem.group_size)
    parameters = problem.format.parameters
    scale = 0x20  # of a group of 32; `check` refuses super-blocks of others
    factor = mx.array([0.1 / problem.k**0.5 / scale] * parameters, mx.float16)
    if parameters == 2:
        factor = factor * mx.array([1, 2 ** (problem.bits - 1)], mx.float16)
    octets = mx.full((words - parameters,), 0x101 * scale, mx.uint16)
    record = mx.concatenate([octets, factor.view(mx.uint16)])
    rows = mx.broadcast_to(record, (problem.n, problem.k // SUPER_BLOCK, words))
    rows = mx.contiguous(rows.reshape(problem.n, -1))
    return w, rows, rows


def _in_layout(problem: Problem, native: Weight) -> Weight:
    if problem.layout == "mlx":
        return native
    packed = _packed(problem, native if problem.format.has_second_array else native[:2])
    return packed.words, packed.scales, packed.scales


def _packed(problem: Problem, stored: tuple[mx.array, ...]) -> PackedWeight:
    return pack(
        *stored,
        group_size=problem.group_size,
        bits=problem.bits,
        mode=problem.mode,
        codebook=mx.array(CODEBOOK) if problem.format.has_codebook else None,
    )
