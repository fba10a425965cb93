"""What other people's Metal headers ask of the front end and the shim headers."""

import mlx.core as mx
import pytest

import metal_emulator

pytestmark = pytest.mark.skipif(
    metal_emulator.unavailable() is not None, reason=str(metal_emulator.unavailable())
)


def result(source: str, header: str) -> float:
    """What `y[0]` becomes."""
    kernel = metal_emulator.metal_kernel(
        name="foreign", input_names=[], output_names=["y"], source=source, header=header
    )
    (y,) = kernel(
        inputs=[],
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )
    return float(y.item())


CONSTANT = """#include <metal_stdlib>

constant bool wanted [[function_constant(200)]];
float chosen() { return wanted ? 2 : 1; }
"""


@pytest.mark.parametrize(("value", "expected"), [("true", 2), ("false", 1)])
def test_a_function_constant_has_the_value_defined_behind_it(
    value: str, expected: float
) -> None:
    header = f"{CONSTANT}constant bool wanted = {value};\n"
    assert result("y[0] = chosen();", header) == expected


def test_a_function_constant_without_a_value_may_stand_unused() -> None:
    unused = CONSTANT.replace("wanted ? 2 : 1", "3")
    assert result("y[0] = chosen();", unused) == 3


def test_a_function_constant_without_a_value_cannot_be_used() -> None:
    with pytest.raises(metal_emulator.CompileError, match="wanted"):
        result("y[0] = chosen();", CONSTANT)


def test_a_kernel_function_is_callable_with_its_attributes() -> None:
    header = """
template <typename T>
[[kernel, max_total_threads_per_threadgroup(32)]] void theirs(
    const device T* x [[buffer(0), function_constant(absent)]],
    device T* y [[buffer(1)]],
    threadgroup T* tile [[threadgroup(0)]],
    uint i [[thread_position_in_grid]]) {
  y[i] = 4;
}
"""
    source = "theirs<float>(nullptr, y, nullptr, thread_position_in_grid.x);"
    assert result(source, header) == 4


def test_a_class_converts_to_its_own_type_name() -> None:
    header = """
template <typename T, T v>
struct fixed {
  using value_type = T;
  constexpr operator value_type() const thread noexcept { return v; }
};
"""
    assert result("y[0] = fixed<int, 5>{};", header) == 5


SPECIALISED = """
template <typename T>
struct pointed {};
template <typename T>
struct pointed<device T*> { using type = T; };
template <typename T>
struct pointed<threadgroup T*> { using type = T; };
"""


def test_specialisations_for_every_address_space_are_one() -> None:
    source = "pointed<device float*>::type six = 6; y[0] = six;"
    assert result(source, SPECIALISED) == 6


def test_functions_of_two_namespaces_are_two() -> None:
    header = """
namespace one {
float value(const device float* x) { return 1; }
float value(const threadgroup float* x) { return 1; }
}
namespace two {
float value(const device float* x) { return 6; }
float value(const threadgroup float* x) { return 6; }
}
"""
    assert result("y[0] = one::value(y) + two::value(y);", header) == 7


def test_types_are_chosen_by_condition() -> None:
    source = """
    using chosen = typename ConditionalType<true, float, int>::type;
    using plain = metal::remove_addrspace_t<chosen>;
    y[0] = metal::bool_constant<true>::value ? plain(8.5f) : 0;
    """
    assert result(source, "") == 8.5


FUNCTIONS = """
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


def test_functions_are_template_arguments_and_instances_have_host_names() -> None:
    assert result("float x = 6; changed<float, halve>(&x, y, 0);", FUNCTIONS) == 3
    metal_emulator.check_text(FUNCTIONS)


def test_a_constant_may_be_computed_from_a_function_constant() -> None:
    header = """
constant int n [[function_constant(0)]];
constant int half_of_it = n / 2;
constant int n = 8;
"""
    assert result("y[0] = half_of_it;", header) == 4


@pytest.mark.parametrize(
    "initializer",
    [
        "table[1000000]",
        "table[4]",
        "1 / zero",
        "spin()",
        "Counted(1).value",
        "sin(1)",
    ],
)
@pytest.mark.parametrize("trace", [False, True])
def test_initializers_that_would_run_at_load_time_are_refused(
    initializer: str, trace: bool
) -> None:
    header = f"""
constant int table[4] = {{1, 2, 3, 4}};
constant int zero = 0;
int spin() {{
  volatile int x = 0;
  while (true) {{ x = x + 1; }}
  return x;
}}
struct Counted {{
  int value;
  Counted(int x) : value(x) {{}}
}};
constant int bad = {initializer};
"""
    message = (
        "not initialized with a constant\\n    at header line 13: constant int bad"
    )
    with (
        metal_emulator.emulated(trace=trace),
        pytest.raises(metal_emulator.CompileError, match=message),
    ):
        result("y[0] = bad;", header)


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
    assert result("y[0] = last + cast.x + v[1].y + m[1][1];", CONSTANTS) == 13
