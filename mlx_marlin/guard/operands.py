"""Weights and activations of checks, with their exact values.

All operands are generated and decoded on the CPU by MLX's operations in float64,
without any GPU kernel.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import mlx.core as mx

from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights import codebooks, layout, super_blocks, tile_conversion
from mlx_marlin.weights.bit_streams import words_of_codes
from mlx_marlin.weights.formats import SUPER_BLOCK, TILE_N
from mlx_marlin.weights.quantizers import decoded

GLOBAL_SCALE = 1235 + 7373 / 8192
"""A float32 that no smaller float holds, and that is far from the nearest bfloat16."""
CODEBOOK = tuple(
    (-1) ** (place + place // 8) * 2.0 ** (place * 3 % 8 - 4) * (1 + 2**-11 - 2**-20)
    for place in range(16)
)
"""Numbers of both signs, out of order, of which a half would lose 2^-11."""
E8M0_ONE = 127
"""The E8M0 code of 1 (OCP Microscaling Formats 1.0, section 5.4.1)."""
E4M3_NAN = 0x7F
"""The E4M3 code of NaN, without the sign."""
SUBNORMAL_ROW, EXTREME_ROW, SMALL_SCALE_ROW = 1, 2, 3
"""Rows of every 32 rows of the weight with special codes or scales."""
POOL = 8191
"""Random numbers that are generated and repeated: a prime, so that rows differ."""
STRIDE = 1009
"""Distance of the offsets in the pool at which consecutive seeds start."""
DISTINCT_ROWS = 8
"""Rows of x of which all others are multiples: float64 products are slow on a CPU."""
SMALLEST_HALF = 2.0**-24
"""The smallest subnormal float16."""
BYTE = 256


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Operands:
    """A weight, or a batch of weights, with its exact values."""

    # Codes, scales and biases as arguments of `graph.product`
    stored: tuple[mx.array, mx.array, mx.array]
    exact: mx.array  # Weights [..., n, k] in float64
    # Sum of the magnitudes of the terms of each weight, [..., n, k] in float64;
    # evaluated when it is used
    magnitude: mx.array


def draw(problem: Problem, weights: tuple[int, ...] = ()) -> Operands:
    """Returns a random weight of a problem's format, or a batch of them.

    Of every 32 rows, row 1 has only the smallest nonzero codes, which are subnormal
    numbers in FP4 and FP8; row 2 only the largest; row 3 has subnormal scales in nvfp4.
    Scales of integer codes have both signs.
    """
    with mx.stream(mx.cpu):
        keys = mx.random.split(mx.random.key(0), 3)
        codes = _codes(problem, (*weights, problem.n, problem.k))
        scales, biases = parameters(problem, weights, keys)
        exact, magnitude = _decode(problem, codes, scales, biases)
        operands = Operands(
            stored=_lay_out(problem, codes, scales, biases),
            exact=exact,
            magnitude=magnitude,
        )
        mx.eval(operands.stored, exact)
    return operands


def activations(problem: Problem, shape: tuple[int, ...]) -> mx.array:
    """Returns random rows [..., m, k] in the problem's dtype.

    The first `DISTINCT_ROWS` rows are normally distributed. Row i is row
    i % `DISTINCT_ROWS` times `factors(m)[i]`, exactly.
    """
    *batch, m, k = shape
    with mx.stream(mx.cpu):
        first = normals(problem, (*batch, min(m, DISTINCT_ROWS), k))
        factor = factors(m).astype(first.dtype)
        rows = first[..., mx.arange(m) % DISTINCT_ROWS, :] * factor[:, None]
        mx.eval(rows)
    return rows


def factors(m: int) -> mx.array:
    """Returns the factors of rows: powers of two of both signs, float64 [m].

    The first 128 rows are distinct. The default device must be the CPU.
    """
    nth = mx.arange(m) // DISTINCT_ROWS
    sign = 1 - 2 * ((nth + nth // 8) % 2)
    return sign.astype(mx.float64) / mx.left_shift(1, nth % 8)


def normals(problem: Problem, shape: tuple[int, ...], seed: int = 1) -> mx.array:
    """Returns normally distributed numbers in the problem's dtype.

    They are multiples of 2^-10, so that 2^-7 times them is exact in float16.
    """
    with mx.stream(mx.cpu):
        drawn = _repeated(_pool_of_normals(), shape, seed)
        drawn = drawn.astype(getattr(mx, problem.dtype))
        mx.eval(drawn)
    return drawn


@lru_cache(1)
def _pool_of_normals() -> mx.array:
    with mx.stream(mx.cpu):
        drawn = mx.random.normal((POOL,), key=mx.random.key(1))
        pool = mx.round(drawn * 1024) / 1024
        mx.eval(pool)
    return pool


@lru_cache(1)
def _pool_of_bytes() -> mx.array:
    with mx.stream(mx.cpu):
        # Bytes, because MLX draws large integers as floats, whose last bits are zero.
        pool = mx.random.randint(0, 256, (POOL,), mx.uint8, key=mx.random.key(0))
        mx.eval(pool)
    return pool


def _repeated(pool: mx.array, shape: tuple[int, ...], seed: int) -> mx.array:
    """Returns an array filled with the repeated pool, from the offset of a seed."""
    first = seed * STRIDE % POOL
    size = prod(shape)
    whole = mx.tile(pool, -(-(first + size) // POOL))
    return whole[first : first + size].reshape(shape)


def _codes(problem: Problem, shape: tuple[int, ...]) -> mx.array:
    """Returns codes, uint8."""
    largest = (1 << problem.bits) - 1
    pool = _pool_of_bytes() & largest
    if problem.format.codes == "floating" and problem.bits == 8:
        # One code is NaN.
        pool = mx.where((pool & E4M3_NAN) == E4M3_NAN, pool - 1, pool)
        largest = E4M3_NAN - 1
    codes = _repeated(pool, shape, 0)
    codes[..., SUBNORMAL_ROW::TILE_N, :] = _least(
        problem, codes[..., SUBNORMAL_ROW::TILE_N, :]
    )
    codes[..., EXTREME_ROW::TILE_N, :] = largest
    return codes


def _least(problem: Problem, codes: mx.array) -> mx.array:
    """Returns the smallest nonzero codes, with the signs of the given codes."""
    if problem.format.codes != "floating":
        return mx.ones_like(codes)
    sign = codes & (1 << (problem.bits - 1))
    if problem.bits == 8:  # E4M3: 1 to 7 are subnormal
        return sign | mx.maximum(codes & 7, 1)
    return sign | 1


def parameters(
    problem: Problem, weights: tuple[int, ...], keys: mx.array
) -> tuple[mx.array, mx.array]:
    """Returns scales, and biases or zero points; the scales twice without them."""
    shape = (*weights, problem.n, problem.groups)
    if problem.format.codes == "floating":
        scales = _byte_scales(problem, shape, keys[0])
        return scales, scales
    if problem.format.has_super_blocks:
        stored = _super_blocks(problem, weights, keys, SMALL_SCALE_ROW)
        return stored, stored
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
    scales = mx.where(row % TILE_N == SMALL_SCALE_ROW, drawn + 1, drawn + 0x20)
    return scales.astype(mx.uint8)


def _decode(
    problem: Problem, codes: mx.array, scales: mx.array, biases: mx.array
) -> tuple[mx.array, mx.array]:
    """Returns weights in float64, and the sum of magnitudes of the terms of each."""
    format = problem.format

    def values(codes: mx.array) -> mx.array:
        return decoded(
            words_of_codes(codes, problem.bits),
            scales,
            biases if format.has_second_array else None,
            group_size=problem.group_size,
            bits=problem.bits,
            mode=problem.mode,
            global_scale=mx.array([GLOBAL_SCALE]) if problem.global_scale else None,
            codebook=mx.array(CODEBOOK) if format.has_codebook else None,
            dtype=mx.float64,
        )

    exact = values(codes)
    if format.codes == "floating" or format.has_codebook:
        return exact, mx.abs(exact)
    offset = values(mx.zeros_like(codes))
    return exact, mx.abs(exact - offset) + mx.abs(offset)


def _lay_out(
    problem: Problem, codes: mx.array, scales: mx.array, biases: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Returns a weight's codes, scales, and biases or global scale as it is stored."""
    bits, size = problem.bits, problem.group_size
    if problem.layout == "marlin":
        words = tile_conversion.tiles_of_codes(codes, bits=bits, group_size=size)
        scales = _packed_scales(problem, scales, biases)
        if problem.format.has_codebook:
            scales = codebooks.prepend(mx.array(CODEBOOK), scales)
        biases = scales
    else:
        words = words_of_codes(codes, bits)
    if problem.global_scale:
        # Two elements, because MLX passes arrays under eight bytes as constants.
        biases = mx.array([GLOBAL_SCALE, GLOBAL_SCALE], mx.float32)
    return words, scales, biases


def _packed_scales(problem: Problem, scales: mx.array, biases: mx.array) -> mx.array:
    size = problem.group_size
    if problem.format.has_super_blocks:
        return super_blocks.to_tiles(scales, problem.format, size)
    padded_n, padded_k = layout.padded(problem.n, problem.k)
    stored = [scales, biases][: problem.format.parameters]
    return tile_conversion.interleave(stored, padded_n, -(-padded_k // size))


def _super_blocks(
    problem: Problem, weights: tuple[int, ...], keys: mx.array, small_row: int
) -> mx.array:
    """Returns random parameters, uint16, in the order of `weights.super_blocks`.

    Weights are of the size that other formats have: products of normally distributed x
    fit in a float16. Factors have both signs. Many are subnormal, as they are in files.
    """
    blocks = problem.k // SUPER_BLOCK
    per_block = SUPER_BLOCK // problem.group_size
    shape = (*weights, problem.n, blocks)
    most = 16 if problem.group_size == 16 else 64  # scales and minima are below it
    symmetric = problem.format.parameters == 1
    size = mx.random.uniform(0.05, 0.15, shape, key=keys[0]) / problem.k**0.5
    size = size / (32 if symmetric else most / 2)
    signs = mx.where(mx.random.bernoulli(0.5, shape, key=keys[1]), 1.0, -1.0)
    row = mx.arange(problem.n)[:, None]
    tiny = SMALLEST_HALF * (1 + row // TILE_N % 7)
    factor = mx.where(row % TILE_N == small_row, tiny, size) * signs
    groups = (*shape, per_block)
    if symmetric:
        octets = mx.random.randint(0, BYTE, groups, key=keys[2])
        return _records([octets], [factor])
    scales = mx.random.randint(1, most, groups, key=keys[2])
    minima = mx.minimum(scales + mx.arange(per_block) % 3, most - 1)
    both = [scales | minima << 4] if most == 16 else [scales, minima]
    return _records(both, [factor, factor * 2.0 ** (problem.bits - 1)])


def _records(groups: list[mx.array], factors: list[mx.array]) -> mx.array:
    """Returns bytes [..., blocks, groups] and factors [..., blocks] as records."""
    octets = mx.stack(groups, axis=-1).astype(mx.uint16)
    *lead, blocks, _, _ = octets.shape
    pairs = octets.reshape(*lead, blocks, -1, 2)
    words = pairs[..., 0] + pairs[..., 1] * BYTE
    halves = mx.stack(factors, axis=-1).astype(mx.float16).view(mx.uint16)
    return mx.concatenate([words, halves], axis=-1).reshape(*lead, -1)
