"""Metal's matrices: stored by columns, built, multiplied and transposed as in Metal."""

import mlx.core as mx
import numpy as np
import pytest

from metal_emulator import CompileError, check_text
from support.marks import needs_emulator
from support.metal_cases import Values, run_checked

pytestmark = needs_emulator

TWO_BY_THREE = np.array([[1, 4], [2, 5], [3, 6]])
"""Two columns of three rows."""
THREE = np.array([[2, 0, 1], [1, 3, 0], [0, 1, 4]])
FOUR = np.array([[2, 1, 0, 3], [0, 1, 5, 1], [4, 0, 1, 2], [1, 2, 0, 1]])


def listed(matrix: np.ndarray) -> str:
    """The elements as Metal takes them: column by column."""
    return ", ".join(str(element) for element in matrix.T.reshape(-1))


BEFORE = f"""
float2x3 m = float2x3({listed(TWO_BY_THREE)});
const float3x3 t = float3x3({listed(THREE)});
float4x4 f({listed(FOUR)});
float2x2 s = float2x2(float2(1, 2), float2(3, 4));
half2x2 h = half2x2(s);
float2x2 list = {{float2(1, 2), float2(3, 4)}};
float3x3 changed = t;
changed[1] = float3(7, 8, 9);
changed[2][0] = 5;
changed *= 2.0f;
float2x2 product = s;
product *= s;
product += float2x2(1);
using M = float3x4;
float4x4 loaded;
load((const device matrix<bfloat, 4, 4>*)a, loaded);
"""
# Functions that take and give matrices.
HEADER = """
constant float2x2 fixed = float2x2(float2(1, 0), float2(0, 3));
template <typename T>
T trace(matrix<T, 2, 2> m) { return m[0][0] + m[1][1]; }
void scale(thread float2x2& m, float by) { m = by * m; }
float scaled(float2x2 m) { scale(m, 3); return m[1].y; }
template <typename M>
void load(device const matrix<bfloat, 4, 4>* x, thread M& m) { m = (M)(*x); }
"""
CASES = {
    "m[1][2]": TWO_BY_THREE[2, 1],
    "m[1].y": TWO_BY_THREE[1, 1],
    "m.columns[0].z": TWO_BY_THREE[2, 0],
    "sizeof(float3x3) + sizeof(half2x2)": 48 + 8,
    "float4x4(2)[3][3] + float4x4(2)[3][2]": 2,
    "float3x2(5)[1].y + float3x2(5)[2].x": 5,
    "list[1].x": 3,
    "float(half2x2(1, 2, 3, 4)[1][0])": 3,
    "float2x2(h)[1].y": 4,
    "float(trace(h)) + trace(s)": 10,
    "scaled(s)": 12,
    "fixed[1][1]": 3,
    "changed[2].x": 10,
    "changed[1].z": 18,
    "(m * float2(10, 1)).y": (TWO_BY_THREE @ [10, 1])[1],
    "(float3(1, 10, 100) * m).y": ([1, 10, 100] @ TWO_BY_THREE)[1],
    "(t * m)[1].z": (THREE @ TWO_BY_THREE)[2, 1],
    "(f * f)[2].w": (FOUR @ FOUR)[3, 2],
    "product[0][1]": (np.array([[1, 3], [2, 4]]) @ [[1, 3], [2, 4]] + np.eye(2))[1, 0],
    "(t + t - 3 * t)[2][2]": -4,
    "(-m)[0].x": -1,
    "(m * 0.5f)[1].z": 3,
    "transpose(m)[2].y": TWO_BY_THREE[2, 1],
    "transpose(m)[0].x + transpose(transpose(m))[1].z": 7,
    "determinant(s)": -2,
    "determinant(t)": round(np.linalg.det(THREE)),
    "determinant(f)": round(np.linalg.det(FOUR)),
    "float(determinant(h))": -2,
    "M(1)[2].z + M()[0].x": 1,
    "loaded[3].z": 14,
    "metal::matrix<float, 2, 2>(s)[0].y": 2,
    "float((half2x2(2049.0h) * half2x2(1.0h))[0][0])": 2048,
}
BFLOATS = mx.arange(16).astype(mx.bfloat16)
VALUES = Values(CASES, BFLOATS, before=BEFORE, header=HEADER)


@pytest.mark.parametrize(("expression", "expected"), CASES.items())
def test_matrices_compute_as_in_metal(expression: str, expected: float) -> None:
    assert VALUES[expression] == expected


def test_matrices_lie_in_buffers_and_in_threadgroup_memory() -> None:
    a = np.arange(32 * 16, dtype=np.float32)
    source = """
    threadgroup float4x4 tile[32];
    uint i = thread_index_in_threadgroup;
    const device float4x4* all = (const device float4x4*)a;
    tile[i] = transpose(all[i]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float4 sum = tile[31 - i] * float4(1, 0, 0, 1);
    out[i] = sum.z + tile[i][1].x;
    """

    out = run_checked(source, mx.array(a))

    # A buffer holds columns, so that each transpose has them as rows.
    tiles = a.reshape(32, 4, 4)
    expected = tiles[::-1, 2, 0] + tiles[::-1, 2, 3] + tiles[:, 0, 1]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("float2x2 m = float2x2(float2(1));", "no matching"),
        ("float2x2 m = float2x2(1, 2, 3);", "wrong number of columns"),
        ("float3x3 m = float2x2(1);", "no viable conversion"),
        ("float2 v = float2x3(1) * float3(1);", "cannot convert"),
        ("float3x3* m = 0;", "without an address space"),
        ("float4 v = {1, 2, 3, 4, 5};", "excess elements"),
    ],
)
def test_what_metal_refuses_is_refused(line: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        check_text(f"kernel void f(device float* x [[buffer(0)]]) {{\n{line}\n}}\n")
