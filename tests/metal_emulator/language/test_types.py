"""Metal's types, conversions and functions, as the emulator compiles them."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from metal_emulator import CompileError, check_text
from support.marks import needs_emulator
from support.metal_cases import Values, run_checked
from support.metal_sources import FLOATS, HALVES, each_thread, run, to_numpy

pytestmark = needs_emulator

halves = hnp.arrays(np.float16, 64, elements=st.floats(-100, 100, width=16))


VALUES = {
    "float4(1, 2, 3, 4).w": 4,
    "float4(float2(1, 2), 3, 4).y": 2,
    "float4(1, float3(2, 3, 4)).z": 3,
    "float4(7).z": 7,
    "float4(int4(1, 2, 3, 4)).y": 2,
    "int4(float4(1.9f)).x": 1,
    "half2(float2(1, 2049)).y": 2048,
    "float(bfloat2(half2(1, 257)).y)": 256,
    "uint2(half2(65, 66)).y": 66,
    "vec<float, 3>(1, 2, 3).y": 2,
    "metal::vec<float, 2>(1, 2).y": 2,
    "((float4)int4(1, 2, 3, 4)).y": 2,
    "((float2)int2(3, 4) * 2.0f).y": 8,
    "(1.0f > 0 ? float2(1, 2) : float2(3, 4)).y": 2,
    "static_cast<float4>(int4(1, 2, 3, 4)).w": 4,
    "static_cast<float>(half(1.5h))": 1.5,
    "float4(1, 2, 3, 4).wzyx.x": 4,
    "float4(1, 2, 3, 4).xy.y + float4(1, 2, 3, 4).rgb.z": 5,
    "float(packed_float3(float3(1, 2, 3)).z)": 3,
    "(float3(packed_float3(float3(1, 2, 3))) * 2).z": 6,
    "float(as_type<half2>(0x54005401u).x)": 64.0625,
    "as_type<uint>(1.0f) >> 23": 127,
    "as_type<half4>(uint2(0x3C003C00u, 0x40004000u)).z": 2,
    "1.5h + 0.25bf + 1.0H": 2.75,
    "sizeof(float3) + sizeof(packed_float3)": 28,
    "is_same_v<half, float16_t> && is_same_v<bfloat, bfloat16_t>": 1,
    "static_cast<float>(v.x)": 1,
    "static_cast<half>(v[2]) + static_cast<int>(w.y)": 8,
    "static_cast<float>(h.z) + static_cast<float>(bfloat(v.w))": 7,
    "static_cast<uint>(bytes.w) + static_cast<float>(s.v.y)": 6,
    "static_cast<float2>(v.xy).y": 2,
    "*static_cast<const thread float*>(table)": 9,
    "static_cast<thread float4&>(v)[3]": 4,
    "popcount(0xF0u) + popcount(uchar(255))": 12,
    "clz(1u) + clz(ushort(1))": 46,
    "ctz(8u) + ctz(0u)": 35,
    "reverse_bits(1u) >> 31": 1,
    "clamp(5.0f, 0.0f, 1.0f)": 1,
    "max(2, 3) + min(2.0h, 3.0h)": 5,
    "max(NAN, 2.0f)": 2,
    "select(1.0f, 2.0f, true)": 2,
    "select(float2(1, 2), float2(3, 4), float2(1, 1) > float2(0, 2)).x": 3,
    "any(float2(0, 1) > 0.5f)": 1,
    "all(float2(0, 1) > 0.5f)": 0,
    "isnan(NAN) + isinf(INFINITY) + isnan(1.0f)": 2,
    "abs(-3) + abs(-2.0f) + fabs(-1.0h)": 6,
    "floor(1.7f) + ceil(1.2f) + trunc(-1.7f) + rint(2.5f) + round(2.5f)": 7,
    "sqrt(16.0f) + rsqrt(0.25f) + metal::precise::sqrt(9.0f)": 9,
    "exp2(3.0f) + fast::exp2(2.0f) + log2(8.0f)": 15,
    "pow(2.0f, 10.0f)": 1024,
    "fma(2.0f, 3.0f, 4.0f)": 10,
    "dot(float4(1, 2, 3, 4), float4(1))": 10,
    "length(float2(3, 4))": 5,
    "sign(-2.0f) + step(1.0f, 2.0f) + mix(0.0f, 4.0f, 0.5f)": 2,
    "mulhi(0x80000000u, 4u)": 2,
    "extract_bits(0xABCDu, 4u, 8u)": 0xBC,
    "insert_bits(0xA00Du, 0xBCu, 4u, 8u)": 0xABCD,
    "rotate(0x80000001u, 1u)": 3,
    "Limits<float>::max > 1e38f && Limits<half>::finite_max == 65504.0h": 1,
    "numeric_limits<int>::max() == INT_MAX": 1,
    "ceildiv(7, 2)": 4,
}
EXACT = Values(
    VALUES,
    before="""
float4 v = float4(1, 2, 3, 4);
int2 w = int2(4, 5);
half4 h = half4(v);
uchar4 bytes = uchar4(1, 2, 3, 4);
Held s;
s.v = v;
float table[2] = {9, 8};
""",
    header="struct Held { float4 v; };\n",
)


@pytest.mark.parametrize(("expression", "expected"), VALUES.items())
def test_values_are_those_of_metal(expression: str, expected: float) -> None:
    assert EXACT[expression] == expected


def test_elementary_functions_agree_with_numpy() -> None:
    x = np.linspace(0.1, 4, 32, dtype=np.float32)

    found = each_thread(
        "exp(a[i]) + log(a[i]) + sin(a[i]) * cos(a[i]) + tanh(a[i])", mx.array(x)
    )

    expected = np.exp(x) + np.log(x) + np.sin(x) * np.cos(x) + np.tanh(x)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@given(x=halves)
def test_half_is_rounded_after_every_operation(x: np.ndarray) -> None:
    found = each_thread("a[i] * a[i + 32] + a[i]", mx.array(x), dtype=mx.float16)

    np.testing.assert_array_equal(found, x[:32] * x[32:] + x[:32])


@given(x=halves)
def test_fma_of_halves_is_rounded_once(x: np.ndarray) -> None:
    found = each_thread("fma(a[i], a[i + 32], a[i])", mx.array(x), dtype=mx.float16)

    wide = x.astype(np.longdouble)
    expected = (wide[:32] * wide[32:] + wide[:32]).astype(np.float16)
    np.testing.assert_array_equal(found, expected)


@given(x=hnp.arrays(np.float32, 64, elements=st.floats(2**-10, 2**10, width=32)))
def test_bfloat_is_rounded_after_every_operation(x: np.ndarray) -> None:
    a = mx.array(x).astype(mx.bfloat16)

    found = each_thread("a[i] * a[i + 32] + a[i]", a, dtype=mx.bfloat16)

    expected = a[:32] * a[32:] + a[:32]
    np.testing.assert_array_equal(found, np.array(expected.astype(mx.float32)))


X = np.float32(1 + 2**-12)
ROUNDED = {
    "a[0] * a[0] + a[1]": 0,  # not contracted
    # Denormals of float are zero, those of half are kept.
    "a[2] * 3.0f == 0 && a[2] == 0": 1,
    "a[3] * a[3]": 0,
    "b[0] * 2.0h": 2.0**-23,
    # The exact sum is a little more than a tie of half, its float the tie itself.
    "fma(b[1], b[2], b[3])": -4100,
    "fma(b[1], half(INFINITY), b[3])": np.inf,
}
ROUNDED_VALUES = Values(
    ROUNDED,
    mx.array(np.float32([X, -X * X, 1e-39, 1e-20])),
    mx.array([2.0**-24, 1 + 2.0**-10, 2 - 2.0**-9, -4100], mx.float16),
)


@pytest.mark.parametrize(("expression", "expected"), ROUNDED.items())
def test_results_are_rounded_as_in_metal(expression: str, expected: float) -> None:
    assert ROUNDED_VALUES[expression] == expected


def test_denormals_outside_of_the_kernel_are_kept() -> None:
    each_thread("1.0f")

    assert np.float32(1e-39) * np.float32(1) != 0


def test_vectors_are_loaded_through_pointer_casts() -> None:
    source = """
    half4 h = *(const device half4*)(a + 4);
    const device packed_half4* p = (const device packed_half4*)(a + 1);
    float2 f(h.x, h.w);
    f.y += half4(p[1]).y;
    *(device float2*)(out + 2) = f;
    ((device packed_float3*)(out + 5))[0] = float3(1, 2, 3);
    """

    out = run(source, HALVES, grid=1, shape=(8,))

    np.testing.assert_array_equal(out[[2, 3, 5, 6, 7]], [4, 13, 1, 2, 3])


def test_templates_aliases_and_structs_compile() -> None:
    header = """
    constant constexpr float table[4] = {1, 2, 4, 8};
    template <typename T, int N>
    struct Block {
      using Pair = vec<T, 2>;
      T values[N];
      METAL_FUNC Pair first(const thread T& scale) const thread {
        return Pair(values[0], values[1]) * scale;
      }
    };
    template <typename T>
    METAL_FUNC T both(vec<T, 2> v) { return v.x + v.y; }
    """
    source = """
    Block<T, N> block;
    #pragma clang loop unroll(full)
    for (int j = 0; j < N; ++j) { block.values[j] = T(table[j]); }
    out[0] = FLAG ? float(both(block.first(T(2)))) : 0.0f;
    """
    template = [("T", mx.bfloat16), ("N", 4), ("FLAG", True)]

    assert run(source, header=header, template=template, grid=1)[0] == 6


LITERALS = ("0.1", ".1", "1e-1", "1.E-1")


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_literals_without_a_suffix_are_floats_in_templates_too(dtype: mx.Dtype) -> None:
    x = np.arange(32, dtype=np.float32)
    lines = (
        f"out[{32 * j} + i] = T({each} * a[i]);" for j, each in enumerate(LITERALS)
    )
    source = "\n".join(["uint i = thread_index_in_simdgroup;", *lines])

    found = run(
        source, mx.array(x), shape=(4, 32), dtype=dtype, template=[("T", dtype)]
    )

    wanted = to_numpy(mx.array(np.float32(0.1) * x).astype(dtype))
    np.testing.assert_array_equal(found, np.tile(wanted, (4, 1)))


DECLARING = (
    "template <class T, int N> constexpr int count() { return N; }\n"
    "#define NAMED(name) threadgroup float \\\n  name[32];\n"
    "#define WHOLE threadgroup float x3[32];\n"
    "#define OF(T) threadgroup T /* a \\\n b */ x4[32]\n"
)
DECLARATIONS = (
    "threadgroup float x0[count<float, 32>()];",
    "threadgroup float x1[count<half, 4>() * 8], y1[count<int, 2>()];",
    "NAMED(x2)",
    "WHOLE",
    "OF(float);",
    "#if 1\nthreadgroup float x5[32];\n#endif  \nuint unused = 0;",
    "#pragma METAL internals : enable\nthreadgroup float /* of all */ x6[32];",
    "threadgroup alignas(16) float x7[32];",
    "threadgroup float // the tile\n  x8[32];",
    "threadgroup float rows[4][8], y9; threadgroup float* x9 = &rows[0][0];",
)


def test_threadgroup_variables_are_shared_however_they_are_declared() -> None:
    variables = range(len(DECLARATIONS))
    lines = (
        "uint i = thread_index_in_threadgroup;",
        *DECLARATIONS,
        *(f"x{j}[i] = a[i] + {j};" for j in variables),
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        *(f"out[{32 * j} + i] = x{j}[31 - i];" for j in variables),
    )

    out = run_checked("\n".join(lines), FLOATS, header=DECLARING, shape=(10, 32))

    np.testing.assert_array_equal(
        out, [[j + 31 - i for i in range(32)] for j in variables]
    )


CONSTANT = "constant bool on [[function_constant(1)]];\n"
CHOSEN = (
    "constant int n = 5;\n"
    "constant bool chosen = is_function_constant_defined(on) ? on == true : true;\n"
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", 1), ("constant bool on = false;\n", 0), ("constant bool on = true;\n", 1)],
)
def test_a_function_constant_is_defined_by_a_definition_behind_it(
    value: str, expected: int
) -> None:
    header = f"{CONSTANT}{CHOSEN}{value}"

    out = run_checked(
        "out[thread_position_in_grid.x] = chosen && n == 5;", header=header
    )

    assert out[0] == expected


def test_goto_is_refused() -> None:
    source = "goto end;\nend: out[0] = 1;"

    with pytest.raises(CompileError, match="at source line 1: goto end;"):
        run(source)
    with pytest.raises(CompileError, match="Metal has no goto\n    at text line 2"):
        check_text(f"kernel void f(device float* out [[buffer(0)]]) {{\n{source}\n}}")
