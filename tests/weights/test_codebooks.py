"""Formats with tables of values and with super-blocks."""

from contextlib import nullcontext
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_marlin
from mlx_marlin import state
from mlx_marlin.backends import selection
from mlx_marlin.checkpoints.formats import marlin_folder
from mlx_marlin.checkpoints.stored_weight import TILES
from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.layers.joined import can_join, join, separate
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.planning.problem import problem_of
from mlx_marlin.products.experts import gather_gated
from mlx_marlin.products.packing import pack, unpack
from mlx_marlin.weights import super_blocks
from mlx_marlin.weights.formats import FORMATS, SUPER_BLOCK
from support import format_cases, launches, oracles
from support.packed_codes import SEEDS, any_bits, assert_same_bits, packed_of
from support.profiles import drawn

SIZES = [(16, "float32"), (32, "float16"), (64, "bfloat16"), (128, "float32")]
SIZES += [(256, "float16"), (16, "bfloat16")]
"""Every group size, and every dtype."""
NUMBERS = np.array(format_cases.NUMBERS, np.float32)


def normal_float() -> np.ndarray:
    """Returns NF4's numbers, float32 [16], from their definition (QLoRA, section 3).

    They are quantiles of a normal distribution: 8 above zero, zero, and 7 below it,
    divided by the largest. Its tails are cut off at the mean of two probabilities.
    """
    tail = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    quantile = NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(tail, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(tail, 0.5, 8)[:-1]]
    numbers = np.array(sorted([*above, 0, *below]))
    return (numbers / numbers.max()).astype(np.float32)


NF4 = normal_float()


def test_nf4_is_the_table_that_tools_print() -> None:
    known = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453]
    known += [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0]
    known += [0.07958029955625534, 0.16093020141124725, 0.24611230194568634]
    known += [0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
    known += [0.7229568362236023, 1.0]
    np.testing.assert_allclose(NF4, known, atol=1e-6)


@pytest.mark.skipif(selection.backend() == "stock", reason="no kernels run here")
@drawn(
    33,
    n=st.integers(1, 70),
    groups=st.integers(1, 6),
    form=st.sampled_from(SIZES),
    seed=SEEDS,
)
def test_nf4_is_decoded_bit_for_bit(
    n: int, groups: int, form: tuple[int, str], seed: int
) -> None:
    size, dtype = form
    k = size * groups if size != 16 else 64 * groups
    weight = any_bits("codebook", 4, size, n=n, k=k, dtype=dtype, seed=seed)
    codes = format_cases.read_codes(weight.native[0], 4)
    scales = np.repeat(oracles.exact(weight.native[1]).astype(np.float32), size, 1)

    packed = mlx_marlin.pack(
        *weight.native, group_size=size, mode="codebook", codebook=mx.array(NF4)
    )

    expected = scales * NF4[codes]
    ours = mlx_marlin.dequantize(packed, mx.float32)
    np.testing.assert_array_equal(np.array(ours), expected)
    problem = problem_of(
        1, n, k, mode="codebook", group_size=size, dtype=dtype, layout="marlin"
    )
    decode = launches.dequantized(dequantize_plan(problem))
    w = decode(packed.words, packed.scales, packed.scales)
    np.testing.assert_array_equal(
        oracles.exact(w), format_cases.rounded(expected.astype(float), dtype)
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "uint16"])
def test_lanes_see_the_codebook_of_every_32_rows(dtype: str) -> None:
    """Written from `codebook_entry` alone: 64 bytes in front of the scales."""
    mode, k = ("k_codebook", 256) if dtype == "uint16" else ("codebook", 96)
    weight = any_bits(mode, 4, 32, n=70, k=k, dtype=dtype, seed=1)

    packed = mlx_marlin.pack(*weight.native, **weight.options)

    tiles = np.array(packed.scales.view(mx.uint8)).reshape(3, -1)
    for tile in tiles:
        np.testing.assert_array_equal(tile[:64].copy().view("<f4"), NUMBERS)
        assert dtype != "float32" or not tile[64:128].any()


@pytest.mark.parametrize("mode", ["codebook", "k_codebook"])
def test_the_codebook_is_what_was_given(mode: str) -> None:
    weight = any_bits(mode, 4, 32, n=40, k=512, seed=2)
    narrow = mx.array(NUMBERS).astype(mx.bfloat16)

    packed = mlx_marlin.pack(*weight.native, **(weight.options | {"codebook": narrow}))

    assert_same_bits(packed.codebook, narrow.astype(mx.float32))
    for ours, theirs in zip(mlx_marlin.unpack(packed), weight.native, strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codebook": None}, "mode='codebook' needs a codebook"),
        ({"mode": "symmetric"}, "mode='symmetric' takes no codebook"),
        ({"codebook": mx.zeros(15)}, r"16 floats, got float32 with shape \(15,\)"),
        ({"codebook": mx.zeros(16, mx.int32)}, "16 floats, got int32"),
        ({"codebook": mx.full(16, mx.inf)}, "a number that is NaN or infinite"),
        # x times such a number has no float32, whatever scale follows.
        (
            {"codebook": mx.array(NF4) * -1e38},
            r"number 1e\+38, .* to 65536: move a fac",
        ),
        (
            {"codebook": mx.array(NF4) * 65540},
            "number -65540, expected 0 or magnitudes",
        ),
        ({"codebook": mx.array(NF4) * 1e-38}, "number -1e-38, expected 0"),
        ({"codebook": mx.array([1e-40, *NF4[1:].tolist()])}, "number 9.99995e-41, exp"),
        ({"bits": 3}, "mode='codebook' with bits=3"),
        ({"biases": mx.zeros((3, 1))}, "takes no biases"),
        ({"codebook": [0.0] * 16}, "codebook"),
    ],
    ids=str,
)
def test_wrong_codebooks_are_refused(change: dict[str, Any], message: str) -> None:
    options = {"mode": "codebook", "codebook": mx.array(NF4), "group_size": 64} | change
    error = TypeError if isinstance(options["codebook"], list) else ValueError
    with pytest.raises(error, match=message):
        mlx_marlin.pack(mx.zeros((3, 8), mx.uint32), mx.zeros((3, 1)), **options)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [2.0**16, 2.0**-64])
@pytest.mark.parametrize("activations", [6e4, 1e-7])
def test_the_largest_and_the_smallest_codebooks_have_ordinary_products(
    size: float, activations: float
) -> None:
    """With scales that make weights of 1 and -1 of them, in one group."""
    weight = any_bits("codebook", 4, 128, n=40, k=128, dtype="float32", seed=6)
    table, scales = np.sign(NF4) * size, np.full((40, 1), 1 / size, np.float32)
    x = np.random.default_rng(3).uniform(0.5, 1, (3, 128)) * activations
    packed = mlx_marlin.pack(
        weight.native[0],
        mx.array(scales),
        **(weight.options | {"codebook": mx.array(table)}),
    )

    y = mlx_marlin.quantized_matmul(mx.array(x.astype(np.float32)), packed)

    codes = format_cases.read_codes(weight.native[0], 4)
    assert oracles.error(y, x @ (table[codes] / size).T) < 1e-5


def test_a_stored_layer_with_several_codebooks_is_refused() -> None:
    weight = any_bits("codebook", 4, 32, n=64, k=64, seed=3)
    packed = mlx_marlin.pack(*weight.native, **weight.options)
    record = {"layout": TILES, "mode": "codebook"}
    record |= {name: getattr(packed, name) for name in marlin_folder.SIZES}
    arrays = {"a.words": packed.words, "a.packed_scales": packed.scales}
    folder = SimpleNamespace(arrays=arrays, read=arrays.__getitem__)
    read = marlin_folder.read(folder, "a", record)
    assert_same_bits(read.stored().codebook, mx.array(NUMBERS))

    arrays["a.packed_scales"] = packed.scales + 0
    arrays["a.packed_scales"][1, 0, 7] = 1

    with pytest.raises(ValueError, match="rows have several codebooks"):
        marlin_folder.read(folder, "a", record)


def layer_of(weight: format_cases.Weight, codebook: np.ndarray) -> MarlinLinear:
    options = weight.options | {"codebook": mx.array(codebook)}
    return MarlinLinear.from_packed(mlx_marlin.pack(*weight.native, **options))


def test_layers_are_joined_only_if_they_share_a_codebook() -> None:
    first, second = (
        format_cases.any_weight("codebook", 4, 32, 40, 96, dtype="float16", seed=seed)
        for seed in (1, 2)
    )
    layers = [layer_of(first, NUMBERS), layer_of(second, NUMBERS)]
    x = mx.random.normal((3, 96), key=mx.random.key(0)).astype(mx.float16)

    parts = join(layers)

    for part, weight in zip(parts, (first, second), strict=True):
        exact = oracles.exact(x) @ weight.decoded.T
        assert oracles.error(part(x), exact) < 1e-3
    for layer, weight in zip(separate(parts[0].shared), (first, second), strict=True):
        assert_same_bits(layer.packed.codebook, mx.array(NUMBERS))
        for ours, theirs in zip(layer.native(), (*weight.native, None), strict=True):
            assert ours is theirs or mx.array_equal(ours, theirs)
    assert not can_join([layers[0], layer_of(second, NF4)])


@pytest.mark.parametrize(
    ("mode", "dtype", "warns"),
    [("codebook", mx.float16, True), ("k_codebook", mx.float32, False)],
)
def test_restored_layers_are_decoded_and_say_whether_that_rounds(
    mode: str, dtype: mx.Dtype, warns: bool
) -> None:
    state.reset()  # it warns once
    weight = format_cases.any_weight(mode, 4, 32, 40, 256, dtype="float16", seed=5)
    model = nn.Sequential(layer_of(weight, NUMBERS))

    with pytest.warns(RuntimeWarning, match="codebooks") if warns else nullcontext():
        mlx_marlin.restore(model)

    (layer,) = model.layers
    assert type(layer) is nn.Linear
    expected = format_cases.rounded(weight.decoded, str(dtype).split(".")[-1])
    assert layer.weight.dtype == dtype
    np.testing.assert_array_equal(oracles.exact(layer.weight), expected)


@pytest.mark.usefixtures("kernels")
def test_gate_and_up_of_experts_have_codebooks_of_their_own() -> None:
    draw = np.random.default_rng(4)
    packed, decoded = [], []
    for table in (NUMBERS, NF4):
        weight = format_cases.any_weight(
            "codebook", 4, 32, 3 * 40, 96, dtype="float32", seed=int(draw.integers(9))
        )
        native = (each.reshape(3, 40, -1) for each in weight.native)
        options = weight.options | {"codebook": mx.array(table)}
        packed.append(mlx_marlin.pack(*native, **options))
        scale, _, _ = weight.parts
        codes = format_cases.read_codes(weight.native[0], 4)
        decoded.append((scale * table[codes]).reshape(3, 40, 96))
    x = mx.random.normal((4, 96), key=mx.random.key(1))
    indices = mx.array([[0, 2], [1, 1], [2, 0], [0, 1]], mx.uint32)

    y = gather_gated(x, *packed, indices)

    chosen = (w[np.array(indices)] for w in decoded)
    gate, up = (np.einsum("mk,mcnk->mcn", oracles.exact(x), w) for w in chosen)
    assert y is not None
    assert oracles.error(y.squeeze(-2), gate / (1 + np.exp(-gate)) * up) < 1e-5
    layer = MarlinSwitchLinear.from_packed(packed[1])
    y = layer(x[:, None, None], indices)
    assert oracles.error(y.squeeze(-2), up) < 1e-5


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
