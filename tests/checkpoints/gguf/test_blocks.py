"""Blocks of GGUF become the same codes, scales and weights."""

from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin import unpack
from mlx_marlin.checkpoints.gguf import blocks
from mlx_marlin.checkpoints.gguf.blocks import BLOCK_TYPES
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.weights.bit_streams import codes_of_words
from support.gguf_blocks import (
    HALVES,
    NUMBERS,
    PLAIN,
    QUANTIZED,
    SIZES,
    decoded,
    draw_blocks,
    set_halves,
)
from support.gguf_files import plain_bytes
from support.profiles import drawn

SEEDS = st.integers(0, 2**32 - 1)
types = pytest.mark.parametrize("name", QUANTIZED)


def read(name: str, octets: np.ndarray, shape: tuple[int, ...]) -> StoredWeight:
    data = memoryview(octets.tobytes())
    return blocks.read_blocks(data, BLOCK_TYPES[NUMBERS[name]], shape)


def values(weight: StoredWeight) -> np.ndarray:
    """Returns the weights, float32, computed as ggml does, or by MLX for floats."""
    weight = weight.with_float_scales()
    if weight.mode in ("mxfp4", "nvfp4"):
        floats = mx.dequantize(
            weight.codes,
            weight.scales,
            group_size=weight.group_size,
            bits=4,
            mode=weight.mode,
            dtype=mx.float32,
        )
        return np.array(floats)
    codes = np.array(codes_of_words(weight.codes, weight.bits))
    scales, biases = (
        None if part is None else np.repeat(np.array(part), weight.group_size, axis=-1)
        for part in (weight.scales, weight.biases)
    )
    scales = scales.astype(np.float32)
    if weight.mode == "codebook":
        return scales * np.array(weight.codebook)[codes]
    if weight.mode == "symmetric":
        return scales * (codes.astype(np.float32) - (1 << weight.bits - 1))
    return scales * codes.astype(np.float32) + biases.astype(np.float32)


def test_sizes_are_those_of_the_gguf_package() -> None:
    ours = {
        block.name: (number, (block.elements, block.nbytes))
        for number, block in BLOCK_TYPES.items()
    }
    assert ours == {name: (NUMBERS[name], SIZES[name]) for name in NUMBERS}


@types
@drawn(
    60,
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    n=st.integers(1, 5),
    count=st.integers(1, 4),
    seed=SEEDS,
    chunk=st.sampled_from([500, blocks.CHUNK]),
)
def test_weights_are_those_of_the_gguf_package(
    name: str, batch: tuple[int, ...], n: int, count: int, seed: int, chunk: int
) -> None:
    shape = (*batch, n, count * SIZES[name][0])
    octets = draw_blocks(name, shape, np.random.default_rng(seed))

    with mock.patch.object(blocks, "CHUNK", chunk):
        weight = read(name, octets, shape)

    assert weight.shape == shape
    np.testing.assert_array_equal(values(weight), decoded(name, octets))


@types
@drawn(10, n=st.integers(1, 40), count=st.integers(1, 3), seed=SEEDS)
def test_packing_keeps_codes_and_scales(
    name: str, n: int, count: int, seed: int
) -> None:
    shape = (n, count * SIZES[name][0])
    octets = draw_blocks(name, shape, np.random.default_rng(seed))
    weight = read(name, octets, shape).with_float_scales()

    codes, *parameters = unpack(weight.packed())

    assert mx.array_equal(codes, weight.codes)
    assert mx.array_equal(parameters[0], weight.scales)
    if weight.codebook is not None:
        assert mx.array_equal(weight.packed().codebook, weight.codebook)
    if weight.biases is not None:
        assert mx.array_equal(parameters[1], weight.biases)


@types
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_scales_must_be_finite(name: str, value: float) -> None:
    shape = (1, SIZES[name][0])
    octets = draw_blocks(name, shape, np.random.default_rng(0), (1.0,))
    if name == "MXFP4":
        octets[0, 0] = 255
    elif name == "NVFP4":
        octets[0, 2] = np.array(value, "<f2").view("<u2") % 7 + 0x80
    else:
        start, stop = HALVES[name]
        halves = np.array([1.0, value][-(stop - start) // 2 :], "<f2")
        set_halves(name, octets, halves)

    with pytest.raises(ValueError, match="a scale"):
        read(name, octets, shape)


def test_twice_the_scale_of_q1_0_must_be_a_float16() -> None:
    octets = draw_blocks("Q1_0", (1, 128), np.random.default_rng(0), (32768.0,))

    with pytest.raises(ValueError, match="a scale of a block is above 32752"):
        read("Q1_0", octets, (1, 128))


def test_nvfp4_reads_a_scale_of_seven_f_as_zero() -> None:
    octets = draw_blocks("NVFP4", (1, 64), np.random.default_rng(0))
    octets[0, :4] = 0x7F, 0x38, 0x7E, 0x01

    weight = read("NVFP4", octets, (1, 64))

    assert weight.scales.tolist() == [[0, 0x38, 0x7E, 0x01]]


@pytest.mark.parametrize("name", PLAIN)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=SEEDS)
def test_numbers_keep_their_bits(name: str, shape: list[int], seed: int) -> None:
    drawn = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    data = plain_bytes(name, drawn)

    array = blocks.read_plain(
        memoryview(data), BLOCK_TYPES[NUMBERS[name]], tuple(shape)
    )

    dtypes = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
    assert array.dtype == dtypes[name]
    assert array.shape == tuple(shape)
    assert bytes(np.array(array.view(mx.uint8)).tobytes()) == data
