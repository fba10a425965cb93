"""Packing and unpacking of bit streams agree with single-bit references."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.weights.bit_streams import codes_of_words, words_of_codes
from support.format_cases import read_codes

WIDTHS = range(1, 9)
SEEDS = st.integers(0, 2**32 - 1)
widths = pytest.mark.parametrize("bits", WIDTHS)


def random_words(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    draw = np.random.default_rng(seed)
    return mx.array(draw.integers(0, 2**32, shape, dtype=np.uint32))


@widths
@given(rows=st.integers(1, 4), runs=st.integers(1, 5), seed=SEEDS)
def test_words_are_one_stream_of_bits_a_row_both_ways(
    bits: int, rows: int, runs: int, seed: int
) -> None:
    words = random_words((rows, runs * bits), seed)

    codes = codes_of_words(words, bits)

    assert codes.dtype == mx.uint8
    np.testing.assert_array_equal(np.array(codes), read_codes(words, bits))
    back = words_of_codes(codes, bits)
    assert back.dtype == mx.uint32
    assert mx.array_equal(back, words)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_reads_the_same_codes(bits: int) -> None:
    words = random_words((3, 2 * bits))
    ones = mx.ones((3, 1))

    values = mx.dequantize(words, ones, ones - 1, group_size=64, bits=bits)

    assert mx.array_equal(values.astype(mx.uint8), codes_of_words(words, bits))


@pytest.mark.parametrize("shape", [(16,), (2, 3, 8), (1, 2, 2, 8)])
def test_leading_dimensions_stay(shape: tuple[int, ...]) -> None:
    words = random_words(shape)

    codes = codes_of_words(words, 4)

    assert codes.shape == (*shape[:-1], 8 * shape[-1])
    assert mx.array_equal(words_of_codes(codes, 4), words)


@pytest.mark.parametrize("bits", [-1, 0, 9])
def test_a_width_that_a_byte_does_not_hold_is_refused(bits: int) -> None:
    for function in (codes_of_words, words_of_codes):
        with pytest.raises(ValueError, match=f"bits={bits} is not between 1 and 8"):
            function(mx.zeros((1, 8), mx.uint32), bits)
