"""Weights and activations of a known-answer check, with the exact values they mean.

Everything is drawn and decoded on the CPU by MLX's own operations in float64: no kernel
of ours takes part, and no kernel of the GPU.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights import layout, tile_order
from mlx_marlin.weights.bit_streams import words_of_codes

LARGEST_NVFP4 = 6.0 * 448.0
"""The largest E2M1 times the largest E4M3: a global scale is divided by it (MLX)."""
GLOBAL_SCALE = 1344.0
"""Half of that: the factor is exact."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of FP4 (OCP Microscaling Formats 1.0, table 5)."""
E8M0_ONE = 127
"""The E8M0 scale that stands for 1 (OCP Microscaling Formats 1.0, section 5.4.1)."""
E4M3_NAN = 0x7F
SUBNORMAL_ROW, EXTREME_ROW, SMALL_SCALE_ROW = 1, 2, 3
"""Rows of the weight with codes or scales of one kind only."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Operands:
    """A weight, or a batch of them, and what it stands for.

    Attributes:
        stored: Codes, scales and biases as `launch.product` takes them.
        exact: Weights [..., n, k] in float64.
        magnitude: Of each weight, the magnitudes of what is added up for it, likewise.
    """

    stored: tuple[mx.array, mx.array, mx.array]
    exact: mx.array
    magnitude: mx.array


def draw(problem: Problem, weights: tuple[int, ...] = (), seed: int = 0) -> Operands:
    """Returns a weight of a problem's format, or a batch.

    Row 1 has only the least codes that are not zero, which small floats hold as
    subnormal numbers, row 2 only the largest; row 3 of nvfp4 has subnormal scales.
    Scales of integers have both signs.

    Args:
        problem: Format, n and k.
        weights: Leading axes, such as (experts,).
        seed: Of what is drawn.
    """
    with mx.stream(mx.cpu):
        keys = mx.random.split(mx.random.key(seed), 4)
        codes = _codes(problem, weights, keys[0])
        scales, third = _parameters(problem, weights, keys[1:])
        exact, magnitude = _decode(problem, codes, scales, third)
        operands = Operands(
            stored=_lay_out(problem, codes, scales, third),
            exact=exact,
            magnitude=magnitude,
        )
        mx.eval(operands.stored, exact, magnitude)
    return operands


def activations(problem: Problem, shape: tuple[int, ...], seed: int = 1) -> mx.array:
    """Returns normally distributed activations in the problem's dtype."""
    with mx.stream(mx.cpu):
        drawn = mx.random.normal(shape, key=mx.random.key(seed))
        drawn = drawn.astype(getattr(mx, problem.dtype))
        mx.eval(drawn)
    return drawn


def _codes(problem: Problem, weights: tuple[int, ...], key: mx.array) -> mx.array:
    shape = (*weights, problem.n, problem.k)
    # Bytes, because MLX draws large integers as floats, whose last bits are zero.
    codes = mx.random.randint(0, 256, shape, mx.uint8, key=key) & _mask(problem)
    row = mx.arange(problem.n)[:, None]
    largest = mx.array(_mask(problem), mx.uint8)
    if problem.format.codes == "floating":
        sign = codes & (1 << (problem.bits - 1))
        least = sign | 1
        if problem.bits == 8:  # E4M3: 1 to 7 are subnormal, and one code is NaN
            least = sign | mx.maximum(codes & 7, 1)
            largest = mx.array(E4M3_NAN - 1, mx.uint8)
            codes = mx.where((codes & E4M3_NAN) == E4M3_NAN, codes - 1, codes)
    else:
        least = mx.minimum(mx.array(1, mx.uint8), largest)
    codes = mx.where(row == SUBNORMAL_ROW, least, codes)
    return mx.where(row == EXTREME_ROW, largest, codes).astype(mx.uint8)


def _mask(problem: Problem) -> int:
    return (1 << problem.bits) - 1


def _parameters(
    problem: Problem, weights: tuple[int, ...], keys: mx.array
) -> tuple[mx.array, mx.array]:
    """Returns scales, and biases or zero points; of others any second array."""
    shape = (*weights, problem.n, problem.groups)
    if problem.format.codes == "floating":
        scales = _byte_scales(problem, shape, keys[0])
        return scales, scales
    dtype = getattr(mx, problem.scale_dtype)
    size = mx.random.uniform(0.05, 0.15, shape, key=keys[0]) / problem.k**0.5
    sign = mx.where(mx.random.bernoulli(0.5, shape, key=keys[1]), 1.0, -1.0)
    scales = (size * sign).astype(dtype)
    middle = 2 ** (problem.bits - 1)
    if problem.format.codes == "zero_point":
        zeros = mx.random.randint(middle - 1, middle + 2, shape, key=keys[2])
        return scales, zeros.astype(dtype)
    off = mx.random.uniform(-0.5, 0.5, shape, key=keys[2])
    return scales, ((off - middle) * scales.astype(mx.float32)).astype(dtype)


def _byte_scales(problem: Problem, shape: tuple[int, ...], key: mx.array) -> mx.array:
    drawn = mx.random.randint(0, 7, shape, mx.uint8, key=key)
    if problem.group_size != 16:  # E8M0: powers of two
        return (drawn + (E8M0_ONE - 12)).astype(mx.uint8)
    row = mx.arange(problem.n)[:, None]
    # E4M3: 0x20 is 1/8 and 0x26 is 7/32; 1 to 7 are subnormal.
    scales = mx.where(row == SMALL_SCALE_ROW, drawn + 1, drawn + 0x20)
    return scales.astype(mx.uint8)


def _decode(
    problem: Problem, codes: mx.array, scales: mx.array, third: mx.array
) -> tuple[mx.array, mx.array]:
    """Returns weights in float64, and the magnitudes of what is added up for each."""

    def spread(each: mx.array) -> mx.array:
        return mx.repeat(each.astype(mx.float64), problem.group_size, axis=-1)

    if problem.format.codes == "floating":
        factors = _floats_of_scales(problem, scales)
        exact = spread(factors) * _floats_of_codes(problem, codes)
        return exact, mx.abs(exact)
    scale, numbers = spread(scales), codes.astype(mx.float64)
    if problem.format.codes == "affine":
        bias = spread(third)
        return scale * numbers + bias, mx.abs(scale) * numbers + mx.abs(bias)
    middle = mx.array(2.0 ** (problem.bits - 1), mx.float64)
    zero = spread(third) if problem.format.codes == "zero_point" else middle
    return scale * (numbers - zero), mx.abs(scale) * (numbers + zero)


def _floats_of_codes(problem: Problem, codes: mx.array) -> mx.array:
    if problem.bits == 8:
        return _e4m3(codes)
    values = mx.array([*E2M1, *(-value for value in E2M1)], mx.float64)
    return values[codes]


def _floats_of_scales(problem: Problem, scales: mx.array) -> mx.array:
    if problem.group_size != 16:
        exponents = scales.astype(mx.float64) - E8M0_ONE
        return mx.power(mx.array(2.0, mx.float64), exponents)
    factors = _e4m3(scales)
    if problem.global_scale:
        factors = factors * mx.array(GLOBAL_SCALE / LARGEST_NVFP4, mx.float64)
    return factors


def _e4m3(codes: mx.array) -> mx.array:
    """Returns what E4M3 codes stand for (OCP 8-bit Floating Point 1.0, table 2)."""
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        magnitude = (
            2.0 ** (exponent - 7) * (1 + mantissa / 8)
            if exponent
            else 2.0**-6 * mantissa / 8
        )
        values.append(-magnitude if code >> 7 else magnitude)
    return mx.array(values, mx.float64)[codes]


def _lay_out(
    problem: Problem, codes: mx.array, scales: mx.array, third: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    words = words_of_codes(codes, problem.bits)
    n, k, size = problem.n, problem.k, problem.group_size
    if problem.layout == "marlin":
        words = tile_order.tiles_of_rows(
            words, n, k, bits=problem.bits, group_size=size
        )
        padded_n, padded_k = layout.padded(n, k)
        stored = [scales, third][: problem.format.parameters]
        scales = tile_order.interleave(stored, padded_n, -(-padded_k // size))
        third = scales
    if problem.global_scale:
        # Twice: MLX hands arrays under eight bytes over in another address space.
        third = mx.array([GLOBAL_SCALE, GLOBAL_SCALE], mx.float32)
    return words, scales, third
