"""Inputs that break careless sums, for each family of formats.

What is promised:

* Sums are float32 from the first product to the last split, so neither a product, nor a
  group's sum, nor a split's partial sum overflows where the result does not: `lead`,
  `big`, `cancel`. The result is within the error of a float32 sum of its addends'
  magnitudes, and overflows to an infinity where the rounded result does.
* Zero activations and zero weights give zero, whatever is on the other side, but for
  infinities and NaN.
* A NaN makes its row NaN, and an infinity its row infinite or NaN. A scale that is not
  finite does so to its column. Other rows and columns keep every bit.
* Subnormal halves are numbers like all others, in x, in scales and in the result. What
  is subnormal in float32 may become zero; the scale byte 0 of `mxfp4` and `mxfp8`,
  2^-127, is zero.
* E4M3's NaN, which nothing that quantizes writes, reads as 480, in codes and in scales,
  as it does in the Metal kernels of MLX: its CPU back end says NaN.
"""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet
from numpy.typing import NDArray

import mlx_marlin
from mlx_marlin.weights.formats import FORMATS
from support import format_cases, oracles
from support.format_cases import Variant, Weight
from support.profiles import sampled
from support.trace_mode import needs_kernels

pytestmark = needs_kernels

N, K = 40, 384
BASE = Variant("affine", 4, 64, "mlx", "float16", "float16", 1, "offset", True)


def family(mode: str, bits: int, group_size: int, **options: object) -> Variant:
    return replace(
        BASE,
        mode=mode,
        bits=bits,
        group_size=group_size,
        scale_dtype=FORMATS[mode, bits].scale_dtype(options.get("dtype", "float16")),
        **options,
    )


HALVES = [
    family("affine", 4, 64, fragments=0),
    family("affine", 4, 32, layout="marlin", fragments=2),
    family("symmetric", 8, 32, layout="marlin", fragments=0),
    family("zero_point", 4, 64, layout="marlin"),
    family("mxfp8", 8, 32),
    family("nvfp4", 4, 16, layout="marlin", fragments=2),
    family("affine", 8, 64, operand="exact"),
    family("affine", 3, 32, layout="marlin", fragments=0),
    family("symmetric", 4, 64, layout="marlin", fragments=2, operand="exact"),
    family("affine", 4, 16, layout="marlin", fragments=2),
    family("symmetric", 8, 16, layout="marlin"),
    family("zero_point", 3, 16, layout="marlin", fragments=0),
    family("mxfp4", 4, 32, fragments=0),
    family("mxfp4", 4, 32, layout="marlin", fragments=2),
    family("mxfp8", 8, 32, layout="marlin", fragments=0),
    family("nvfp4", 4, 16, fragments=0),
]
"""The families in float16, where overflow is near."""
WIDE = [
    family("symmetric", 4, 64, dtype="float32", layout="marlin", operand="exact"),
    family("mxfp4", 4, 32, dtype="bfloat16", fragments=2),
    family("affine", 8, 16, dtype="bfloat16", layout="marlin"),
    family("affine", 4, 64, dtype="bfloat16", layout="marlin", operand="exact"),
    family("zero_point", 4, 64, dtype="bfloat16", layout="marlin", fragments=0),
    family("mxfp8", 8, 32, dtype="float32", layout="marlin"),
    family("nvfp4", 4, 16, dtype="bfloat16", layout="marlin"),
]
ORDINARY = (*HALVES[:6], *WIDE[:3])
"""Every mode, dtype, layout and kernel; the full profile runs the other families."""


def param(variant: Variant, *more: object) -> ParameterSet:
    marks = () if variant in ORDINARY else (pytest.mark.slow,)
    name = "-".join(map(str, (variant, *more)))
    return pytest.param(variant, *more, marks=marks, id=name)


halves = pytest.mark.parametrize("variant", [*map(param, HALVES)])
all_families = pytest.mark.parametrize("variant", [*map(param, (*HALVES, *WIDE))])

Array = NDArray[np.float32]


def rows_of(variant: Variant) -> int:
    return 11 if variant.fragments else variant.rows


def compute(variant: Variant, x: Array, weight: Weight) -> oracles.Floats:
    """Runs the product in three splits."""
    plan = variant.plan(*x.shape[:1], N, x.shape[1], threadgroups=5)
    assert plan.is_split
    arrays = mx.array(x).astype(getattr(mx, variant.dtype))
    return oracles.exact(format_cases.run(plan, arrays, weight))


def normal(variant: Variant, seed: int = 0, k: int = K) -> Array:
    draw = np.random.default_rng(seed)
    return draw.standard_normal((rows_of(variant), k), np.float32)


def scaled(weight: Weight, exponent: int) -> Weight:
    """Multiplies a weight by a power of two."""
    words, scales, *rest = weight.native
    if weight.mode in format_cases.SUPER_BLOCKS:
        size = format_cases.words_of_record(weight.mode, weight.bits)
        records = np.array(scales).reshape(len(scales), -1, size)
        of_groups = 4 if weight.mode == "k_codebook" else 8
        d = records[..., of_groups:].copy().view("<f2") * np.float16(2.0**exponent)
        records = np.concatenate([records[..., :of_groups], d.view("<u2")], axis=-1)
        moved = mx.array(records.reshape(len(records), -1))
        return replace(weight, native=(words, moved))
    if scales.dtype != mx.uint8:
        factor = 2.0**exponent
        biases = rest if weight.mode == "zero_point" else [b * factor for b in rest]
        return replace(weight, native=(words, scales * factor, *biases))
    step = 8 if weight.group_size == 16 else 1  # of an exponent's last place
    moved = np.array(scales).astype(int) + step * exponent
    moved = np.where(
        np.array(scales) == 0, 0, moved.clip(0, 0x7E if step == 8 else 254)
    )
    return replace(weight, native=(words, mx.array(moved.astype(np.uint8))))


def assert_within(
    variant: Variant, y: oracles.Floats, x: Array, weight: Weight
) -> None:
    """Checks a result against the float32 error of the sum of its magnitudes.

    Where one addend outweighs all others, every addition after it rounds by as much.
    """
    x64 = oracles.exact(mx.array(x).astype(getattr(mx, variant.dtype)))
    expected = x64 @ weight.decoded.T
    scale, value, bias = map(np.abs, weight.parts)
    offset = format_cases.offset_of(variant.format, variant.operand)
    sums = 16 * 2.0**-24 * (np.abs(x64) @ (scale * (value + offset) + bias).T)
    rounding = oracles.ROUNDING[variant.dtype] * np.abs(expected)
    assert np.isfinite(y).all()
    smallest = oracles.SMALLEST[variant.dtype]
    assert (np.abs(y - expected) <= sums + rounding + smallest).all()


@sampled(4)
@all_families
def test_one_large_column_does_not_drown_the_others(variant: Variant) -> None:
    x = normal(variant)
    x[:, 0] = 1024
    weight = variant.weight(N, K, seed=1)

    assert_within(variant, compute(variant, x, weight), x, weight)


@all_families
def test_sums_of_a_group_may_leave_halfs_range(variant: Variant) -> None:
    x = np.abs(normal(variant)) + 6000  # 32 of them: 192000
    assert np.abs(x).reshape(len(x), -1, 32).sum(-1).min() > 65504
    weight = scaled(variant.weight(N, K, seed=2), -4)

    assert_within(variant, compute(variant, x, weight), x, weight)


@all_families
def test_partial_sums_may_leave_halfs_range(variant: Variant) -> None:
    x = np.abs(normal(variant)) + 4000
    x[:, K // 2 :] = 250 - x[:, : K // 2]
    weight = variant.weight(N, K, seed=3)
    # The same weights in both halves of k: partial sums of one sign, then the other.
    half = [
        mx.concatenate([a[:, : a.shape[1] // 2]] * 2, axis=1) for a in weight.native
    ]
    weight = replace(weight, native=tuple(half))
    partial = np.abs(x[:, : K // 2]) @ weight.decoded[:, : K // 2].T
    while np.abs(partial).max() < 2e5:
        weight, partial = scaled(weight, 1), 2 * partial

    y = compute(variant, x, weight)

    assert_within(variant, y, x, weight)


@halves
def test_what_is_beyond_halfs_range_is_an_infinity_of_its_sign(
    variant: Variant,
) -> None:
    weight = variant.weight(N, K, seed=4)
    x = np.full((rows_of(variant), K), 20000, np.float32)
    while np.abs(expected := x.astype(float) @ weight.decoded.T).max() < 3e5:
        weight = scaled(weight, 1)
    beyond = np.abs(expected) > 66000

    y = compute(variant, x, weight)

    np.testing.assert_array_equal(y[beyond], np.sign(expected[beyond]) * np.inf)
    assert np.isfinite(y[np.abs(expected) < 65000]).all()


@all_families
def test_zeros_on_either_side_give_zeros(variant: Variant) -> None:
    weight = variant.weight(N, K, seed=5)
    words, scales, *biases = weight.native
    nothing = (mx.zeros_like(each) for each in (scales, *biases))
    zero = replace(weight, native=(words, *nothing))
    large = np.full((rows_of(variant), K), 60000, np.float32)

    np.testing.assert_array_equal(compute(variant, 0 * large, weight), 0)
    np.testing.assert_array_equal(compute(variant, large, zero), 0)


@sampled(5)
@all_families
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 77, K - 1])
def test_what_is_not_finite_stays_in_its_row(
    variant: Variant, value: float, column: int
) -> None:
    weight = variant.weight(N, K, seed=6)
    x = normal(variant, 7)
    finite = compute(variant, x, weight)
    row = len(x) // 2
    x[row, column] = value

    y = compute(variant, x, weight)

    others = np.arange(len(x)) != row
    np.testing.assert_array_equal(y[others], finite[others])
    assert not np.isfinite(y[row]).any()
    if np.isnan(value):
        assert np.isnan(y[row]).all()


STORED = [
    param(variant, place)
    for variant in (*HALVES, *WIDE)
    for place in range(1, 1 + variant.format.parameters)
    if variant.mode != "nvfp4"  # E4M3 has no infinity
]


@pytest.mark.parametrize(("variant", "place"), STORED)
def test_scales_that_are_not_finite_stay_in_their_column(
    variant: Variant, place: int
) -> None:
    weight = variant.weight(N, K, seed=8)
    native = [*weight.native]
    value = 255 if native[place].dtype == mx.uint8 else mx.nan
    x = normal(variant, 9)
    finite = compute(variant, x, weight)
    native[place][5, 2] = value

    y = compute(variant, x, replace(weight, native=tuple(native)))

    others = np.arange(N) != 5
    np.testing.assert_array_equal(y[:, others], finite[:, others])
    assert not np.isfinite(y[:, 5]).any()


@halves
def test_subnormal_halves_are_numbers(variant: Variant) -> None:
    weight = variant.weight(N, K, seed=10)
    x = normal(variant, 11) * 2.0**-18

    y = compute(variant, x, weight)

    assert np.abs(x[x != 0]).min() < 2.0**-14
    assert_within(variant, y, x, weight)
    assert (y != 0).any()


@halves
def test_subnormal_scales_are_numbers(variant: Variant) -> None:
    # The least that E8M0 can say is 2^-126; E4M3 has subnormals of its own, from 2^-9.
    lowest = {"mxfp4": -20, "mxfp8": -20, "nvfp4": -4}.get(variant.mode, -14)
    weight = scaled(variant.weight(N, K, seed=12), lowest)
    x = normal(variant, 13) * 256

    y = compute(variant, x, weight)

    assert_within(variant, y, x, weight)


@sampled(1)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_scale_byte_of_zero_is_zero(bits: int, layout: str) -> None:
    variant = family(f"mxfp{bits}", bits, 32, layout=layout, dtype="float32")
    words, scales = variant.weight(N, K, seed=14).native
    weight = Weight(variant.mode, bits, 32, (words, mx.zeros_like(scales)))

    y = compute(variant, np.full((8, K), 2.0**30, np.float32), weight)

    np.testing.assert_array_equal(y, 0)


def bytes_of_mxfp8() -> Weight:
    """Returns a weight that has every code of E4M3 and exponents of all sizes."""
    codes = np.tile(np.arange(256), (N, 2))[:, :K]
    codes[codes & 0x7F == format_cases.NOT_A_NUMBER] = 0
    exponents = np.linspace(20, 240, N * K // 32).round().astype(np.uint8)
    native = format_cases.write_codes(codes, 8), mx.array(exponents.reshape(N, -1))
    return Weight("mxfp8", 8, 32, native)


def bytes_of_nvfp4() -> Weight:
    """Returns a weight that has every code of E2M1 and every scale of E4M3."""
    scales = np.resize(np.arange(256), (N, K // 16))
    scales[scales & 0x7F == format_cases.NOT_A_NUMBER] = 0
    codes = np.resize(np.arange(16), (N, K))
    native = format_cases.write_codes(codes, 4), mx.array(scales.astype(np.uint8))
    return Weight("nvfp4", 4, 16, native)


@sampled(2)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("weight", [bytes_of_mxfp8(), bytes_of_nvfp4()])
def test_every_byte_is_what_its_definition_says(weight: Weight, layout: str) -> None:
    form = weight.mode, weight.bits, weight.group_size
    variant = family(*form, layout=layout, dtype="float32")

    y = compute(variant, np.eye(K, dtype=np.float32), weight)

    np.testing.assert_array_equal(y.T, weight.decoded)


def test_e4m3s_not_a_number_reads_as_480() -> None:
    codes = np.full((N, K), format_cases.NOT_A_NUMBER)
    scales = mx.full((N, K // 32), 127, mx.uint8)
    weight = Weight("mxfp8", 8, 32, (format_cases.write_codes(codes, 8), scales))
    variant = family("mxfp8", 8, 32, dtype="float32")

    y = compute(variant, np.eye(8, K, dtype=np.float32), weight)

    np.testing.assert_array_equal(y, 480)


@all_families
@pytest.mark.parametrize("k", [96, 160, 192])
def test_nothing_after_a_row_enters_it(variant: Variant, k: int) -> None:
    k = k if k % variant.step == 0 else 5 * variant.step
    m = rows_of(variant)
    weight = variant.weight(N, k, seed=15)
    plan = variant.plan(m, N, k, threadgroups=5)
    x = mx.array(normal(variant, 16, k)).astype(getattr(mx, variant.dtype))
    expected = format_cases.run(plan, x, weight)
    # Rows are followed by NaN: the next row's, or after the last one what is in memory.
    memory = mx.concatenate([x.flatten(), mx.full((4 * k,), mx.nan, x.dtype)])
    view = memory[: m * k].reshape(m, k)

    y = format_cases.run(plan, view, weight)
    alone = []
    for row in range(m):
        only = mx.where(mx.arange(m)[:, None] == row, x, mx.nan)
        alone.append(format_cases.run(plan, only, weight)[row])

    assert mx.array_equal(y, expected)
    assert mx.array_equal(mx.stack(alone), expected)


@pytest.mark.parametrize("k", [16, 48, 80, 208])
def test_nvfp4_whose_k_fills_no_step_is_served_by_stock(kernels: None, k: int) -> None:
    weight = format_cases.any_weight("nvfp4", 4, 16, 8, k, dtype="float16", seed=19)
    x = format_cases.activations(3, k, dtype="float16", seed=20)
    options = {"group_size": 16, "bits": 4, "mode": "nvfp4"}

    reason = mlx_marlin.why_not(x, *weight.native, None, True, 16, 4, "nvfp4")
    y = mlx_marlin.quantized_matmul(x, *weight.native, **options)

    assert "multiple of 64" in reason
    assert f"k={k}" in reason
    expected = mx.quantized_matmul(x, *weight.native, **options)
    assert mx.array_equal(y, expected)
    with pytest.raises(ValueError, match=rf"k={k} is not a multiple of 64.*nvfp4"):
        mlx_marlin.pack(*weight.native, **options)
