"""A problem is a checked value that knows its sizes."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import mlx_marlin
from mlx_marlin.planning import measurement
from mlx_marlin.planning.epilogue import PLAIN, Epilogue, Heads
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.problem import (
    Problem,
    in_stock_mlx,
    largest_array,
    problem_of,
)
from mlx_marlin.weights.formats import MODE_DEFAULTS, format_of
from support.strategies import ANY_FORMAT, problems

GATED = Epilogue(activation="silu", gated=True)
PARTS = Epilogue(bias=True, parts=(32, 96))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"m": 0}, ["m=0", "at least 1"]),
        ({"n": -1}, ["n=-1", "at least 1"]),
        ({"k": 0}, ["k=0", "at least 1"]),
        ({"batch": 0}, ["batch=0", "at least 1"]),
        ({"k": 96}, ["k=96", "group_size=64"]),
        ({"group_size": 48}, ["group_size=48", "32, 64, 128"]),
        ({"bits": 7}, ["bits=7", "affine 4-bit", "nvfp4 4-bit"]),
        ({"group_size": 16}, ["group_size=16", "(32, 64, 128)"]),
        ({"group_size": 16, "layout": "marlin", "k": 96}, ["k=96", "of 64", "affine"]),
        ({"group_size": 192, "layout": "marlin", "k": 384}, ["group_size=192", "or k"]),
        ({"global_scale": True}, ["global_scale=True", "nvfp4", "affine"]),
        ({"mode": "nvfp8"}, ["mode='nvfp8'", "affine 4-bit", "nvfp4 4-bit"]),
        ({"mode": "mxfp8"}, ["mode='mxfp8'", "bits=4", "mxfp8 8-bit"]),
        ({"mode": "nvfp4"}, ["group_size=64", "(16,)"]),
        (
            {"mode": "nvfp4", "group_size": 16, "k": 96, "scale_dtype": "uint8"},
            ["k=96", "multiple of 64", "nvfp4"],
        ),
        (
            {"mode": "mxfp4", "group_size": 32},
            ["scale_dtype='float16'", "['uint8']"],
        ),
        ({"scale_dtype": "uint8"}, ["scale_dtype='uint8'", "float16"]),
        ({"mode": "symmetric"}, ["layout='mlx'", "marlin", "symmetric"]),
        ({"mode": "zero_point"}, ["layout='mlx'", "marlin", "zero_point"]),
        ({"dtype": "int8"}, ["dtype='int8'", "float16"]),
        ({"scale_dtype": "half"}, ["scale_dtype='half'", "float16"]),
        ({"layout": "gguf"}, ["layout='gguf'", "marlin"]),
        ({"norm": -1e-5}, ["norm=-1e-05", "at least 0"]),
        ({"norm": 0.0, "batch": 2}, ["norm=0.0", "of one product", "batch=2"]),
        ({"n": 65, "epilogue": GATED}, ["gated=True", "an even n", "n=65"]),
        ({"batch": 2, "epilogue": GATED}, ["gated=True", "batch=2"]),
        ({"epilogue": PARTS}, ["parts=(32, 96)", "n=64"]),
        ({"n": 128, "batch": 2, "epilogue": PARTS}, ["parts=(32, 96)", "batch=2"]),
    ],
)
def test_nonsense_is_refused_with_the_value_and_the_expectation(
    fields: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked
        Problem(**{"m": 8, "n": 64, "k": 64, **fields})  # type: ignore[arg-type]

    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "elements"),
    [
        ((7, 64, 512, 4), 64 * 64),  # the codes: 8 of 4 bits in a word
        ((7, 64, 512, 3), 64 * 96),  # of 3 bits, counted in halves of a word
        ((99, 64, 512, 4), 99 * 512),  # x
        ((99, 1024, 64, 4), 99 * 1024),  # the result
        ((7, 65, 500, 4, 3), 3 * 96 * 64),  # tiles of 32 rows and 64 columns
    ],
)
def test_the_largest_array_is_x_the_codes_or_the_result(
    sizes: tuple[int, ...], elements: int
) -> None:
    counted = largest_array(*sizes)

    assert (type(counted), counted) == (int, elements)


@pytest.mark.parametrize(
    "limit",
    [
        {"m": 2**24, "n": 64, "k": 128},
        {"m": 2**24, "n": 128, "k": 64},
        {"m": 1, "n": 2**27, "k": 128, "group_size": 32},
        {"m": 1, "n": 2**25, "k": 256, "bits": 8},
        {"m": 1, "n": 2**25, "k": 256, "bits": 4, "layout": "marlin", "batch": 2},
    ],
)
def test_arrays_of_two_to_the_31_elements_are_refused(limit: dict[str, Any]) -> None:
    field = "m" if limit["m"] > 1 else "n"

    fewer = limit[field] - 32  # a tile, to which packed weights of a batch are padded

    assert Problem(**{**limit, field: fewer}) is not None
    with pytest.raises(ValueError, match="fewer than 2147483648"):
        Problem(**limit)


def test_sizes_are_those_of_a_known_layer() -> None:
    problem = Problem(m=8, n=17408, k=5120, group_size=128)

    # The published weight of this layer: 4.25 bits each.
    assert problem.weight_bytes == 17408 * 5120 * 17 // 32 == 47_349_760
    assert problem.flops == 2 * 8 * 17408 * 5120
    assert problem.activation_bytes == 8 * 5120 * 2
    assert problem.output_bytes == 8 * 17408 * 2


def test_sizes_count_every_product_of_a_batch_and_the_half_that_is_stored() -> None:
    several = Problem(m=5, n=96, k=128, batch=3, bits=8, dtype="float32")
    gated = Problem(m=5, n=96, k=128, epilogue=GATED)

    assert several.flops == 2 * 3 * 5 * 96 * 128
    assert (several.code_bytes, several.scale_bytes) == (3 * 96 * 128, 3 * 96 * 2 * 4)
    assert several.activation_bytes == 3 * 5 * 128 * 4
    assert several.output_bytes == 3 * 5 * 96 * 4
    assert (several.columns, several.result_shape) == (96, (3, 5, 96))
    assert (gated.columns, gated.result_shape) == (48, (5, 48))
    assert gated.output_bytes == 5 * 48 * 2
    assert gated.bytes == 96 * 64 + 96 * 2 * 4 + 2 * 5 * (128 + 48)


def test_a_problem_tells_its_shape_format_and_what_is_asked_of_it() -> None:
    plain = Problem(m=1, n=96, k=128, bits=8, group_size=32, layout="marlin")
    several = replace(plain, m=12, batch=3, dtype="bfloat16", invariant=True)
    scaled = Problem(
        m=2,
        n=128,
        k=256,
        mode="nvfp4",
        group_size=16,
        scale_dtype="uint8",
        global_scale=True,
        norm=1e-6,
        epilogue=PARTS,
    )

    form = "affine 8-bit, group 32"
    assert plain.explain() == (
        f"1 row of 128→96, {form}, float16 with float16 scales, marlin layout"
    )
    assert several.explain() == (
        f"12 rows of 128→96, each of 3 weights, {form}, bfloat16 with float16 scales, "
        f"marlin layout, the same bits for any m"
    )
    assert scaled.explain() == (
        "2 rows of 256→128, nvfp4 4-bit, group 16, float16 with uint8 scales, a global "
        "scale, mlx layout, normalized rows (eps 1e-06), y + bias in parts of 32, 96"
    )


@given(problems(formats=ANY_FORMAT))
def test_groups_and_words_divide_k_exactly(problem: Problem) -> None:
    assert problem.groups * problem.group_size == problem.k
    bits_of_a_row = problem.k * problem.bits
    assert bits_of_a_row % 32 == 0
    assert problem.code_bytes == 4 * problem.n * (bits_of_a_row // 32)
    assert "\n" not in problem.explain()


BITS = {
    ("affine", 2, 64): 2.5,
    ("affine", 3, 32): 4.0,
    ("affine", 6, 128): 6.25,
    ("symmetric", 4, 128): 4.125,
    ("zero_point", 8, 64): 8.5,
    ("mxfp4", 4, 32): 4.25,
    ("mxfp8", 8, 32): 8.25,
    ("nvfp4", 4, 16): 4.5,
    ("codebook", 4, 64): 4.25,
    ("k_codebook", 4, 32): 4.3125,
    ("k_quant", 2, 16): 2.625,
    ("k_quant", 3, 16): 3.5625,
    ("k_quant", 4, 32): 4.625,
    ("k_quant", 5, 32): 5.625,
    ("k_quant", 6, 16): 6.5625,
}
"""Bits of a weight with its scales, half ones where they are not bytes."""


@pytest.mark.parametrize(("mode", "bits", "group_size"), BITS)
def test_a_weight_has_the_bits_of_its_format(
    mode: str, bits: int, group_size: int
) -> None:
    known = format_of(mode, bits)
    problem = Problem(
        m=1,
        n=96,
        k=1024,
        group_size=group_size,
        bits=bits,
        mode=mode,
        scale_dtype=known.scale_dtype("float16"),
        layout="marlin",
    )

    assert problem.weight_bytes == 96 * 1024 * BITS[mode, bits, group_size] / 8
    assert f"{mode} {bits}-bit, group {group_size}" in problem.explain()


@pytest.mark.parametrize(
    ("epilogue", "formula"),
    [
        (PLAIN, ""),
        (Epilogue(bias=True), "y + bias"),
        (Epilogue(activation="silu"), "silu(y)"),
        (Epilogue(bias=True, activation="gelu"), "gelu(y + bias)"),
        (Epilogue(multiply=True), "y * multiply"),
        (Epilogue(bias=True, multiply=True), "(y + bias) * multiply"),
        (Epilogue(residual=True), "y + residual"),
        (
            Epilogue(bias=True, activation="gelu_approx", multiply=True, residual=True),
            "gelu_approx(y + bias) * multiply + residual",
        ),
        (Epilogue(activation="silu", multiply=True), "silu(y) * multiply"),
    ],
)
def test_an_epilogue_is_a_formula(epilogue: Epilogue, formula: str) -> None:
    plain = Problem(m=8, n=64, k=64)
    problem = Problem(m=8, n=64, k=64, epilogue=epilogue)

    assert epilogue.explain() == formula
    expected = f"{plain.explain()}, {formula}" if formula else plain.explain()
    assert problem.explain() == expected
    arrays = epilogue.multiply + epilogue.residual
    assert problem.bytes == plain.bytes + arrays * 8 * 64 * 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"activation": "relu"}, r"activation='relu' is not one of .*'silu'"),
        ({"gated": True, "bias": True}, "an activation only, got bias=True"),
        ({"gated": True, "multiply": True}, "activation only, .* multiply=True"),
        ({"gated": True, "residual": True}, "activation only, .* residual=True"),
        ({"gated": True, "parts": (32, 32)}, r"activation only, .*parts=\(32, 32\)"),
        ({"parts": (32,)}, r"parts=\(32,\) are not 2 to 6 numbers"),
        ({"parts": (32,) * 7}, r"32\) are not 2 to 6 numbers"),
        ({"parts": (32, 0)}, r"parts=\(32, 0\) are not 2 to 6 numbers"),
        ({"parts": (1, 2), "multiply": True}, "no multiplier .* multiply=True"),
        ({"parts": (1, 2), "residual": True}, "no residual, .* residual=True"),
    ],
)
def test_what_is_no_epilogue_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Epilogue(**fields)


def test_results_have_as_many_parts_as_a_constant_of_a_kernel_holds() -> None:
    assert Epilogue(parts=(1,) * 6).parts == (1,) * 6
    assert Epilogue(gated=True).explain() == "gate * up"
    assert (GATED.explain(), GATED.is_paired) == ("silu(gate) * up", True)
    assert not PARTS.is_paired


def test_an_invariant_problem_says_so() -> None:
    assert (
        "the same bits for any m" in Problem(m=8, n=64, k=64, invariant=True).explain()
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"m": "8"}, "m='8', expected an integer"),
        ({"m": True}, "m=True, expected an integer"),
        ({"n": 64.0}, "n=64.0, expected an integer"),
        ({"k": None}, "k=None, expected an integer"),
        ({"batch": False}, "batch=False, expected an integer"),
        ({"bits": "4"}, "bits='4', expected an integer"),
        ({"group_size": True}, "group_size=True, expected an integer"),
        ({"mode": []}, "mode=[], expected a name"),
        ({"dtype": {}}, "dtype={}, expected a name"),
        ({"layout": 1}, "layout=1, expected a name"),
        ({"chip": 3}, "chip=3, expected a name such as 'Apple M3 Max'"),
    ],
)
def test_an_argument_of_plan_of_another_type_is_named(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        mlx_marlin.plan(**{"m": 8, "n": 64, "k": 64} | arguments)


def test_numpys_integers_are_sizes() -> None:
    made = mlx_marlin.plan(np.int64(8), np.uint16(64), 64).plan.problem

    assert (type(made.m), made.m, made.n) == (int, 8, 64)


@given(problems(formats=ANY_FORMAT))
def test_stock_mlx_has_the_same_product_in_its_own_layout(problem: Problem) -> None:
    native = in_stock_mlx(problem)

    if native is None:
        sizes = format_of("affine", problem.bits).group_sizes
        assert problem.group_size not in sizes or "codebook" in problem.mode
        return
    assert native.mode in MODE_DEFAULTS
    assert (native.mode == problem.mode) == (problem.mode in MODE_DEFAULTS)
    same = ("m", "n", "k", "batch", "group_size", "bits", "dtype", "epilogue")
    assert all(getattr(native, name) == getattr(problem, name) for name in same)
    assert native.layout == "mlx"


@pytest.mark.parametrize(("bits", "group_size"), [(2, 16), (4, 32), (5, 32), (6, 16)])
def test_super_blocks_are_compared_with_groups(bits: int, group_size: int) -> None:
    problem = problem_of(4, 64, 512, mode="k_quant", bits=bits, layout="marlin")

    native = in_stock_mlx(problem)

    assert problem.group_size == group_size
    if group_size == 16:
        assert native is None
        return
    assert native is not None
    assert (native.mode, native.scale_dtype) == ("affine", problem.dtype)


@pytest.mark.parametrize(("pairs", "chosen"), [(1, 1.0), (2, 1.75), (3, 2.3125)])
def test_chosen_experts_are_those_that_equal_chances_choose(
    pairs: int, chosen: float
) -> None:
    gather = GatherProblem(problem=Problem(m=pairs, n=64, k=64), experts=4)

    assert gather.chosen_experts == pytest.approx(chosen)


@pytest.mark.parametrize("m", [1, 63])
def test_a_problem_and_its_rows_are_put_together_again(m: int) -> None:
    plain = Problem(m=m, n=64, k=64, epilogue=Epilogue(bias=True), norm=1e-5)
    product = replace(plain, epilogue=PLAIN, norm=None)
    experts = GatherProblem(
        problem=product, experts=4, pairs_per_row=1, is_sorted=True, bias=True
    )

    assert measurement.plain(plain) == product
    assert measurement.family(product) == (replace(product, m=1), m)
    assert measurement.with_rows(product, 5) == replace(product, m=5)
    assert measurement.plain(experts) == replace(experts, bias=False)
    one, pairs = measurement.family(replace(experts, gate="silu"))
    assert pairs == m
    assert one == GatherProblem(
        problem=replace(product, m=1), experts=4, bias=True, gate="silu"
    )
    assert measurement.product_of(experts) == product


@pytest.mark.parametrize(
    ("fields", "bytes"),
    [
        ({"dtype": "float32"}, 4),
        ({"dtype": "float16"}, 2),
        ({"dtype": "bfloat16"}, 4),
        ({"group_size": 16, "layout": "marlin"}, 4),  # of scaled weights
    ],
)
def test_fragments_hold_four_bytes_where_products_are_floats(
    fields: dict[str, Any], bytes: int
) -> None:
    assert Problem(m=8, n=64, k=64, **fields).fragment_bytes == bytes


def test_heads_say_which_columns_are_normalized_and_rotated() -> None:
    heads = Heads(heads=6, kv_heads=2, features=64, columns=640, factor=2.5)

    plain, normed = heads.rotation, replace(heads, norm=1e-6).rotation

    assert (plain.features, plain.columns, plain.queries) == (64, 8 * 64, 0)
    assert (plain.per_row, plain.norm, plain.factor) == (True, None, 2.5)
    assert normed == replace(plain, queries=6 * 64, norm=1e-6)
