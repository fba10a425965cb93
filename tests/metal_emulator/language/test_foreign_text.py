"""What other people's Metal headers ask of the front end and the shim headers."""

import mlx.core as mx
import numpy as np
import pytest

from metal_emulator import (
    CompileError,
    EmulatorError,
    check_text,
    emulated,
    library,
)
from support.marks import needs_emulator
from support.metal_cases import Values
from support.metal_sources import run
from support.profiles import sampled

pytestmark = needs_emulator

HEADER = """#include <metal_stdlib>
#if __METAL_VERSION__ < 310
#error
#endif

float first(float pair[2]) { return pair[0]; }
template <typename T>
T sum(const thread T (&v)[3], thread float4 (&w)[2]) {
  return v[0] + v[1] + v[2] + T(w[1].z);
}

constant bool unused [[function_constant(200)]];
constant int n [[function_constant(0)]];
constant int half_of_it = n / 2;
constant int n = 8;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32)]] void theirs(
    const device T* x [[buffer(0), function_constant(absent)]],
    device T* y [[buffer(1)]],
    threadgroup T* tile [[threadgroup(0)]],
    uint i [[thread_position_in_grid]]) {
  y[i] = 4;
}

template <typename T, T v>
struct fixed {
  using value_type = T;
  constexpr operator value_type() const thread noexcept { return v; }
};

template <typename T>
struct pointed {};
template <typename T>
struct pointed<device T*> { using type = T; };
template <typename T>
struct pointed<threadgroup T*> { using type = T; };

template <typename T> float twice(const device T* p) { return 2 * p[0]; }
template <typename T> float twice(const threadgroup T* p) { return 2 * p[0]; }
namespace one {
float value(const device float* x) { return 1; }
float value(const threadgroup float* x) { return 1; }
}
namespace two {
float value(const device float* x) { return 6; }
float value(const threadgroup float* x) { return 6; }
}

template <typename T>
void halve(T x, thread float& y) { y = x / 2; }
template <typename T, void (*change)(T, thread float&)>
kernel void changed(
    const device T* x [[buffer(0)]], device float* y [[buffer(1)]], uint i) {
  float z;
  change(x[i], z);
  y[i] = z;
}
typedef decltype(changed<float, halve>) changed_t;
template [[host_name("changed_a")]] kernel changed_t changed<float, halve>;
template [[host_name("changed_b")]] [[kernel]] void changed<half, halve<half>>(
    const device half*, device float*, uint);
"""
BEFORE = """
using chosen = typename ConditionalType<true, float, int>::type;
using plain = metal::remove_addrspace_t<chosen>;
pointed<device float*>::type six = 6;
half4 h = (half4) 0.5h;
float4 zeros = (float4) 0.0f;
float4 short_list = {1.f};
float pair[2] = {2, 3};
float three[3] = {1, 2, 4};
float4 two[2] = {float4(0), float4(0, 0, 8, 0)};
constexpr const uniform<int> step = make_uniform(4);
const metal::uniform<float> scale = make_uniform(a[2]) * make_uniform(0.5f);
metal::array<float, 3> values = {1, 2, scale};
const metal::array<float, 3> copy = values;
values[0] = step;
"""
FOREIGN = {
    # Kernels are callable, with their attributes, and functions template arguments.
    "(theirs<float>(nullptr, out, nullptr, 0), out[0])": 4,
    "(changed<float, halve>(a, out, 1), out[1])": 3,
    # A class converts to its own type name.
    "fixed<int, 5>{}": 5,
    # Specialisations for every address space are one, functions of two namespaces two.
    "six": 6,
    "twice(a)": 12,
    "one::value(out) + two::value(out)": 7,
    "metal::bool_constant<true>::value ? plain(8.5f) : 0": 8.5,
    # A constant may be computed from a function constant.
    "half_of_it": 4,
    # Casts of literals, lists that are too short, arrays as parameters.
    "float4(h).w + zeros.z + 10 * short_list.x + 100 * short_list.y": 10.5,
    "first(pair)": 2,
    "sum(three, two)": 15,
    # Uniform values and arrays of the library.
    "values[0] + 10 * values[1] + 100 * copy[0]": 124,
    "values[2]": 3,
}
VALUES = Values(FOREIGN, mx.full(8, 6.0), before=BEFORE, header=HEADER)


@pytest.mark.parametrize(("expression", "expected"), FOREIGN.items())
def test_what_others_write_means_what_it_means_to_metal(
    expression: str, expected: float
) -> None:
    assert VALUES[expression] == expected


def test_instances_with_host_names_are_checked() -> None:
    check_text(HEADER)


def test_functions_of_two_branches_are_no_overloads() -> None:
    header = """
    #if __METAL_VERSION__ < 300
    float value(const device float* x) { return x[0]; }
    #else
    float value(const threadgroup float* x) { return x[1]; }
    #endif
    """

    assert run("out[0] = value(a);", mx.array([5.0, 7.0]), header=header)[0] == 7


def test_a_function_constant_without_a_value_cannot_be_used() -> None:
    with pytest.raises(CompileError, match="unused"):
        run("out[0] = unused ? 2 : 1;", header=HEADER)


TRANSLATED = """
#include <metal_stdlib>
#include <simd/simd.h>
using metal::uint;
struct AnyZero {
    template<typename T>
    operator T() && {
        return T {};
    }
};
struct Sizes {
    uint size0;
    uint size1;
};
typedef uint runtime_array[1];
struct Counts {
    uint total;
    runtime_array each;
};
struct Params {
    metal::packed_float3 bias;
    uint n;
};
struct Tile {
    metal::float4 inner[8];
};

uint halved(uint n) {
    uint m = {};
    m = n;
    return m / 2u;
}
uint get(device runtime_array const& v, uint i, constant Sizes& sizes) {
    return uint(i) < 1 + (sizes.size0 - 0 - 4) / 4 ? v[i] : AnyZero();
}

struct main_Input {
};
kernel void main_(
  metal::uint3 id [[thread_position_in_grid]]
, metal::uint3 local [[thread_position_in_threadgroup]]
, device runtime_array const& v [[buffer(0)]]
, device runtime_array& w [[buffer(1)]]
, device Counts& counts [[buffer(2)]]
, constant Params& params [[buffer(4)]]
, threadgroup Tile& tile
, threadgroup metal::atomic_uint& count
, constant Sizes& sizes [[buffer(5)]]
) {
    if (metal::all(local == metal::uint3(0u))) {
        tile = {};
        metal::atomic_store_explicit(&count, 0, metal::memory_order_relaxed);
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    bool inside = metal::all(id < metal::uint3(params.n));
    metal::float4 x = metal::float4(static_cast<float>(id.x)) * metal::float4(2.0);
    tile.inner[local.x] = x + metal::float4(metal::float3(params.bias), 0.0);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    uint _e7 = metal::atomic_fetch_add_explicit(
        &count, 1u, metal::memory_order_relaxed);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    uint _e9 = halved(get(v, id.x, sizes)) + static_cast<uint>(tile.inner[local.x].y);
    w[id.x] = _e9 + as_type<uint>(metal::int2(1, 0).y) + metal::min(unsigned(_e7), 0u);
    if (inside) {
        counts.each[id.x] = metal::atomic_load_explicit(
            &count, metal::memory_order_relaxed);
    }
    if (id.x == 0u) {
        counts.total = params.n;
    }
    return;
}
"""
"""As naga translates WGSL: no `using namespace`, arrays of any length as those of one
element, threadgroup variables as references without an attribute."""


def translated(text: str) -> list[mx.array]:
    sizes = np.array([64, 128], np.uint32).tobytes()
    params = np.array([1, 3, 4], np.float32).tobytes()
    params += np.array([32], np.uint32).tobytes()
    v = mx.arange(16, 32).astype(mx.uint32)
    return library(text).function("main_")(
        inputs={"v": v, "params": params, "sizes": sizes},
        output_shapes=[(32,), (33,)],
        output_dtypes=[mx.uint32, mx.uint32],
        grid=(32, 1, 1),
        threadgroup=(8, 1, 1),
    )


@pytest.mark.parametrize("trace", [False, True])
def test_what_naga_writes_runs(trace: bool) -> None:
    library(TRANSLATED).function("main_").check()
    with emulated(trace=trace, complete=True):
        w, counts = translated(TRANSLATED)

    i = np.arange(32)
    np.testing.assert_array_equal(w, np.where(i < 16, 8 + i // 2, 0) + 2 * i + 3)
    assert counts.tolist() == [32] + [8] * 32


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("w[id.x]", "w[id.x + 1]", "write outside buffer 'w' (128 bytes), at byte 128"),
        (
            "inner[local.x].y",
            "inner[local.x + 8].y",
            "read outside threadgroup variable 'tile' (128",
        ),
        ("if (metal::all(local == metal::uint3(0u)))", "if (false)", "never written"),
    ],
)
def test_faults_in_what_naga_writes_are_found(
    right: str, wrong: str, words: str
) -> None:
    with emulated(trace=True), pytest.raises(EmulatorError) as caught:
        translated(TRANSLATED.replace(right, wrong))

    assert words in str(caught.value)


RUNNING = """
constant int table[4] = {1, 2, 3, 4};
constant int zero = 0;
extern constant int seed;
int spin() {
  volatile int x = 0;
  while (true) { x = x + 1; }
  return x;
}
constexpr int recursive(int n) { return n <= 0 ? 0 : 1 + recursive(n - 1); }
struct Counted {
  int value;
  Counted(int x) : value(x) {}
};
"""


@pytest.mark.parametrize(
    "initializer",
    [
        *("table[1000000]", "table[4]", "1 / zero", "spin()", "sin(1)", "bad + 1"),
        *("Counted(1).value", "recursive(1000000000)", "*(constant int*)0", "seed"),
    ],
)
@pytest.mark.parametrize("trace", [False, True])
@sampled(10)
def test_initializers_that_would_run_at_load_time_are_refused(
    initializer: str, trace: bool
) -> None:
    bad = f"constant int bad = {initializer};\n"
    message = "not initialized with a constant\n    at header line 15: constant int bad"
    with emulated(trace=trace), pytest.raises(CompileError, match=message):
        run("out[0] = bad;", header=RUNNING + bad)


CONSTANTS = """
constant float4 v[2] = {float4(1), float4(float2(1, 2), float2(3))};
constant half2 h = half2(1.5h, 2.0h);
constant packed_float3 p = packed_float3(float3(1));
constant bfloat b = bfloat(1.0f);
constant float2x2 m = float2x2(float2(1, 2), float2(3, 4));
constant complex64_t c = complex64_t(1.0f, 2.0f);
constant metal::array<int, 3> a = {1, 2, 3};
constant float infinite = metal::numeric_limits<float>::infinity();
constant float bits = as_type<float>(0x40000000);
constant float4 cast = static_cast<float4>(int4(1)) + (float4)1.0f;
constant int last = a[2] + int(bits);
"""


def test_initializers_that_are_constants_pass() -> None:
    out = run("out[0] = last + cast.x + v[1].y + m[1][1] + a.size();", header=CONSTANTS)

    assert out[0] == 16
