"""Operands of measured products: activations, and weights larger than the cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from mlx_marlin.backends import selection
from mlx_marlin.backends.graph import Product
from mlx_marlin.guard.operands import CODEBOOK, parameters
from mlx_marlin.measure.timing import Weight
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products.packing import pack
from mlx_marlin.weights.packed_weight import PackedWeight
from mlx_marlin.weights.quantizers import decoded

ARRAYS = 3
"""Arrays of a weight in one layout."""
MOST_WEIGHTS = 256
"""Most weights of a problem. A model's own small weights are in the cache too."""
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
    is_of_mlx = problem.format.codes in ("affine", "floating")
    if is_of_mlx and selection.traits().stock_multiplies_float32:
        if problem.format.codes == "affine":
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return stock_product(problem)(x, w, scales, biases)
    # Stock MLX has no such format, or, on CUDA (0.32.4), raises for 64 rows of float32
    # (measured: 5120→17408).
    values = decoded(
        w,
        scales,
        biases if problem.format.has_second_array else None,
        group_size=problem.group_size,
        bits=problem.bits,
        mode=problem.mode,
        codebook=_codebook(problem),
    )
    return x @ values.T


def stock_weight(problem: Problem, w: mx.array, *scales: mx.array) -> mx.array:
    """Returns a weight [n, k] that stock MLX dequantizes, in a dtype of its choice."""
    biases = scales[1] if problem.format.codes == "affine" else None
    size, bits = problem.group_size, problem.bits
    return mx.dequantize(w, scales[0], biases, size, bits, mode=problem.mode)


def _native(problem: Problem, seed: int) -> Weight:
    """Returns a random weight around zero, whose products are no larger than x.

    The third array of a format without biases and zero points is a placeholder.
    """
    keys = mx.random.split(mx.random.key(seed), 4)
    if problem.format.codes == "floating":
        values = mx.random.normal((problem.n, problem.k), key=keys[0]) / problem.k**0.5
        parts = mx.quantize(
            values, group_size=problem.group_size, bits=problem.bits, mode=problem.mode
        )
        return parts[0], parts[1], parts[1]
    # Bytes: MLX makes large random integers from floats, so their last bits are zero.
    codes = (problem.n, problem.k * problem.bits // 8)
    w = mx.random.randint(0, 256, codes, mx.uint8, key=keys[0]).view(mx.uint32)
    return w, *parameters(problem, (), keys[1:])


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
        codebook=_codebook(problem),
    )


def _codebook(problem: Problem) -> mx.array | None:
    return mx.array(CODEBOOK) if problem.format.has_codebook else None
