"""Operands of known answers: their numbers, and what weights stand for, by NumPy."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_marlin.guard import operands
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.weights import codebooks, super_blocks
from mlx_marlin.weights.bit_streams import codes_of_words
from mlx_marlin.weights.tile_conversion import deinterleave, rows_of_tiles
from support.answers_by_formula import Reals, exact
from support.format_cases import E2M1, E4M3, E8M0

N, K = 70, 512
FORMS: tuple[dict[str, Any], ...] = (
    {"mode": "affine", "bits": 4, "group_size": 64},
    {"mode": "affine", "bits": 3, "group_size": 16, "dtype": "bfloat16"},
    {"mode": "affine", "bits": 6, "group_size": K, "dtype": "float32"},
    {"mode": "symmetric", "bits": 8, "group_size": 128},
    {"mode": "zero_point", "bits": 4, "group_size": 32},
    {"mode": "mxfp4"},
    {"mode": "mxfp8"},
    {"mode": "nvfp4"},
    {"mode": "nvfp4", "global_scale": True},
    {"mode": "codebook", "group_size": 64},
    {"mode": "k_quant", "bits": 4, "group_size": 32},
    {"mode": "k_quant", "bits": 6, "group_size": 16},
    {"mode": "k_quant", "bits": 2, "group_size": 16},
)
POWERS = [-4, -1, 2, -3, 0, 3, -2, 1]
CODEBOOK = np.array([*POWERS, *POWERS])
CODEBOOK = 2.0**CODEBOOK * [*[1, -1] * 4, *[-1, 1] * 4] * (1 + 2**-11 - 2**-20)


def problem(form: dict[str, Any], n: int = N, m: int = 1) -> Problem:
    given = dict(form)
    scaled = given.pop("global_scale", False)
    return replace(problem_of(m, n, K, layout="marlin", **given), global_scale=scaled)


def repeated(groups: Reals, size: int) -> Reals:
    return np.repeat(groups, size, -1)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_packed_weights_stand_for_their_exact_values(form: dict[str, Any]) -> None:
    """Two weights: all that is stored, decoded anew, and the size of the terms."""
    asked = problem(form)
    bits, size, format = asked.bits, asked.group_size, asked.format
    drawn = operands.draw(asked, (2,))
    words, scales, third = drawn.stored
    codes = codes_of_words(rows_of_tiles(words, N, K, bits=bits, group_size=size), bits)
    codes = np.array(codes)
    assert codes.shape == (2, N, K)
    offset: Any = 0.0
    if format.has_codebook:
        np.testing.assert_allclose(
            exact(codebooks.tables(scales)),
            np.broadcast_to(CODEBOOK, (2, 3, 16)),
        )
        scales = codebooks.scales(scales, format, K, size)
    if format.has_super_blocks:
        rows = super_blocks.to_rows(scales, N, format, size)
        check_super_blocks(asked, np.array(rows))
        factors, minima = super_blocks.float_parameters(rows, format, size)
        offset = None if minima is None else repeated(exact(minima), size)
        scale = repeated(exact(factors), size)
        if offset is None:
            offset = -(2.0 ** (bits - 1)) * scale
    else:
        own, *others = deinterleave(scales, N, asked.groups, format.parameters)
        if format.codes == "floating":
            check_byte_scales(asked, np.array(own))
            scale = (E4M3 if size == 16 else E8M0)[np.array(own)]
            if asked.global_scale:
                assert (third.dtype, third.tolist()) == (mx.float32, [GLOBAL] * 2)
                scale = scale * (GLOBAL / (6 * 448))
        else:
            scale = exact(own)
            check_scales(asked, scale)
        scale = repeated(scale, size)
        if others:
            other = exact(others[0])
            check_offsets(asked, exact(own), other)
            other = repeated(other, size)
            offset = other if asked.mode == "affine" else -scale * other
        elif asked.mode == "symmetric":
            offset = -(2.0 ** (bits - 1)) * scale
    table = np.arange(2.0**bits)
    if format.codes == "floating":
        table = E4M3 if bits == 8 else E2M1
    scaled = scale * (CODEBOOK if format.has_codebook else table)[codes]
    np.testing.assert_allclose(exact(drawn.exact), scaled + offset, rtol=1e-6)
    size_of = np.abs(scaled) + np.abs(offset)
    np.testing.assert_allclose(exact(drawn.magnitude), size_of, rtol=1e-6)
    check_codes(asked, codes)


GLOBAL = 1235 + 7373 / 8192


def check_codes(asked: Problem, codes: NDArray[Any]) -> None:
    """Rows 1 and 2 of every 32 have the smallest and largest codes, others have all."""
    row = np.arange(N) % 32
    least, largest = codes[:, row == 1], codes[:, row == 2]
    bits, top = asked.bits, 2**asked.bits - 1
    every = set(range(top + 1))
    if asked.format.codes == "floating":
        sign = 1 << bits - 1
        ones = {1} if bits == 4 else set(range(1, 8))
        assert {*least.flatten()} == ones | {sign | each for each in ones}
        if bits == 8:
            every -= {0x7F, 0xFF}
            top = 0x7E
    else:
        assert {*least.flatten()} == {1}
    assert {*largest.flatten()} == {top}
    assert {*codes[:, (row != 1) & (row != 2)].flatten()} == every


def check_scales(asked: Problem, scales: Reals) -> None:
    size = np.abs(scales) * np.sqrt(K)
    assert 0.0498 < size.min() < 0.06
    assert 0.14 < size.max() < 0.151
    assert 0.3 < (scales > 0).mean() < 0.7


def check_offsets(asked: Problem, scales: Reals, others: Reals) -> None:
    middle = 2 ** (asked.bits - 1)
    if asked.mode == "zero_point":
        assert {*others.flatten()} == {middle - 1, middle, middle + 1}
        return
    off = others / scales + middle
    close = middle * 0.005 if asked.dtype == "bfloat16" else 0.01
    assert -0.5 - close < off.min() < -0.4
    assert 0.4 < off.max() < 0.5 + close


def check_byte_scales(asked: Problem, scales: NDArray[Any]) -> None:
    if asked.group_size != 16:
        assert {*scales.flatten()} == {*range(115, 122)}
        return
    row = np.arange(N) % 32
    assert {*scales[:, row == 3].flatten()} == {*range(1, 8)}
    assert {*scales[:, row != 3].flatten()} == {*range(0x20, 0x27)}


def check_super_blocks(asked: Problem, rows: NDArray[Any]) -> None:
    """Factors are of both signs, and tiny in row 3 of every 32."""
    parameters, per_block = asked.format.parameters, 256 // asked.group_size
    records = rows.reshape(2, N, K // 256, -1)
    factors = records[..., -parameters:].copy().view(np.float16).astype(float)
    octets = records[..., :-parameters].copy().view(np.uint8)
    row = np.arange(N) % 32
    first = np.abs(factors[..., 0])
    tiles = (np.arange(N) // 32 % 7 + 1)[None, :, None]
    np.testing.assert_array_equal(
        first[:, row == 3],
        np.broadcast_to(tiles * 2**-24, first.shape)[:, row == 3],
    )
    most = 16 if asked.group_size == 16 else 64
    unit = np.sqrt(K) * (32 if parameters == 1 else most / 2)
    sizes = first[:, row != 3] * unit
    assert 0.0498 < sizes.min() < 0.06
    assert 0.14 < sizes.max() < 0.1501
    assert 0.3 < (factors[..., 0] > 0).mean() < 0.7
    if parameters == 1:
        assert octets.shape[-1] == per_block
        assert octets.min() < 10 < 245 < octets.max()
        return
    np.testing.assert_allclose(
        factors[..., 1], factors[..., 0] * 2 ** (asked.bits - 1), rtol=1e-3, atol=2**-24
    )
    if most == 16:
        scales, minima = octets & 15, octets >> 4
    else:
        scales, minima = (
            octets.reshape(*octets.shape[:-1], -1, 2)[..., i] for i in (0, 1)
        )
    assert {*scales.flatten()} == {*range(1, most)}
    nth = np.arange(per_block) % 3
    np.testing.assert_array_equal(minima, np.minimum(scales + nth, most - 1))


def test_the_factors_of_rows_are_distinct_powers_of_two() -> None:
    with mx.stream(mx.cpu):
        found = operands.factors(1024).tolist()
    assert found == [
        (-1) ** (nth + nth // 8) / 2 ** (nth % 8)
        for nth in (row // 8 for row in range(1024))
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_normal_numbers_are_repeated_after_a_prime_from_the_place_of_a_seed(
    dtype: str,
) -> None:
    asked = problem_of(1, 32, 64, dtype=dtype)
    pool = exact(operands.normals(asked, (2, 8191), 0))
    np.testing.assert_array_equal(pool[0], pool[1])
    pool = pool[0]
    if dtype != "bfloat16":
        np.testing.assert_array_equal(pool * 1024 % 1, np.zeros(8191))
        assert (pool * 512 % 1).any()
    assert abs(pool.mean()) < 0.05
    assert 0.95 < pool.std() < 1.05
    for seed in (1, 2, 9):
        found = operands.normals(asked, (3, 50), seed)
        assert found.dtype == getattr(mx, dtype)
        places = (np.arange(150) + 1009 * seed) % 8191
        np.testing.assert_array_equal(exact(found).flatten(), pool[places])
    first = operands.normals(asked, (4,))
    assert mx.array_equal(first, operands.normals(asked, (4,), 1))


def test_rows_of_x_begin_with_normal_numbers_of_each_product() -> None:
    asked = problem_of(1, 32, 64)
    x = operands.activations(asked, (3, 20, 64))
    first = operands.normals(asked, (3, 8, 64))
    assert mx.array_equal(x[:, :8], first)
    assert mx.array_equal(x[:, 8:16], -first / 2)
    assert mx.array_equal(x[:, 16:], first[:, :4] / 4)
    assert mx.array_equal(
        operands.activations(asked, (5, 64)), first.reshape(24, 64)[:5]
    )
