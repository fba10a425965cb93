"""Packing and quantizing raise ValueError that names an invalid argument."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_marlin.products.packing import pack, quantize
from support.packed_codes import any_bits, packed_of

W, SCALES, BIASES = any_bits(n=8, k=128).native
OCTETS = mx.zeros((8, 4), mx.uint8)


def assert_says(
    words: list[str], call: Callable[..., object], /, *arguments: Any, **options: Any
) -> None:
    """Checks that a call raises a ValueError with all of some words."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call(*arguments, **options)

    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((W.astype(mx.int32), SCALES, BIASES), {}, ["w ", "uint32", "int32"]),
        ((W[0], SCALES, BIASES), {}, ["w ", "[n, k * 4 / 32]", "(16,)"]),
        ((W[None], SCALES, BIASES), {}, ["scales ", "(1, 8, 2)", "(8, 2)"]),
        ((W[:0], SCALES, BIASES), {}, ["w ", "non-empty", "(0, 16)"]),
        ((W[:, :12], SCALES, BIASES), {}, ["k=96", "group_size=64"]),
        ((W, SCALES[:4], BIASES), {}, ["scales ", "(8, 2)", "(4, 2)"]),
        ((W, SCALES, BIASES[:, :1]), {}, ["biases ", "(8, 2)", "(8, 1)"]),
        ((W, SCALES, BIASES), {"group_size": 32}, ["scales ", "(8, 4)", "(8, 2)"]),
        ((W, SCALES, BIASES), {"bits": 8}, ["scales ", "(8, 1)", "(8, 2)"]),
        ((W, SCALES.astype(mx.int32), BIASES), {}, ["scales ", "float16", "int32"]),
        (
            (W, SCALES, BIASES),
            {"group_size": 48},
            ["group_size=48", "16, 32, 64, 128, 256) or k"],
        ),
        ((W, SCALES, BIASES), {"group_size": 0}, ["group_size=0", "(16, 32, 64, 128"]),
        ((W, SCALES, BIASES), {"group_size": 16}, ["scales ", "(8, 8)", "(8, 2)"]),
        ((W, SCALES, BIASES), {"group_size": 256}, ["k=128", "group_size=256"]),
        ((W[:, :10], SCALES, BIASES), {"group_size": 16}, ["k=80", "of 64", "affine"]),
        (
            (W[:, :12], SCALES, BIASES),
            {"group_size": "channel"},
            ["k=96", "of 64", "group_size=96"],
        ),
        ((W, SCALES, BIASES), {"global_scale": mx.array(1.0)}, ["global", "'affine'"]),
        (
            (W, mx.zeros((8, 8), mx.uint8)),
            {"mode": "nvfp4", "global_scale": mx.ones(2)},
            ["global_scale", "one element", "(2,)"],
        ),
        (
            (W, mx.zeros((8, 8), mx.uint8)),
            {"mode": "nvfp4", "global_scale": mx.array(1.0, mx.float16)},
            ["global_scale", "float32", "float16"],
        ),
        ((W, SCALES, BIASES), {"bits": 7}, ["bits=7", "'affine'", "affine 8-bit"]),
        ((W, SCALES, BIASES), {"bits": 0}, ["bits=0", "'affine'"]),
        ((W, SCALES, BIASES), {"mode": "nf4"}, ["mode='nf4'", "bits=4", "nvfp4 4-bit"]),
        ((W, SCALES), {}, ["biases", "None"]),
        ((W, SCALES), {"mode": "zero_point"}, ["biases", "zero points", "None"]),
        ((W, SCALES, BIASES), {"mode": "symmetric"}, ["'symmetric'", "no biases"]),
        ((W, OCTETS, OCTETS), {"mode": "mxfp4"}, ["'mxfp4'", "no biases"]),
        ((W, SCALES), {"mode": "mxfp4"}, ["scales ", "uint8", "float16"]),
        ((W, OCTETS), {"mode": "nvfp4"}, ["scales ", "(8, 8)", "(8, 4)"]),
        ((W, OCTETS), {"mode": "mxfp8"}, ["scales ", "(8, 2)"]),
        ((W[:, :10], OCTETS), {"mode": "nvfp4"}, ["k=80", "of 64", "nvfp4"]),
        ((W, OCTETS, OCTETS), {}, ["scales ", "float16", "uint8"]),
    ],
)
def test_pack_says_which_argument_is_wrong_and_what_it_expected(
    arguments: tuple[mx.array, ...], options: dict[str, Any], words: list[str]
) -> None:
    assert_says(words, pack, *arguments, **options)


@pytest.mark.parametrize(
    ("w", "options", "words"),
    [
        (mx.zeros((2, 64), mx.int32), {}, ["w ", "float16", "int32"]),
        (mx.zeros((64,)), {}, ["w ", "[n, k]", "(64,)"]),
        (mx.zeros((3, 0, 64)), {}, ["w ", "at least one row", "(3, 0, 64)"]),
        (mx.zeros((0, 64)), {}, ["w ", "at least one row", "(0, 64)"]),
        (mx.zeros((2, 0)), {}, ["w ", "(2, 0)"]),
        (mx.zeros((2, 100)), {}, ["w ", "k=100", "group_size=64"]),
        (mx.zeros((2, 64)), {"group_size": 48}, ["group_size=48", "16, 32, 64, 128"]),
        (mx.zeros((2, 64)), {"group_size": 0}, ["group_size=0", "16, 32, 64, 128"]),
        (mx.zeros((2, 96)), {"group_size": "channel"}, ["w ", "k=96", "of 64"]),
        (mx.zeros((2, 64)), {"bits": 7}, ["bits=7", "4-bit"]),
        (mx.zeros((2, 64)), {"bits": 0}, ["bits=0", "4-bit"]),
    ],
)
def test_quantize_says_which_argument_is_wrong_and_what_it_expected(
    w: mx.array, options: dict[str, Any], words: list[str]
) -> None:
    for mode in ("affine", "symmetric"):
        assert_says(words, quantize, w, mode=mode, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "nf4"}, ["mode='nf4'", "nvfp4 4-bit"]),
        ({"mode": "mxfp4", "bits": 8}, ["'mxfp4'", "bits=8"]),
        ({"mode": "mxfp4", "group_size": 64}, ["group_size=64", "(32,)"]),
        ({"mode": "zero_point"}, ["zero_point", "quantized already"]),
        ({"mode": "symmetric", "bits": 1}, ["'symmetric'", "bits=1"]),
        ({"mode": "nvfp4"}, ["k=80", "64"]),
        ({"mode": "mxfp8", "symmetric": True}, ["symmetric=True", "mxfp8"]),
        ({"mode": "k_quant"}, ["'k_quant' is for weights that are quantized"]),
        ({"mode": "codebook"}, ["'codebook' is for weights that are quantized"]),
        ({"mode": "k_codebook"}, ["'k_codebook' is for weights that are quantized"]),
        (
            {"mode": "mxfp4", "global_scale": mx.array(1.0)},
            ["global_scale is for nvfp4, not for mode='mxfp4'"],
        ),
        (
            {"mode": "nvfp4", "global_scale": mx.ones(3)},
            ["global_scale must be float32 of one element"],
        ),
    ],
)
def test_quantize_refuses_what_a_scheme_does_not_have(
    options: dict[str, Any], words: list[str]
) -> None:
    k = 80 if options == {"mode": "nvfp4"} else 256
    assert_says(words, quantize, mx.zeros((2, k)), **options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 41}, ["words must be", "(2, 2, 256)", "(1, 2, 256)"]),
        ({"k": 64}, ["words must be", "(1, 1, 256)", "64→32"]),
        ({"k": 100}, ["k=100", "group_size=64"]),
        ({"group_size": 32}, ["scales must be", "(1, 4, 64)", "(1, 2, 64)"]),
        ({"group_size": 48}, ["group_size=48", "(16, 32, 64, 128, 256)"]),
        ({"bits": 2}, ["words must be", "(1, 2, 128)", "(1, 2, 256)"]),
        ({"bits": 7}, ["bits=7", "4-bit"]),
        ({"mode": "symmetric"}, ["scales must be", "(1, 2, 32)", "(1, 2, 64)"]),
        ({"scales": mx.zeros((1, 2, 64), mx.int32)}, ["scales must be", "int32"]),
        ({"scales": mx.zeros((1, 2, 64), mx.uint8)}, ["scales must be", "uint8"]),
        ({"words": mx.zeros((1, 2, 256), mx.int32)}, ["words must be", "int32"]),
        ({"words": mx.zeros((2, 256), mx.uint32)}, ["words must be", "(2, 256)"]),
        (
            {"words": mx.zeros((3, 1, 2, 256), mx.uint32)},
            ["scales must be", "(3, 1, 2, 64)", "(1, 2, 64)"],
        ),
    ],
)
def test_a_packed_weight_refuses_parts_that_do_not_belong_together(
    change: dict[str, Any], words: list[str]
) -> None:
    assert_says(words, replace, packed_of(any_bits(n=32, k=128)), **change)
