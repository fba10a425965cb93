"""Parameters of K-quants keep every bit, and lie where the shader reads them."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_marlin
from mlx_marlin.products.packing import pack, unpack
from mlx_marlin.weights import super_blocks
from mlx_marlin.weights.formats import FORMATS, SUPER_BLOCK
from support.packed_codes import SEEDS, any_bits, packed_of

GROUP = {2: 16, 3: 16, 4: 32, 5: 32, 6: 16}
BITS = tuple(GROUP)
SIGNED = (3, 6)


def words_of_record(bits: int) -> int:
    """Returns the 16-bit words of a super-block: 20 or 18 bytes."""
    return 9 if bits in SIGNED else 10


def record_seen_by_lanes(packed: mlx_marlin.PackedWeight) -> np.ndarray:
    """Returns [padded n, blocks, words] as `load_super_params` reads them.

    Written from `shaders/lib/weight_tile.metal` alone: a group has the bytes of rows
    0, 8, 16, 24, then of 1, 9, ... ; behind all groups lie the factors in this order.
    """
    tiles, blocks, _ = packed.scales.shape
    parameters = 1 if packed.bits in SIGNED else 2
    groups = 256 // packed.group_size
    bytes_of_group = 1 if packed.group_size == 16 else 2
    of_group = bytes_of_group * 32
    stored = np.array(packed.scales)
    octets = stored.view(np.uint8).reshape(tiles, blocks, -1)
    factors = octets[..., groups * of_group :].copy().view("<u2")
    seen = np.zeros((tiles, 32, blocks, words_of_record(packed.bits)), np.uint16)
    for row in range(8):
        for f in range(4):
            own = [
                octets[..., group * of_group + (4 * row + f) * bytes_of_group + i]
                for group in range(groups)
                for i in range(bytes_of_group)
            ]
            place = (4 * row + f) * parameters
            pairs = np.stack(own, axis=-1)
            seen[:, 8 * f + row, :, :8] = np.ascontiguousarray(pairs).view("<u2")
            seen[:, 8 * f + row, :, 8:] = factors[..., place : place + parameters]
    return seen.reshape(32 * tiles, blocks, -1)


@pytest.mark.parametrize("bits", BITS)
@given(n=st.integers(1, 70), blocks=st.integers(1, 4), seed=SEEDS)
@settings(max_examples=15)
def test_lanes_see_every_parameter_and_zeros_beside_them(
    bits: int, n: int, blocks: int, seed: int
) -> None:
    weight = any_bits(
        "k_quant", bits, GROUP[bits], n=n, k=SUPER_BLOCK * blocks, seed=seed
    )

    seen = record_seen_by_lanes(packed_of(weight))

    stored = np.array(weight.native[1]).reshape(n, blocks, -1)
    np.testing.assert_array_equal(seen[:n], stored)
    assert not seen[n:].any()


@pytest.mark.parametrize("bits", BITS)
def test_float_parameters_are_exact(bits: int) -> None:
    """Every byte times every finite float16, subnormal ones too."""
    halves = np.arange(2**16, dtype=np.uint16)
    halves = halves[np.isfinite(halves.view(np.float16))][: 2**15]
    record = np.random.default_rng(0).integers(
        0, 2**16, (len(halves), words_of_record(bits)), np.uint16
    )
    record[:, 8:] = halves[:, None]
    format = FORMATS["k_quant", bits]

    scales, biases = super_blocks.float_parameters(
        mx.array(record), format, GROUP[bits]
    )

    octets = record[:, :8].copy().view(np.int8 if bits in SIGNED else np.uint8)
    first, second = octets[:, ::2], octets[:, 1::2]
    if bits == 2:
        first, second = octets % 16, octets // 16
    d = halves.view(np.float16).astype(np.float64)[:, None]
    assert (biases is None) == (bits in SIGNED)
    if biases is None:
        np.testing.assert_array_equal(np.array(scales), d * octets)
    else:
        np.testing.assert_array_equal(np.array(scales), d * first)
        np.testing.assert_array_equal(np.array(biases), -d * second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 128}, "k=128 is not a multiple of 256"),
        ({"group_size": 64}, "group_size=64 is not one of"),
        ({"dtype": mx.float16}, "scales must be one of \\['uint16'\\]"),
        ({"words": 9}, "scales must be one of"),
        ({"biases": True}, "takes no biases"),
        ({"bits": 8}, "mode='k_quant' with bits=8"),
    ],
    ids=str,
)
def test_wrong_super_blocks_are_refused(change: dict[str, Any], message: str) -> None:
    k = change.get("k", 256)
    bits = change.get("bits", 4)
    w = mx.zeros((3, k * bits // 32), mx.uint32)
    shape = (3, change.get("words", 10))
    scales = mx.zeros(shape, change.get("dtype", mx.uint16))
    with pytest.raises(ValueError, match=message):
        pack(
            w,
            scales,
            scales if change.get("biases") else None,
            group_size=change.get("group_size"),
            bits=bits,
            mode="k_quant",
        )


@pytest.mark.parametrize("bits", BITS)
def test_the_bits_determine_the_group_size(bits: int) -> None:
    weight = any_bits("k_quant", bits, GROUP[bits], n=5, k=256)

    packed = pack(*weight.native, bits=bits, mode="k_quant")

    assert packed.group_size == GROUP[bits]
    assert len(unpack(packed)) == 2
