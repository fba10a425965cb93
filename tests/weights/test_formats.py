"""Every format, width, group and layout against float64, through the kernels."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import metal_emulator
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.weights.formats import CHANNEL, FORMATS
from support import drawn_arrays, format_cases, launches, oracles, strategies
from support.format_cases import Variant, Weight
from support.format_oracle import assert_close
from support.profiles import sampled
from support.trace_mode import emulator_only
from support.trace_mode import needs_kernels as kernels

VARIANTS = format_cases.VARIANTS
variants = pytest.mark.parametrize("variant", VARIANTS, ids=str)
TABLE = Path(__file__).parents[2] / "docs" / "formats.md"


@st.composite
def shapes(draw: st.DrawFn, variant: Variant, most_k: int = 512) -> dict[str, int]:
    """Draws a ragged product, and how many threadgroups split it if it is split."""
    most = most_k // variant.step
    return {
        "m": draw(strategies.sizes(40)) if variant.fragments else variant.rows,
        "n": draw(strategies.sizes(70)),
        "k": variant.step * draw(strategies.sizes(most)),
        "threadgroups": draw(st.integers(1, 20)),
    }


def check_product(variant: Variant, shape: dict[str, int], seed: int) -> mx.array:
    """Compares a product with float64 and returns it."""
    plan = variant.plan(**shape)
    weight = variant.weight(shape["n"], shape["k"], seed=seed)
    x = format_cases.activations(
        shape["m"], shape["k"], dtype=variant.dtype, seed=seed + 1
    )

    y = format_cases.run(plan, x, weight)

    assert_close(y, x, weight, operand=variant.operand, dtype=variant.dtype)
    return y


SAMPLE = sampled(6, 42)
"""The same variants in each test, so that their kernels are compiled once."""


@SAMPLE
@kernels
@variants
@given(data=st.data())
@settings(max_examples=6)
def test_a_product_is_as_exact_as_promised(
    variant: Variant, data: st.DataObject
) -> None:
    check_product(variant, data.draw(shapes(variant)), data.draw(st.integers(0, 99)))


@SAMPLE
@kernels
@variants
def test_a_large_product_is_exact_and_the_same_in_any_schedule(
    variant: Variant,
) -> None:
    m = 19 if variant.fragments else variant.rows
    shape = {"m": m, "n": 150, "k": max(384, 2 * variant.step), "threadgroups": 7}

    y = check_product(variant, shape, 5)

    for seed in (1, 2):
        with drawn_arrays.another_schedule(seed):
            again = check_product(variant, shape, 5)
        assert mx.array_equal(again.view(mx.uint8), y.view(mx.uint8))


@SAMPLE
@kernels
@variants
def test_unit_activations_read_back_every_weight_bit_for_bit(variant: Variant) -> None:
    assert_read_back(variant)


def exact_in_float32(weight: Weight) -> Weight:
    """Gives scales and biases the precision of half: one rounding is left."""
    words, *stored = weight.native
    if stored[0].dtype != mx.uint8:
        stored = [each.astype(mx.float16).astype(each.dtype) for each in stored]
    return replace(weight, native=(words, *stored))


@sampled(1, 3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("bits", "group"), [(2, 16), (4, 32), (6, 16)])
def test_offsets_of_super_blocks_are_taken_off_before_their_bias_is_added(
    bits: int, group: int, dtype: str
) -> None:
    """Their scales and biases have so many bits that a sum of both would be rounded."""
    assert_read_back(
        Variant("k_quant", bits, group, "marlin", dtype, "uint16", 0, "offset", False)
    )


def assert_read_back(variant: Variant) -> None:
    n, k = 37, 2 * variant.step
    weight = exact_in_float32(variant.weight(n, k, seed=3))
    expected = format_cases.rounded(weight.decoded, variant.dtype)
    rows = k if variant.fragments else variant.rows
    for first in range(0, k, rows):
        unit = mx.array(np.eye(rows, k, first)).astype(getattr(mx, variant.dtype))
        plan = variant.plan(rows, n, k, threadgroups=3)
        y = oracles.exact(format_cases.run(plan, unit, weight)).T
        stop = min(first + rows, k)
        np.testing.assert_array_equal(y[:, : stop - first], expected[:, first:stop])
        np.testing.assert_array_equal(y[:, stop - first :], 0)


def whole_numbers(weight: Weight, seed: int) -> Weight:
    """Returns the same codes with scales and biases that keep every sum exact."""
    draw = np.random.default_rng(seed)
    words, scales, *biases = weight.native
    if weight.mode in format_cases.SUPER_BLOCKS:
        size = format_cases.words_of_record(weight.mode, weight.bits)
        records = np.array(scales).reshape(len(scales), -1, size)
        of_groups = 4 if weight.mode == "k_codebook" else 8
        whole = draw.integers(-3, 4, (*records.shape[:2], 2 * of_groups))
        whole = whole.astype(np.int8)
        is_signed = size - of_groups == 1
        octets = whole if is_signed else np.abs(whole)
        if weight.bits == 2:
            octets = octets | octets[..., ::-1] << 4
        records[..., :of_groups] = octets.view("<u2")
        d = draw.choice([-2, -1, 1, 2], records[..., of_groups:].shape).astype("<f2")
        records[..., of_groups:] = d.view("<u2")
        fitting = [mx.array(records.reshape(len(records), -1))]
    elif scales.dtype == mx.uint8:
        one, two = (0x38, 0x40) if weight.group_size == 16 else (127, 128)
        fitting = [mx.array(draw.choice([one, two], scales.shape).astype(np.uint8))]
    else:
        fitting = [mx.array(draw.choice([-2, -1, 1, 2], scales.shape))]
        for each in biases:  # zero points stay what they are
            whole = mx.array(draw.integers(-8, 9, each.shape))
            fitting.append(each if weight.mode == "zero_point" else whole)
        fitting = [each.astype(scales.dtype) for each in fitting]
    numbers = tuple(float(i * 5 % 16 - 8) for i in range(16))
    return replace(weight, native=(words, *fitting), numbers=numbers)


@SAMPLE
@kernels
@variants
@given(data=st.data())
@settings(max_examples=4)
def test_integers_come_out_exactly(variant: Variant, data: st.DataObject) -> None:
    shape = data.draw(shapes(variant))
    seed = data.draw(st.integers(0, 99))
    draw = np.random.default_rng(seed)
    ones = np.zeros((shape["m"], shape["k"]), np.float32)
    for row in ones:
        row[draw.choice(shape["k"], 4, replace=False)] = draw.integers(-1, 2, 4)
    x = mx.array(ones).astype(getattr(mx, variant.dtype))
    weight = whole_numbers(variant.weight(shape["n"], shape["k"], seed=seed), seed)

    y = format_cases.run(variant.plan(**shape), x, weight)

    expected = format_cases.rounded(ones @ weight.decoded.T, variant.dtype)
    np.testing.assert_array_equal(oracles.exact(y), expected)


def decode_facts(variant: Variant) -> set[object]:
    """The options that determine the order and the rounding of decoded weights."""
    return {
        (variant.group_size == 32, variant.layout, variant.bits == 4),
        (variant.format.codes, variant.group_size in (CHANNEL, 16)),
        (variant.dtype, variant.scale_dtype),
        variant.bits,
        variant.mode,
    }


DECODED = format_cases.covering(VARIANTS, decode_facts)


def check_decoding(variant: Variant) -> None:
    k = 3 * variant.step
    weight = exact_in_float32(variant.weight(45, k, seed=7))
    plan = dequantize_plan(variant.problem(1, 45, k))

    w = launches.dequantized(plan)(*format_cases.arguments(weight, variant.layout))

    expected = format_cases.rounded(weight.decoded, variant.dtype)
    np.testing.assert_array_equal(oracles.exact(w), expected)


@sampled(8)
@kernels
@pytest.mark.parametrize("variant", DECODED, ids=str)
def test_a_weight_as_plain_numbers_is_rounded_once(variant: Variant) -> None:
    check_decoding(variant)


@sampled(2, 9)
@kernels
@emulator_only
@pytest.mark.parametrize("variant", DECODED, ids=str)
def test_every_byte_that_is_read_is_the_calls_own(variant: Variant) -> None:
    m = 11 if variant.fragments else variant.rows
    n, k = 37, 3 * variant.step
    plan = variant.plan(m, n, k, threadgroups=3)
    x = format_cases.activations(m, k, dtype=variant.dtype, seed=1)
    weight = variant.weight(n, k, seed=2)

    with metal_emulator.emulated(trace=True):
        y = format_cases.run(plan, x, weight)

    assert mx.array_equal(y, format_cases.run(plan, x, weight))


def test_the_covering_set_is_small_and_leaves_out_no_format() -> None:
    assert len(VARIANTS) + len(DECODED) <= 105
    assert {(v.mode, v.bits, v.layout) for v in VARIANTS} == {
        (*each, layout) for each, format in FORMATS.items() for layout in format.layouts
    }


@kernels
@sampled(0, 0)
@pytest.mark.parametrize("grouped", format_cases.GROUPED, ids=str)
def test_every_instance_computes_and_decodes(grouped: tuple[str, int, int]) -> None:
    decoded = set()
    for variant in format_cases.every_variant():
        if (variant.mode, variant.bits, variant.group_size) != grouped:
            continue
        m = 19 if variant.fragments else variant.rows
        k = 3 * variant.step
        check_product(variant, {"m": m, "n": 70, "k": k, "threadgroups": 5}, 1)
        kind = variant.layout, variant.dtype, variant.scale_dtype
        if kind not in decoded:
            decoded.add(kind)
            check_decoding(variant)


D, D_AND_DMIN = "bytes, and d in float16", "bytes, and d and dmin in float16"
BYTES = {
    **{("mxfp4", 4): "E8M0 bytes", ("mxfp8", 8): "E8M0 bytes"},
    **{("nvfp4", 4): "E4M3 bytes", ("k_codebook", 4): D},
    **{("k_quant", bits): D if bits in (3, 6) else D_AND_DMIN for bits in range(2, 7)},
}
"""The scales of schemes whose scales are no floats."""


def test_the_table_in_the_documentation_is_up_to_date() -> None:
    """Of its columns all but the meaning of a weight, which the decoding tests have."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| `")]
    stated = {
        (mode.strip(" `"), int(each)): [cell.strip() for cell in cells]
        for mode, bits, _, *cells in rows
        for each in bits.split(",")
    }
    expected = {
        key: [
            ", ".join(map(str, known.group_sizes)),
            ", ".join(str(size or "a row") for size in known.packed_group_sizes),
            BYTES.get(key, ", ".join(known.scale_dtypes)),
            ", ".join(f"`{layout}`" for layout in known.layouts),
        ]
        for key, known in FORMATS.items()
    }
    assert stated == expected
