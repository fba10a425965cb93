"""Packed weights lose nothing, and quantized ones are those of MLX."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import prod

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_marlin.products.packing import pack, quantize, unpack
from mlx_marlin.products.reference.weight import as_mlx, plain, stock_group_size
from mlx_marlin.weights import layout, quantizers
from mlx_marlin.weights.formats import CHANNEL, FORMATS
from mlx_marlin.weights.packed_weight import PackedWeight
from support import format_cases, oracles, strategies
from support.format_cases import MLX_MODES, Integers, Weight, read_codes
from support.packed_codes import (
    SEEDS,
    any_bits,
    assert_same_bits,
    grouped,
    of_groups,
    packed_of,
    weights,
)
from support.profiles import sampled


@st.composite
def weights_of(
    draw: st.DrawFn, mode: str, bits: int, group_size: int, most_n: int = 70
) -> Weight:
    """Draws a ragged weight of a format."""
    step = format_cases.step_of(mode, bits, group_size)
    return any_bits(
        mode,
        bits,
        group_size,
        n=draw(strategies.sizes(most_n)),
        k=step * draw(strategies.sizes(320 // step)),
        dtype=draw(strategies.DTYPES),
        seed=draw(SEEDS),
    )


def plane_seen_by_lanes(words: Integers, bits: int, group_size: int) -> Integers:
    """Returns a plane [padded n, padded k] as the shader's lanes read it.

    Written from `shaders/lib/lane.metal` alone: a step's words of a plane come four at
    a time, lane after lane; the lane at (row, pair) finds the pair of step t of its row
    of fragment f in word t / IN_WORD * 4 + f, or where a row leaves room in a word, the
    rows one after the other; and fragment column c = 2 pair + b has k = c * pairs + t.
    """
    tiles_n, tiles_k = words.shape[:2]
    pairs = 4 if group_size == 32 else 8
    of_lane, in_word = pairs * bits // 4, 16 // bits
    chunk = min(of_lane, 4)
    plane = np.full((32 * tiles_n, 64 * tiles_k), 999)
    ranges = map(range, (8 // pairs, 32, 4, pairs, 2))
    for step, lane, f, t, b in product(*ranges):
        row = (lane >> 1) % 4 + 4 * (lane >> 4)
        c = 2 * (lane % 2 + 2 * ((lane >> 3) % 2)) + b
        if in_word > pairs:
            word, slot = divmod(f, in_word // pairs)
            slot = slot * pairs + t
        else:
            word, slot = t // in_word * 4 + f, t % in_word
        place = 32 * (step * of_lane + word // chunk * chunk) + chunk * lane
        codes = words[:, :, place + word % chunk] >> 16 * b + bits * slot
        k = 8 * pairs * step + pairs * c + t
        plane[8 * f + row :: 32, k::64] = codes & (1 << bits) - 1
    return plane


def seen_by_lanes(packed: PackedWeight) -> Integers:
    """Returns codes [padded n, padded k], of all planes."""
    words = np.array(packed.words).astype(np.int64)
    planes = {3: (2, 1), 5: (4, 1), 6: (4, 2)}.get(packed.bits, (packed.bits,))
    codes, low = 0, 0
    for bits in planes:
        own = words[..., 64 * low : 64 * (low + bits)]
        codes = codes | plane_seen_by_lanes(own, bits, packed.group_size) << low
        low += bits
    return np.asarray(codes)


def quantizers_seen_by_lanes(packed: PackedWeight) -> mx.array:
    """Returns [padded n, groups, 1 or 2] as `load_quantizers` reads them."""
    scales = packed.scales
    if packed.mode == "codebook":  # which precedes them
        scales = scales[:, 0, 32:].reshape(len(scales), -1, 32)
    tiles_n, groups, stored = scales.shape
    each = stored // 32
    rows = [
        scales[tile, :, (4 * row + f) * each : (4 * row + f + 1) * each]
        for tile, f, row in product(range(tiles_n), range(4), range(8))
    ]
    return mx.stack(rows).reshape(32 * tiles_n, groups, each)


@sampled(18)
@grouped
@given(data=st.data())
@settings(max_examples=10)
def test_unpack_gives_back_every_bit(
    mode: str, bits: int, group_size: int, data: st.DataObject
) -> None:
    weight = data.draw(weights_of(mode, bits, group_size))

    packed = packed_of(weight)

    n, k = weight.native[0].shape[0], weight.native[0].shape[1] * 32 // bits
    assert packed.shape == (n, k)
    assert packed.dtype == weight.native[1].dtype
    size = k if group_size == CHANNEL else group_size
    assert (packed.mode, packed.bits, packed.group_size) == (mode, bits, size)
    for actual, expected in zip(unpack(packed), weight.native, strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize(("mode", "bits", "group_size"), format_cases.OF_MLX)
def test_what_mlx_quantizes_comes_back(mode: str, bits: int, group_size: int) -> None:
    w = weights(2, mx.bfloat16)
    options = {"group_size": group_size, "bits": bits, "mode": mode}
    native = mx.quantize(w, **options)

    for actual, expected in zip(unpack(pack(*native, **options)), native, strict=True):
        assert_same_bits(actual, expected)
    for actual, expected in zip(unpack(quantize(w, **options)), native, strict=True):
        assert_same_bits(actual, expected)


@sampled(24)
@grouped
@given(data=st.data())
@settings(max_examples=3)
def test_lanes_see_every_code_and_zeros_beside_them(
    mode: str, bits: int, group_size: int, data: st.DataObject
) -> None:
    weight = data.draw(weights_of(mode, bits, group_size))
    codes = read_codes(weight.native[0], bits)
    n, k = codes.shape

    seen = seen_by_lanes(packed_of(weight))

    expected = np.zeros(layout.padded(n, k), np.int64)
    expected[:n, :k] = codes
    np.testing.assert_array_equal(seen, expected)


@sampled(24)
@of_groups
@given(data=st.data())
@settings(max_examples=3)
def test_lanes_see_every_scale_and_bias_and_zeros_beside_them(
    mode: str, bits: int, group_size: int, data: st.DataObject
) -> None:
    weight = data.draw(weights_of(mode, bits, group_size))
    words, *stored = weight.native
    n, groups = stored[0].shape

    seen = quantizers_seen_by_lanes(packed_of(weight))

    padded_n, padded_k = layout.padded(n, words.shape[1] * 32 // bits)
    assert seen.shape == (padded_n, -(-padded_k // weight.group_size), len(stored))
    for i, each in enumerate(stored):
        assert_same_bits(seen[:n, :groups, i], each)
    assert not seen[n:].any()
    assert not seen[:, groups:].any()


@sampled(20)
@grouped
@given(batch=st.sampled_from([(1,), (3,), (2, 2)]), data=st.data())
@settings(max_examples=3)
def test_a_batch_is_packed_as_its_weights_one_by_one(
    mode: str, bits: int, group_size: int, batch: tuple[int, ...], data: st.DataObject
) -> None:
    weight = data.draw(weights_of(mode, bits, group_size, most_n=40))
    others = (mx.concatenate([each[1:], each[:1]]) for each in weight.native)
    many = [
        mx.stack([own, *[other] * (prod(batch) - 1)]).reshape(*batch, *own.shape)
        for own, other in zip(weight.native, others, strict=True)
    ]

    packed = pack(*many, **weight.options)

    one = packed_of(weight)
    assert packed.batch == batch
    assert packed.shape == (*batch, *one.shape)
    first = (0,) * len(batch)
    assert_same_bits(packed.words[first], one.words)
    assert_same_bits(packed.scales[first], one.scales)
    for actual, expected in zip(unpack(packed), many, strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("mode", ["affine", "symmetric", "nvfp4"])
def test_a_batch_is_quantized_as_its_weights_one_by_one(mode: str) -> None:
    w = mx.random.normal((2, 3, 5, 64), key=mx.random.key(6))

    packed = quantize(w, mode=mode)

    assert packed.shape == w.shape
    one = quantize(w[1, 2], mode=mode)
    assert_same_bits(packed.words[1, 2], one.words)
    assert_same_bits(packed.scales[1, 2], one.scales)


@pytest.mark.parametrize(("mode", "bits"), FORMATS)
def test_padding_stands_for_zero(mode: str, bits: int) -> None:
    group_size = FORMATS[mode, bits].group_sizes_in("marlin")[0]
    k = format_cases.step_of(mode, bits, group_size)
    k = 96 if k == 32 else k
    weight = any_bits(mode, bits, group_size, n=5, k=k, seed=1)

    packed = packed_of(weight)

    padded_n, padded_k = layout.padded(5, k)
    whole = replace(packed, n=padded_n, k=padded_k)
    decoded = replace(weight, native=unpack(whole)).decoded
    assert not decoded[5:].any()
    assert not decoded[:, k:].any()
    np.testing.assert_array_equal(decoded[:5, :k], weight.decoded)


def test_padding_is_minimal() -> None:
    packed = packed_of(any_bits(group_size=32, n=33, k=96))

    assert packed.words.shape == (2, 2, 256)
    assert packed.scales.shape == (2, 4, 64)
    assert packed.nbytes == 2 * 2 * 256 * 4 + 2 * 4 * 64 * 2
    whole = packed_of(any_bits(group_size=32, n=64, k=128))
    assert packed.nbytes == whole.nbytes == 64 * 128 // 2 + 64 * 4 * 2 * 2


@pytest.mark.parametrize(("mode", "bits"), FORMATS)
def test_whole_tiles_take_no_byte_more_than_mlxs_layout(mode: str, bits: int) -> None:
    group_size = FORMATS[mode, bits].group_sizes_in("marlin")[0]
    k = 256 if mode in format_cases.SUPER_BLOCKS else 192
    weight = any_bits(mode, bits, group_size, n=64, k=k)

    packed = packed_of(weight)

    codebooks = 2 * 64 if mode in format_cases.WITH_CODEBOOK else 0
    assert packed.nbytes == codebooks + sum(each.nbytes for each in weight.native)


@pytest.mark.parametrize(
    "view",
    [
        lambda array: mx.concatenate([array, array], axis=1)[:, : array.shape[1]],
        lambda array: mx.repeat(array, 2, axis=0)[::2],
        lambda array: mx.contiguous(array.T).T,
    ],
    ids=["columns", "rows", "transposed"],
)
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_strided_arrays_are_packed_as_their_copies(
    bits: int, view: Callable[[mx.array], mx.array]
) -> None:
    weight = any_bits(bits=bits, n=40, k=192, seed=2)

    packed = pack(*(view(each) for each in weight.native), bits=bits)

    expected = packed_of(weight)
    assert_same_bits(packed.words, expected.words)
    assert_same_bits(packed.scales, expected.scales)


def test_scales_and_biases_of_two_dtypes_meet_in_the_one_that_holds_both() -> None:
    w, scales, biases = any_bits(n=3, k=64, seed=3).native

    packed = pack(w, scales, biases.astype(mx.bfloat16))

    assert packed.dtype == mx.float32
    _, wide_scales, wide_biases = unpack(packed)
    assert_same_bits(wide_scales, scales.astype(mx.float32))
    assert_same_bits(wide_biases, biases.astype(mx.bfloat16).astype(mx.float32))


@grouped
def test_as_mlx_means_the_same_to_stock(mode: str, bits: int, group_size: int) -> None:
    # A row of 192 has three groups of 64, one of 256 or 512 several of 128.
    for k in (192, 512):
        if k % format_cases.step_of(mode, bits, group_size or 64):
            continue
        weight = format_cases.any_weight(
            mode, bits, group_size, 9, k, dtype="float32", seed=4
        )
        packed = packed_of(weight)

        size = stock_group_size(packed)

        if size is None:
            assert group_size == 16 or mode in format_cases.WITH_CODEBOOK
            assert mode not in MLX_MODES[1:]
            w = plain(packed, mx.float32)
        else:
            known = mode if mode in MLX_MODES else "affine"
            options = {"group_size": size, "bits": bits, "mode": known}
            w = mx.dequantize(*as_mlx(packed), **options, dtype=mx.float32)
        decoded = oracles.exact(w)
        np.testing.assert_allclose(decoded, weight.decoded, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_asymmetric_scales_and_codes_are_those_of_mlx(
    group_size: int, bits: int, dtype: mx.Dtype
) -> None:
    w = weights(0, dtype)
    expected = mx.quantize(w, group_size=group_size, bits=bits)

    packed = unpack(quantize(w, group_size=group_size, bits=bits))
    ours = quantizers.affine(w, group_size, bits)

    for of_mlx, of_packed, by_us in zip(expected, packed, ours, strict=True):
        assert_same_bits(of_packed, of_mlx)
        assert_same_bits(by_us, of_mlx)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("mode", ["affine", "symmetric"])
def test_more_scales_round_less(mode: str, dtype: str) -> None:
    w = weights(3, getattr(mx, dtype))[3:]
    errors = []
    for group_size in (16, 32, 64, 128, 256, "channel"):
        packed = quantize(w, group_size=group_size, bits=4, mode=mode)
        of_k = w.shape[1] if group_size == "channel" else group_size
        assert packed.group_size == of_k
        weight = Weight(mode, 4, of_k, unpack(packed))
        assert weight.native[1].shape == (len(w), w.shape[1] // of_k)
        errors.append(oracles.error(mx.array(weight.decoded), oracles.exact(w)))

    assert errors[:5] == sorted(errors[:5])
    assert errors[0] < 0.8 * errors[4]
    assert errors[5] == errors[4]  # a row of 256


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_symmetric_codes_stand_for_whole_steps_around_an_exact_zero(
    bits: int, dtype: str
) -> None:
    for group_size in (32, 64, 128):
        w = weights(1, getattr(mx, dtype))

        packed = quantize(w, group_size=group_size, bits=bits, symmetric=True)

        assert (packed.mode, packed.dtype) == ("symmetric", w.dtype)
        weight = Weight("symmetric", bits, group_size, unpack(packed))
        assert len(weight.native) == 2  # no bias is stored
        scale, steps, _ = weight.parts
        np.testing.assert_array_equal(steps[0], 0)
        np.testing.assert_array_equal(weight.decoded[1:3], oracles.exact(w[1:3]))
        distance = np.abs(weight.decoded - oracles.exact(w))
        # A code rounds by half a step, and the scale by half a place for each step. The
        # largest of a group is exact and the far end may be one step short.
        scale_error = oracles.ROUNDING[dtype] * 2**bits
        step = np.abs(scale) * (1 + scale_error)
        assert (distance <= step).all()
        within = np.abs(oracles.exact(w)) <= (2 ** (bits - 1) - 1) * np.abs(scale)
        assert (distance <= (0.5 + 1e-6) * np.abs(scale))[within].all()


def test_symmetric_zeros_inside_a_group_stay_zero() -> None:
    w = mx.array(np.random.default_rng(5).normal(size=(4, 64)).astype(np.float32))
    w[:, ::3] = 0

    packed = quantize(w, symmetric=True)

    decoded = Weight("symmetric", 4, 64, unpack(packed)).decoded
    np.testing.assert_array_equal(decoded[:, ::3], 0)
    assert (decoded[:, 1::3] != 0).mean() > 0.8
    again = quantize(w, mode="symmetric")
    assert_same_bits(again.words, packed.words)
    assert_same_bits(again.scales, packed.scales)
