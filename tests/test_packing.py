"""Packing moves every bit to its place and back, and quantizing rounds as it says."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import mlx.core as mx
import numpy as np
import oracles
import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_marlin import layout
from mlx_marlin.packing import PackedWeight, pack, quantize, unpack
from mlx_marlin.problem import Problem

WEIGHTS = strategies.problems(max_m=1, max_n=100, max_k=512)
SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=30)


def any_bits(problem: Problem, seed: int) -> strategies.Native:
    """Makes a weight of random codes; scales of any sign, one group in four zero."""
    draw = np.random.default_rng(seed)
    words = draw.integers(0, 2**32, (problem.n, problem.k // 8), dtype=np.uint32)
    shape = (problem.n, problem.groups)
    kind = draw.integers(0, 4, shape)
    scales = np.where(kind == 0, 0.0, draw.normal(size=shape))
    biases = np.where(kind == 0, 0.0, draw.normal(size=shape) * 8)
    dtype = getattr(mx, problem.scale_dtype)
    return (
        mx.array(words),
        mx.array(scales.astype(np.float32)).astype(dtype),
        mx.array(biases.astype(np.float32)).astype(dtype),
    )


def assert_same_bits(actual: mx.array, expected: mx.array) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    same = mx.array_equal(actual.view(mx.uint8), expected.view(mx.uint8))
    assert same, "shape and dtype agree, the bits do not"


def nibbles(words: mx.array) -> NDArray[np.uint32]:
    """Returns [tile_n, tile_k, word, nibble] of packed words."""
    return (np.array(words)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15


def seen_by_lanes(packed: PackedWeight) -> NDArray[np.uint32]:
    """Returns codes [padded n, padded k] as the shader's lanes read them.

    Written from the comment at the top of `shaders/lib/lane.metal` alone: the lane at
    (row, pair) loads four words at 4 x lane, of rows row + 8 x fragment; nibble s + 4b
    is column c = 2 pair + b of step s; and k follows from c, s and the word's half h.
    """
    tiles_n, tiles_k = packed.words.shape[:2]
    inside = nibbles(packed.words)
    codes = np.full((32 * tiles_n, 64 * tiles_k), 99, np.uint32)
    for lane, h, fragment, s, b in product(*map(range, (32, 2, 4, 4, 2))):
        row = (lane >> 1) % 4 + 4 * (lane >> 4)
        pair = lane % 2 + 2 * ((lane >> 3) % 2)
        c = 2 * pair + b
        k = 32 * h + 4 * c + s if packed.group_size == 32 else 8 * c + 4 * h + s
        word = 128 * h + 4 * lane + fragment
        codes[8 * fragment + row :: 32, k::64] = inside[:, :, word, s + 4 * b]
    return codes


def quantizers_seen_by_lanes(packed: PackedWeight) -> mx.array:
    """Returns (scale, bias) [padded n, groups, 2] as `load_quantizers` reads them."""
    tiles_n, groups = packed.scales.shape[:2]
    rows = [
        packed.scales[tile, :, 8 * row + 2 * fragment : 8 * row + 2 * fragment + 2]
        for tile, fragment, row in product(range(tiles_n), range(4), range(8))
    ]
    return mx.stack(rows).reshape(32 * tiles_n, groups, 2)


@given(problem=WEIGHTS, seed=SEEDS)
def test_unpack_gives_back_every_bit(problem: Problem, seed: int) -> None:
    native = any_bits(problem, seed)

    packed = pack(*native, group_size=problem.group_size)

    assert packed.shape == (problem.n, problem.k)
    assert packed.dtype == native[1].dtype
    for actual, expected in zip(unpack(packed), native, strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_what_mlx_quantizes_comes_back(group_size: int, dtype: str) -> None:
    problem = Problem(
        m=1, n=45, k=3 * group_size, group_size=group_size, scale_dtype=dtype
    )
    _, native = strategies.arrays(problem, seed=1)
    assert (native[1] < 0).any()

    for actual, expected in zip(
        unpack(pack(*native, group_size=group_size)), native, strict=True
    ):
        assert_same_bits(actual, expected)


@given(problem=strategies.problems(max_m=1, max_n=40, max_k=256), seed=SEEDS)
@settings(max_examples=10)
def test_every_code_is_stored_where_the_layout_says(
    problem: Problem, seed: int
) -> None:
    native = any_bits(problem, seed)
    codes = oracles.codes(native[0])

    packed = pack(*native, group_size=problem.group_size)

    stored = nibbles(packed.words).reshape(-1, 8)
    order = layout.order_of_group(problem.group_size)
    k_tiles = packed.words.shape[1]
    for (row, k), code in np.ndenumerate(codes):
        place = layout.word_of_weight(row, k, order=order, k_tiles=k_tiles)
        assert stored[place] == code


@given(problem=WEIGHTS, seed=SEEDS)
@FEW
def test_lanes_see_every_code_and_zeros_beside_them(
    problem: Problem, seed: int
) -> None:
    native = any_bits(problem, seed)

    packed = pack(*native, group_size=problem.group_size)

    seen = seen_by_lanes(packed)
    expected = np.zeros(layout.padded(problem.n, problem.k), np.uint32)
    expected[: problem.n, : problem.k] = oracles.codes(native[0])
    np.testing.assert_array_equal(seen, expected)


@given(problem=WEIGHTS, seed=SEEDS)
@FEW
def test_lanes_see_every_scale_and_bias_and_zeros_beside_them(
    problem: Problem, seed: int
) -> None:
    _, scales, biases = native = any_bits(problem, seed)

    packed = pack(*native, group_size=problem.group_size)

    seen = quantizers_seen_by_lanes(packed)
    padded_n, padded_k = layout.padded(problem.n, problem.k)
    assert seen.shape == (padded_n, -(-padded_k // problem.group_size), 2)
    inside = seen[: problem.n, : problem.groups]
    assert_same_bits(inside[..., 0], scales)
    assert_same_bits(inside[..., 1], biases)
    assert not seen[problem.n :].any()
    assert not seen[:, problem.groups :].any()


def test_padding_is_minimal() -> None:
    problem = Problem(m=1, n=33, k=96, group_size=32)

    packed = pack(*any_bits(problem, 0), group_size=32)

    assert packed.words.shape == (2, 2, 256)
    assert packed.scales.shape == (2, 4, 64)
    assert packed.nbytes == 2 * 2 * 256 * 4 + 2 * 4 * 64 * 2
    whole = pack(*any_bits(replace(problem, n=64, k=128), 0), group_size=32)
    assert packed.nbytes == whole.nbytes == 64 * 128 // 2 + 64 * 4 * 2 * 2


@pytest.mark.parametrize(
    "view",
    [
        lambda array: mx.concatenate([array, array], axis=1)[:, : array.shape[1]],
        lambda array: mx.repeat(array, 2, axis=0)[::2],
        lambda array: mx.contiguous(array.T).T,
    ],
    ids=["columns", "rows", "transposed"],
)
def test_strided_arrays_are_packed_as_their_copies(
    view: Callable[[mx.array], mx.array],
) -> None:
    native = any_bits(Problem(m=1, n=40, k=192), 2)

    packed = pack(*(view(each) for each in native))

    expected = pack(*native)
    assert_same_bits(packed.words, expected.words)
    assert_same_bits(packed.scales, expected.scales)


def test_scales_and_biases_of_two_dtypes_meet_in_the_one_that_holds_both() -> None:
    w, scales, biases = any_bits(Problem(m=1, n=3, k=64), 3)

    packed = pack(w, scales, biases.astype(mx.bfloat16))

    assert packed.dtype == mx.float32
    _, wide_scales, wide_biases = unpack(packed)
    assert_same_bits(wide_scales, scales.astype(mx.float32))
    assert_same_bits(wide_biases, biases.astype(mx.bfloat16).astype(mx.float32))


W, SCALES, BIASES = any_bits(Problem(m=1, n=8, k=128), 0)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((W.astype(mx.int32), SCALES, BIASES), {}, ["w ", "uint32", "int32"]),
        ((W[0], SCALES, BIASES), {}, ["w ", "[n, k / 8]", "(16,)"]),
        ((W[None], SCALES, BIASES), {}, ["w ", "[n, k / 8]", "(1, 8, 16)"]),
        ((W[:0], SCALES, BIASES), {}, ["w ", "non-empty", "(0, 16)"]),
        ((W[:, :12], SCALES, BIASES), {}, ["k=96", "group_size=64"]),
        ((W, SCALES[:4], BIASES), {}, ["scales ", "(8, 2)", "(4, 2)"]),
        ((W, SCALES, BIASES[:, :1]), {}, ["biases ", "(8, 2)", "(8, 1)"]),
        ((W, SCALES, BIASES), {"group_size": 32}, ["scales ", "(8, 4)", "(8, 2)"]),
        ((W, SCALES.astype(mx.int32), BIASES), {}, ["scales ", "float16", "int32"]),
        ((W, SCALES, BIASES), {"group_size": 16}, ["group_size=16", "(32, 64, 128)"]),
        ((W, SCALES, BIASES), {"group_size": 0}, ["group_size=0", "(32, 64, 128)"]),
        ((W, SCALES, BIASES), {"bits": 8}, ["bits=8", "4-bit"]),
    ],
)
def test_pack_says_which_argument_is_wrong_and_what_it_expected(
    arguments: strategies.Native, options: dict[str, int], words: list[str]
) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        pack(*arguments, **options)

    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("w", "options", "words"),
    [
        (mx.zeros((2, 64), mx.int32), {}, ["w ", "float16", "int32"]),
        (mx.zeros((64,)), {}, ["w ", "[n, k]", "(64,)"]),
        (mx.zeros((1, 2, 64)), {}, ["w ", "[n, k]", "(1, 2, 64)"]),
        (mx.zeros((0, 64)), {}, ["w ", "at least one row", "(0, 64)"]),
        (mx.zeros((2, 0)), {}, ["w ", "(2, 0)"]),
        (mx.zeros((2, 100)), {}, ["w ", "(2, 100)", "group_size=64"]),
        (mx.zeros((2, 64)), {"group_size": 16}, ["group_size=16", "(32, 64, 128)"]),
        (mx.zeros((2, 64)), {"bits": 8}, ["bits=8", "4-bit"]),
    ],
)
@pytest.mark.parametrize("symmetric", [False, True])
def test_quantize_says_which_argument_is_wrong_and_what_it_expected(
    w: mx.array, options: dict[str, int], words: list[str], symmetric: bool
) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        quantize(w, symmetric=symmetric, **options)

    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 41}, ["words must be", "(2, 2, 256)", "(1, 2, 256)"]),
        ({"k": 64}, ["words must be", "(1, 1, 256)", "64→32"]),
        ({"group_size": 32}, ["scales must be", "(1, 4, 64)", "(1, 2, 64)"]),
        ({"group_size": 48}, ["group_size=48", "(32, 64, 128)"]),
        ({"bits": 2}, ["bits=2", "4-bit"]),
        ({"scales": mx.zeros((1, 2, 64), mx.int32)}, ["scales must be", "int32"]),
        ({"words": mx.zeros((1, 2, 256), mx.int32)}, ["words must be", "int32"]),
    ],
)
def test_a_packed_weight_refuses_parts_that_do_not_belong_together(
    change: dict[str, int | mx.array], words: list[str]
) -> None:
    packed = pack(*any_bits(Problem(m=1, n=32, k=128), 0))

    with pytest.raises(ValueError) as error:  # noqa: PT011
        replace(packed, **change)

    for word in words:
        assert word in str(error.value)


def weights(seed: int, dtype: mx.Dtype) -> mx.array:
    """Makes [24, 256] with constant, one-signed, zero and tiny groups among them."""
    w = np.random.default_rng(seed).normal(size=(24, 256)).astype(np.float32)
    w[0] = 0
    w[1] = 0.37
    w[2] = -5
    w[3] = np.abs(w[3])
    w[4] = -np.abs(w[4])
    w[5, :64] *= 1e-3
    return mx.array(w).astype(dtype)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_asymmetric_scales_and_codes_are_those_of_mlx(
    group_size: int, dtype: mx.Dtype
) -> None:
    w = weights(0, dtype)

    packed = quantize(w, group_size=group_size)

    for actual, expected in zip(
        unpack(packed), mx.quantize(w, group_size=group_size, bits=4), strict=True
    ):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_symmetric_codes_stand_for_whole_steps_around_an_exact_zero(
    group_size: int, dtype: mx.Dtype
) -> None:
    w = weights(1, dtype)

    packed = quantize(w, group_size=group_size, symmetric=True)

    assert packed.dtype == dtype
    words, scales, biases = unpack(packed)
    np.testing.assert_array_equal(oracles.exact(biases), -8 * oracles.exact(scales))
    decoded = oracles.decoded(words, scales, biases, group_size=group_size)
    np.testing.assert_array_equal(decoded[0], 0)
    np.testing.assert_array_equal(oracles.codes(words)[0], 8)
    np.testing.assert_array_equal(decoded[1:3], oracles.exact(w[1:3]))
    step = np.abs(np.repeat(oracles.exact(scales), group_size, axis=1))
    distance = np.abs(decoded - oracles.exact(w))
    # The largest of a group is exact and the far end may be one step short.
    assert (distance <= step * (1 + 1e-6)).all()
    within = np.abs(oracles.exact(w)) <= 7 * step
    assert (distance <= 0.5 * step * (1 + 1e-6))[within].all()


def test_symmetric_zeros_inside_a_group_stay_zero() -> None:
    w = mx.array(np.random.default_rng(5).normal(size=(4, 64)).astype(np.float32))
    w[:, ::3] = 0

    words, scales, biases = unpack(quantize(w, symmetric=True))

    decoded = oracles.decoded(words, scales, biases, group_size=64)
    np.testing.assert_array_equal(decoded[:, ::3], 0)
    assert (decoded[:, 1::3] != 0).mean() > 0.8
