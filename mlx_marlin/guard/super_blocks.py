"""Random parameters of super-blocks, as checkpoints store them."""

import mlx.core as mx

from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights.formats import SUPER_BLOCK, TILE_N

SMALLEST_HALF = 2.0**-24
"""The smallest subnormal float16."""
BYTE = 256


def rows(
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
