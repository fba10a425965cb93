"""Functions of Metal's library, against Python's exact arithmetic."""

import math
from collections.abc import Sequence
from functools import partial

import mlx.core as mx
import pytest

from support.marks import needs_emulator
from support.metal_cases import Values

pytestmark = needs_emulator


def saturated(value: int, bits: int, signed: bool) -> int:
    """Returns the nearest integer of a type."""
    low = -(2 ** (bits - 1)) if signed else 0
    return min(max(value, low), low + 2**bits - 1)


def unorm(values: Sequence[float], bits: Sequence[int], signed: bool = False) -> int:
    """Packs normalized integers, the first one lowest; ties go to even."""
    word, at = 0, 0
    for value, width in zip(values, bits, strict=True):
        most = 2 ** (width - 1) - 1 if signed else 2**width - 1
        number = round(min(max(value, -1.0 if signed else 0.0), 1.0) * most)
        word |= (number & (2**width - 1)) << at
        at += width
    return word


snorm = partial(unorm, signed=True)


def to_srgb(linear: float) -> float:
    if linear < 0.0031308:
        return 12.92 * linear
    return float(1.055 * linear ** (1 / 2.4) - 0.055)


def from_srgb(value: float) -> float:
    return (
        value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)
    )


BYTES, SHORTS = (8, 8, 8, 8), (16, 16)
INTEGERS = {
    "addsat(2147483647, 1)": 2**31 - 1,
    "addsat(char(-100), char(-100))": saturated(-200, 8, True),
    "addsat(uchar(200), uchar(100))": saturated(300, 8, False),
    "addsat(LONG_MAX, 1l)": 2**63 - 1,
    "addsat(short2(30000, 5), short2(10000, 6)).x": saturated(40000, 16, True),
    "subsat(3u, 5u)": 0,
    "subsat(INT_MIN, 1)": -(2**31),
    "subsat(short(-32768), short(-5))": -32763,
    "hadd(INT_MAX, INT_MAX - 2)": (2**31 - 1 + 2**31 - 3) >> 1,
    "hadd(-3, -4)": (-3 - 4) >> 1,
    "hadd(uchar(255), uchar(254))": (255 + 254) >> 1,
    "rhadd(uchar(255), uchar(254))": (255 + 254 + 1) >> 1,
    "rhadd(-3, -4)": (-3 - 4 + 1) >> 1,
    "mulhi(-5, 7)": (-5 * 7) >> 32,
    "mulhi(short(0x4000), short(-8))": (0x4000 * -8) >> 16,
    "mulhi(0xFFFFFFFFFFFFFFFFul, 16ul)": (2**64 - 1) * 16 >> 64,
    "mulhi(uint2(0x80000000u, 3u), uint2(4u)).x": 0x80000000 * 4 >> 32,
    "madhi(0x40000000, 8, 5)": (0x40000000 * 8 >> 32) + 5,
    "madsat(INT_MAX, 2, -5)": saturated((2**31 - 1) * 2 - 5, 32, True),
    "madsat(uchar(16), uchar(15), uchar(20))": saturated(16 * 15 + 20, 8, False),
    "madsat(char(-16), char(9), char(1))": saturated(-16 * 9 + 1, 8, True),
    "mad24(1000, -1000, 7)": 1000 * -1000 + 7,
    "mul24(uint3(3, 4, 5), uint3(7)).y": 28,
    "absdiff(-5, 7)": 12,
    "absdiff(uchar(3), uchar(250))": 247,
    "median3(3, 1, 2)": 2,
    "median3(uchar(9), uchar(9), uchar(1))": 9,
    "min3(4, 2, 3) + 10 * max3(4, 2, 3)": 42,
    "clz(ushort4(1, 2, 4, 8)).w": 12,
    "extract_bits(int2(-1, 0x70), 4u, 4u).y": 7,
    "insert_bits(ushort2(0), ushort2(5), 3u, 4u).y": 40,
    "rotate(uchar(0x81), uchar(1))": 3,
    "ilogb(0.75f)": math.frexp(0.75)[1] - 1,
    "ilogb(half2(5, 1024)).y": 10,
    "isnormal(1.0f) + 2 * isnormal(INFINITY) + 4 * isnormal(half(0x1p-20f))": 1,
    "isordered(1.0f, 2.0f) + 2 * isordered(1.0f, NAN)": 1,
    "isunordered(1.0f, 2.0f) + 2 * isunordered(NAN, NAN)": 2,
    "pack_float_to_unorm4x8(float4(0, 0.5f, 1, 2))": unorm((0, 0.5, 1, 2), BYTES),
    "pack_float_to_snorm4x8(float4(-2, -0.5f, 0.25f, 1))": snorm(
        (-2, -0.5, 0.25, 1), BYTES
    ),
    "pack_float_to_unorm2x16(float2(0.25f, 0.75f))": unorm((0.25, 0.75), SHORTS),
    "pack_float_to_snorm2x16(float2(-0.25f, 1))": snorm((-0.25, 1), SHORTS),
    "pack_half_to_unorm4x8(half4(0.25h, 0.5h, 0, 1))": unorm((0.25, 0.5, 0, 1), BYTES),
    "pack_half_to_snorm2x16(half2(-0.75h, 0.125h))": snorm((-0.75, 0.125), SHORTS),
    "pack_float_to_unorm10a2(float4(1, 0, 0.25f, 0.4f))": unorm(
        (1, 0, 0.25, 0.4), (10, 10, 10, 2)
    ),
    "pack_float_to_unorm565(float3(1, 0.25f, 0.125f))": unorm(
        (1, 0.25, 0.125), (5, 6, 5)
    ),
    "pack_float_to_srgb_unorm4x8(float4(0.5f, 0.002f, 1, 0.5f))": unorm(
        (to_srgb(0.5), to_srgb(0.002), 1, 0.5), BYTES
    ),
}
INTEGER_VALUES = Values(INTEGERS, dtype=mx.int64)


@pytest.mark.parametrize(("expression", "expected"), INTEGERS.items())
def test_functions_of_integers_are_exact(expression: str, expected: int) -> None:
    assert INTEGER_VALUES[expression] == expected


INCIDENCE = math.pi / 6
SINE = math.sin(INCIDENCE) / 1.5
"""Of the angle behind the surface: Snell's law."""
HEADER = """
float cosine_of(float x) { float c; sincos(x, c); return c; }
half sine_of(half x) { half2 c; return sincos(half2(x), c).y; }
float fraction(float x) { int2 e; return frexp(float2(1, x), e).y * 100 + e.y; }
float whole(float x) { float2 w; modf(float2(x), w); return w.x; }
"""
BEFORE = f"""
float2 ray = float2({math.sin(INCIDENCE)}f, {-math.cos(INCIDENCE)}f);
float2 up = float2(0, 1);
"""
FLOATS = {
    "sincos(0.5f, cosine)": math.sin(0.5),
    "cosine_of(0.5f)": math.cos(0.5),
    "sine_of(0.5h)": math.sin(0.5),
    "fast::sincos(1.0f, cosine)": math.sin(1),
    "sinpi(1.0f)": 0.0,
    "sinpi(100000.5f)": 1.0,
    "cospi(0.5f)": 0.0,
    "cospi(1.0f / 3)": 0.5,
    "tanpi(0.25f)": 1.0,
    "tanpi(half2(-0.25h)).x": -1.0,
    "smoothstep(0.0f, 4.0f, 1.0f)": 3 * 0.25**2 - 2 * 0.25**3,
    "smoothstep(1.0f, 2.0f, 0.5f)": 0.0,
    "smoothstep(float2(0), float2(2), float2(1, 3)).y": 1.0,
    "smoothstep(0.0h, 2.0h, 1.0h)": 0.5,
    "median3(3.0f, 1.0f, 2.0f)": 2.0,
    "fmedian3(half2(1), half2(5), half2(3)).x": 3.0,
    "fmin3(3.0f, 1.0f, 2.0f) + 10 * fmax3(3.0f, 1.0f, 2.0f)": 31.0,
    "distance_squared(float2(1, 2), float2(4, 6))": 25.0,
    "faceforward(float3(0, 0, 1), float3(0, 0, -1), float3(0, 0, 1)).z": 1.0,
    "faceforward(float2(0, 1), float2(0, 1), float2(0, 1)).y": -1.0,
    "reflect(float2(1, -1), up).y": 1.0,
    "refract(ray, up, 1 / 1.5f).x": SINE,
    "refract(ray, up, 1 / 1.5f).y": -math.sqrt(1 - SINE**2),
    "refract(float2(1, 0), up, 1.5f).x": 0.0,
    "ldexp(float2(1, 3), int2(2, -1)).y": 1.5,
    "fraction(6.0f)": 0.75 * 100 + 3,
    "whole(-2.75f)": -2.0,
    "unpack_unorm4x8_to_float(0xFF804001u).z": 0x80 / 255,
    "unpack_unorm4x8_to_half(0xFF804001u).w": 1.0,
    "unpack_snorm4x8_to_float(0x00C08000u).y": -1.0,
    "unpack_snorm4x8_to_float(0x00C08000u).z": -64 / 127,
    "unpack_unorm2x16_to_float(0x40001234u).x": 0x1234 / 65535,
    "unpack_snorm2x16_to_half(0x40008000u).y": 0x4000 / 32767,
    "unpack_unorm10a2_to_float(0x80300401u).x": 1 / 1023,
    "unpack_unorm10a2_to_float(0x80300401u).w": 2 / 3,
    "unpack_unorm565_to_float(ushort(0x8421)).y": 0x21 / 63,
    "unpack_unorm4x8_srgb_to_float(0x800A80FFu).y": from_srgb(0x80 / 255),
    "unpack_unorm4x8_srgb_to_float(0x800A80FFu).z": from_srgb(10 / 255),
    "unpack_unorm4x8_srgb_to_float(0x800A80FFu).w": 0x80 / 255,
    "M_2_SQRTPI_F * 0.5f": 1 / math.sqrt(math.pi),
    "float(M_PI_2_H)": math.pi / 2,
    "MAXHALF * HALF_EPSILON": 65504 / 1024,
    "LONG_MAX > 0 && ULONG_MAX > UINT_MAX && USHRT_MAX == 65535": 1.0,
}
FLOAT_VALUES = Values(FLOATS, before=f"float cosine = 0;{BEFORE}", header=HEADER)


@pytest.mark.parametrize(("expression", "expected"), FLOATS.items())
def test_functions_of_floats_agree_with_python(
    expression: str, expected: float
) -> None:
    of_half = "half" in expression or "h)" in expression or "_H" in expression
    tolerance = 2**-10 if of_half else 2e-6

    assert FLOAT_VALUES[expression] == pytest.approx(
        expected, rel=tolerance, abs=tolerance / 10
    )


NAMES = """
clamp mix saturate sign smoothstep step abs absdiff addsat clz ctz extract_bits hadd
insert_bits mad24 madhi madsat max max3 median3 min min3 mul24 mulhi popcount
reverse_bits rhadd rotate subsat all any isfinite isinf isnan isnormal isordered
isunordered select signbit acos acosh asin asinh atan atan2 atanh ceil copysign cos
cosh cospi divide exp exp10 exp2 fabs fdim floor fma fmax fmax3 fmedian3 fmin fmin3
fmod fract frexp ilogb ldexp log log10 log2 modf nextafter pow powr rint round rsqrt
sin sincos sinh sinpi sqrt tan tanh tanpi trunc cross distance distance_squared dot
faceforward length length_squared normalize reflect refract determinant transpose
threadgroup_barrier simdgroup_barrier simdgroup_load simdgroup_store
simdgroup_multiply simdgroup_multiply_accumulate make_filled_simdgroup_matrix
atomic_store_explicit atomic_load_explicit atomic_exchange_explicit
atomic_compare_exchange_weak_explicit atomic_fetch_add_explicit
atomic_fetch_and_explicit atomic_fetch_max_explicit atomic_fetch_min_explicit
atomic_fetch_or_explicit atomic_fetch_sub_explicit atomic_fetch_xor_explicit
atomic_max_explicit atomic_min_explicit atomic_thread_fence as_type
"""
OF_LANES = """
active_threads_mask all and any ballot broadcast broadcast_first is_first
is_helper_thread max min or prefix_exclusive_product prefix_exclusive_sum
prefix_inclusive_product prefix_inclusive_sum product shuffle shuffle_and_fill_down
shuffle_and_fill_up shuffle_down shuffle_rotate_down shuffle_rotate_up shuffle_up
shuffle_xor sum xor
"""
PACKED = ("unorm4x8", "snorm4x8", "unorm2x16", "snorm2x16", "unorm10a2", "unorm565")


def test_every_function_of_the_specification_for_kernels_is_known() -> None:
    names = NAMES.split()
    names += [f"{of}_{name}" for of in ("simd", "quad") for name in OF_LANES.split()]
    for kind in ("float", "half"):
        names += [f"pack_{kind}_to_{each}" for each in (*PACKED, "srgb_unorm4x8")]
        names += [f"unpack_{each}_to_{kind}" for each in (*PACKED, "unorm4x8_srgb")]
    header = "".join(f"namespace named {{ using metal::{name}; }}\n" for name in names)

    assert Values(["1"], header=header)["1"] == 1
