"""Blocks of GGUF become the same codes, scales and weights."""

import mlx.core as mx
import numpy as np
import pytest
from gguf import constants, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_marlin import unpack
from mlx_marlin.checkpoints.gguf.block_types import BLOCK_TYPES
from mlx_marlin.checkpoints.gguf.blocks import LAYOUTS, read_blocks, read_plain
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.weights.bit_streams import codes_of_words
from support.gguf_blocks import (
    E2M1,
    NUMBERS,
    QUANTIZED,
    SIZES,
    block_values,
    draw_block,
    write_block,
)
from support.gguf_files import plain_bytes

SEEDS = st.integers(0, 2**32 - 1)
BATCHES = st.sampled_from([(), (1,), (3,), (2, 2)])
types = pytest.mark.parametrize("name", QUANTIZED)
plain_types = pytest.mark.parametrize("name", ["F32", "F16", "BF16"])


def read(name: str, data: bytes, shape: tuple[int, ...]) -> StoredWeight:
    return read_blocks(memoryview(data), BLOCK_TYPES[NUMBERS[name]], shape)


def values(weight: StoredWeight) -> np.ndarray:
    """Returns the weights, float32, computed as ggml does."""
    codes = np.array(codes_of_words(weight.codes, weight.bits))
    weight = weight.with_float_scales()
    spread = [
        None if part is None else np.repeat(np.array(part), weight.group_size, axis=-1)
        for part in (weight.scales, weight.biases)
    ]
    scales, biases = spread
    if weight.mode in ("mxfp4", "nvfp4"):
        table = np.array([*E2M1, *(-value for value in E2M1)], np.float32)
        return _float_scales(weight.mode, scales) * table[codes]
    scales = scales.astype(np.float32)
    if weight.mode == "codebook":
        return scales * np.array(weight.codebook)[codes]
    if weight.mode == "symmetric":
        return scales * (codes.astype(np.float32) - (1 << weight.bits - 1))
    return scales * codes.astype(np.float32) + biases.astype(np.float32)


def _float_scales(mode: str, octets: np.ndarray) -> np.ndarray:
    if mode == "mxfp4":
        return np.ldexp(np.float32(1), octets.astype(np.int32) - 127)
    exponent, fraction = octets.astype(np.int32) >> 3, octets & 7
    fraction = np.where(exponent == 0, fraction, fraction + 8).astype(np.float32)
    return np.ldexp(fraction, np.maximum(exponent, 1) - 10)


def test_sizes_are_those_of_the_gguf_package() -> None:
    known = {
        kind.value: (kind.name, *constants.GGML_QUANT_SIZES[kind])
        for kind in constants.GGMLQuantizationType
    }
    ours = {
        number: (block.name, block.elements, block.nbytes)
        for number, block in BLOCK_TYPES.items()
    }

    assert ours == known


@types
@settings(max_examples=200)
@given(batch=BATCHES, n=st.integers(1, 5), blocks=st.integers(1, 4), seed=SEEDS)
def test_weights_are_those_of_the_gguf_package(
    name: str, batch: tuple[int, ...], n: int, blocks: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    elements, _ = SIZES[name]
    shape = (*batch, n, blocks * elements)
    count = int(np.prod(shape)) // elements
    drawn = [draw_block(name, random) for _ in range(count)]
    data = b"".join(write_block(name, block) for block in drawn)
    octets = np.frombuffer(data, np.uint8).reshape(*shape[:-1], -1)

    weight = read(name, data, shape)

    assert weight.shape == shape
    exact = np.array([block_values(name, block) for block in drawn]).reshape(shape)
    expected = exact.astype(np.float32)
    if name != "Q1_0":  # which the package does not decode
        expected = quants.dequantize(octets, constants.GGMLQuantizationType[name])
        np.testing.assert_allclose(expected, exact, rtol=2e-7, atol=1e-12)
    np.testing.assert_array_equal(values(weight), expected)
    codes = np.array([block.codes for block in drawn]).reshape(shape)
    np.testing.assert_array_equal(codes_of_words(weight.codes, weight.bits), codes)


@types
def test_many_chunks_are_as_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(5)
    elements, _ = SIZES[name]
    data = b"".join(write_block(name, draw_block(name, random)) for _ in range(12))
    whole = read(name, data, (3, 4 * elements))

    monkeypatch.setattr("mlx_marlin.checkpoints.gguf.blocks.CHUNK", 500)
    parts = read(name, data, (3, 4 * elements))

    np.testing.assert_array_equal(values(parts), values(whole))


@types
@settings(max_examples=25)
@given(n=st.integers(1, 40), blocks=st.integers(1, 3), seed=SEEDS)
def test_packing_keeps_codes_and_scales(
    name: str, n: int, blocks: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    elements, _ = SIZES[name]
    data = [write_block(name, draw_block(name, random)) for _ in range(n * blocks)]
    weight = read(name, b"".join(data), (n, blocks * elements)).with_float_scales()

    codes, *parameters = unpack(weight.packed())

    assert mx.array_equal(codes, weight.codes)
    assert mx.array_equal(parameters[0], weight.scales)
    if weight.codebook is not None:
        assert mx.array_equal(weight.packed().codebook, weight.codebook)
    if weight.biases is not None:
        assert mx.array_equal(parameters[1], weight.biases)


@types
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_scales_must_be_finite(name: str, bits: int) -> None:
    block = draw_block(name, np.random.default_rng(0))
    if name == "MXFP4":
        block.scales = [255]
    elif name == "NVFP4":
        block.scales[2] = 0x80 + bits % 7
    else:
        block.halves[-1] = bits

    with pytest.raises(ValueError, match="a scale"):
        read(name, write_block(name, block), (1, SIZES[name][0]))


def test_twice_the_scale_of_q1_0_must_be_a_float16() -> None:
    block = draw_block("Q1_0", np.random.default_rng(0))
    block.halves = [0x7800]

    with pytest.raises(ValueError, match="a scale of a block is above 32752"):
        read("Q1_0", write_block("Q1_0", block), (1, 128))


def test_codes_of_iq4_stand_for_the_numbers_of_the_gguf_package() -> None:
    random = np.random.default_rng(2)
    for name, package in (("IQ4_NL", quants.IQ4_NL), ("IQ4_XS", quants.IQ4_XS)):
        weight = read(
            name, write_block(name, draw_block(name, random)), (1, SIZES[name][0])
        )
        assert weight.codebook.tolist() == [*quants.IQ4_NL.kvalues]
        assert package.block_size == SIZES[name][0]


def test_nvfp4_reads_a_scale_of_seven_f_as_zero() -> None:
    block = draw_block("NVFP4", np.random.default_rng(0))
    block.scales = [0x7F, 0x38, 0x7E, 0x01]

    weight = read("NVFP4", write_block("NVFP4", block), (1, 64))

    assert weight.scales.tolist() == [[0, 0x38, 0x7E, 0x01]]


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_floating_codes_are_those_of_mlx(name: str) -> None:
    random = np.random.default_rng(3)
    data = [write_block(name, draw_block(name, random)) for _ in range(8)]
    weight = read(name, b"".join(data), (2, 4 * SIZES[name][0]))

    decoded = mx.dequantize(
        weight.codes,
        weight.scales,
        group_size=weight.group_size,
        bits=4,
        mode=weight.mode,
        dtype=mx.float32,
    )

    np.testing.assert_array_equal(np.array(decoded), values(weight))


@plain_types
@settings(max_examples=200)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=SEEDS)
def test_numbers_keep_their_bits(name: str, shape: list[int], seed: int) -> None:
    drawn = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    data = plain_bytes(name, drawn)

    array = read_plain(memoryview(data), BLOCK_TYPES[NUMBERS[name]], tuple(shape))

    dtypes = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
    assert array.dtype == dtypes[name]
    assert array.shape == tuple(shape)
    assert bytes(np.array(array.view(mx.uint8)).tobytes()) == data


def test_every_type_with_blocks_that_is_written_is_read() -> None:
    assert set(LAYOUTS) == set(QUANTIZED)
