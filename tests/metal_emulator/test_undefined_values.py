"""Trace mode reports undefined values and behaviour that a result may not show."""

import mlx.core as mx
import numpy as np
import pytest

from metal_emulator import (
    CompileError,
    EmulatorError,
    EmulatorWarning,
    check_text,
    emulated,
)
from support.marks import needs_emulator
from support.metal_sources import FLOATS, run
from support.profiles import sampled

pytestmark = needs_emulator


def traced(lines: str, *inputs: mx.array, **options: object) -> object:
    source = f"uint i = thread_position_in_grid.x;\n{lines}"
    with emulated(trace=True, workers=1):
        return run(source, *inputs, name="bug", **options)


def report(lines: str, *inputs: mx.array, **options: object) -> str:
    """What trace mode says about a kernel named "bug"."""
    with pytest.raises(EmulatorError) as caught:
        traced(lines, *inputs, **options)
    return str(caught.value)


COMPONENTS = (
    "p[i / 4].x",
    "p[i / 4].zw.y",
    "p->y",
    "(*p).w",
    "(p + i / 8)->x",
    "((const device float4*)(a + b))[0].x",
    "hold.q[1].x",
    "rows[1][i / 4].y",
)


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_of_a_misaligned_vector_is_reported(component: str) -> None:
    reads = [f"if (c == {j}) out[i] = {each};" for j, each in enumerate(COMPONENTS)]
    lines = (
        "const device float4* p = (const device float4*)(a + b);",
        "struct { const device float4* q; } hold = {p};",
        "const device float4* rows[2] = {p, p};",
        *reads,
    )
    chosen = COMPONENTS.index(component)

    traced("\n".join(lines), FLOATS, 4, chosen)
    message = report("\n".join(lines), FLOATS, 1, chosen)

    assert message.startswith("kernel bug: misaligned access")
    assert f"at source line {5 + chosen}: {reads[chosen]}" in message


def test_components_of_other_objects_are_what_they_were() -> None:
    lines = """
    struct Point { float x, y; };
    Point points[2] = {{1, 2}, {3, 4}};
    thread Point* last = &points[1];
    float2 pairs[2] = {float2(5, 6), float2(7, 8)};
    points[0].x += 10;
    last->y = 20;
    pairs[1].yx = pairs[0].xy;
    pairs[i > 99 ? 1 : 0].x *= 2;
    out[i] = points[0].x + (*last).y + pairs[1].y + pairs[0].x;
    """

    np.testing.assert_array_equal(traced(lines), np.full(32, 11 + 20 + 5 + 10))


@pytest.mark.parametrize(
    "array",
    [
        "float t[4] = {1, 2, 3, 4}; out[i] = t[i];",
        "int t[4] = {0}; t[i] = 1; out[i] = t[0];",
        "float t[2][4] = {}; out[i] = t[i / 4][0];",
    ],
)
def test_an_index_behind_a_private_array_is_reported(array: str) -> None:
    message = report(array)

    assert "index outside of an array" in message
    assert "at source line 2:" in message


@pytest.mark.parametrize(
    "use",
    [
        "float acc; acc += a[i]; out[i] = acc;",
        "uint n; out[i] = a[n & 31];",
        "half4 v; v += half4(1); out[i] = v.x;",
    ],
)
def test_a_private_variable_without_a_value_is_named(use: str) -> None:
    message = report(use, FLOATS)

    assert "is uninitialized when used here\n" in message
    assert "at source line 2:" in message
    with pytest.raises(CompileError, match="is uninitialized when used here"):
        check_text(
            "kernel void k(device float* a [[buffer(0)]], "
            "device float* out [[buffer(1)]], uint i [[thread_position_in_grid]]) {\n"
            f"{use}\n}}\n"
        )


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    "use",
    [
        "float t[4]; for (int j = 0; j < 4; ++j) t[j] += a[i]; v = t[0] - 3;",
        "half h; if (i == 5) h = 1; v = h;",
        "struct { bfloat b[2]; } s; s.b[0] = bfloat(1.0f); v = s.b[i & 1];",
    ],
)
@sampled(3)
def test_a_value_that_was_never_set_is_found_in_an_output(
    use: str, dtype: mx.Dtype
) -> None:
    kind = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat"}[dtype]

    message = report(f"float v; {use}\nout[i] = {kind}(v);", FLOATS, dtype=dtype)

    assert "of output 'out' comes from a private variable that was never set" in message


def test_other_nans_are_results() -> None:
    lines = """
    float4 v; v.x = b[i]; v.yzw = float3(1);
    out[i] = v.x * v.y / v.z;
    out[i + 32] = NAN;
    out[i + 64] = (b[i] - b[i]) / 0;
    out[i + 96] = a[i];
    """
    given = mx.array(np.full(32, 0xFFFFFFFF, np.uint32)).view(mx.float32)

    out = traced(lines, given, FLOATS, shape=(4, 32))

    np.testing.assert_array_equal(out, [np.arange(32), *np.full((3, 32), np.nan)])


NO_LANES = {
    "simd_shuffle(a[i], 32)": "simd_shuffle asks for lane 32, a simdgroup has 32",
    "simd_shuffle(a[i], i + 1)": "simd_shuffle asks for lane 32",
    "simd_broadcast(a[i], 99)": "simd_broadcast asks for lane 99",
    "simd_shuffle_xor(a[i], 32)": "simd_shuffle_xor asks for lane",
    "quad_broadcast(a[i], 4)": "quad_broadcast asks for lane 4, a quad has 4",
}


@pytest.mark.parametrize(("call", "message"), NO_LANES.items())
def test_a_lane_that_does_not_exist_is_reported(call: str, message: str) -> None:
    lines = [f"if (b == {j}) out[i] = {each};" for j, each in enumerate(NO_LANES)]
    chosen = [*NO_LANES].index(call)

    found = report("\n".join(lines), FLOATS, chosen)

    assert f"kernel bug: {message}" in found
    assert f"at source line {2 + chosen}: {lines[chosen]}" in found


def test_shuffles_by_more_than_a_simdgroup_keep_their_values() -> None:
    lines = "out[i] = simd_shuffle_down(a[i], 40) + simd_shuffle_up(a[i], 32);"

    np.testing.assert_array_equal(traced(lines, FLOATS), 2 * np.arange(32))


@pytest.mark.parametrize("dtype", [mx.float32, mx.int32, mx.uint8], ids=str)
def test_output_elements_that_nobody_writes_are_told(dtype: mx.Dtype) -> None:
    lines = "if (i % 3 != 2) { out[i] = i; }"
    words = (
        "kernel bug: 10 of 32 elements of output 'out' were never written, the first "
        "is element 2"
    )

    with pytest.warns(EmulatorWarning, match=words):
        traced(lines, dtype=dtype)
    with emulated(complete=True), pytest.raises(EmulatorError, match=words):
        traced(lines, dtype=dtype)
    assert traced(lines, dtype=dtype, init_value=7)[2] == 7


def test_what_is_added_atomically_is_written() -> None:
    lines = "atomic_fetch_add_explicit(&out[0], i, memory_order_relaxed);"

    total = traced(
        lines, shape=(1,), dtype=mx.uint32, init_value=0, atomic_outputs=True
    )

    assert total[0] == sum(range(32))
