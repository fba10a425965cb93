"""Functions of simdgroups and their matrices."""

import mlx.core as mx
import numpy as np
import pytest

from metal_emulator import CompileError, check_text, emulated
from support.marks import needs_emulator
from support.metal_cases import Values, run_checked
from support.metal_sources import FLOATS, each_thread, run

pytestmark = needs_emulator

LANES = np.arange(32)
QUADS = LANES.reshape(8, 4)
QUAD_PRODUCTS = np.hstack([np.ones((8, 1)), (QUADS + 1).cumprod(1)[:, :3]])


OF_LANES = {
    "simd_shuffle(v, 5)": np.full(32, 5),
    "simd_shuffle(v, 31 - lane)": 31 - LANES,
    "simd_shuffle_xor(v, 3)": LANES ^ 3,
    "simd_shuffle_up(v, 2)": np.where(LANES < 2, LANES, LANES - 2),
    "simd_shuffle_down(v, 2)": np.where(LANES > 29, LANES, LANES + 2),
    "simd_shuffle_rotate_up(v, 2)": (LANES - 2) % 32,
    "simd_shuffle_rotate_down(v, 2)": (LANES + 2) % 32,
    "simd_shuffle_and_fill_up(v, -v, 2)": np.where(
        LANES < 2, -((LANES - 2) % 32), LANES - 2
    ),
    "simd_shuffle_and_fill_down(v, -v, 3)": np.where(
        LANES < 29, LANES + 3, -((LANES + 3) % 32)
    ),
    "simd_shuffle_and_fill_up(v, v + 100, 3, 8)": np.where(
        LANES % 8 < 3, LANES + 5 + 100, LANES - 3
    ),
    "quad_shuffle_and_fill_down(v, -v, 1)": np.where(
        LANES % 4 == 3, -(LANES - 3), LANES + 1
    ),
    "quad_prefix_inclusive_sum(v)": QUADS.cumsum(1).reshape(-1),
    "quad_prefix_exclusive_product(v + 1)": QUAD_PRODUCTS.reshape(-1),
    "ushort(quad_ballot(lane % 4 > 1)) + 100 * quad_is_first()": np.where(
        LANES % 4 == 0, 112, 12
    ),
    "quad_active_threads_mask().all()": np.full(32, 1),
    "simd_broadcast(v, 7)": np.full(32, 7),
    "simd_broadcast_first(v + 3)": np.full(32, 3),
    "simd_sum(v)": np.full(32, 496),
    "simd_max(v) - simd_min(v + 1)": np.full(32, 30),
    "simd_product(lane < 2 ? 3.0f : 1.0f)": np.full(32, 9),
    "simd_or(lane) + simd_xor(lane) + simd_and(lane | 64)": np.full(32, 95),
    "simd_prefix_inclusive_sum(v)": np.cumsum(LANES),
    "simd_prefix_exclusive_sum(v)": np.cumsum(LANES) - LANES,
    "simd_any(lane == 3) + 2 * simd_all(lane < 31)": np.full(32, 1),
    "ulong(simd_ballot(lane < 4)) + simd_ballot(true).all()": np.full(32, 16),
    "simd_is_first()": LANES == 0,
    "quad_shuffle(v, 1)": LANES // 4 * 4 + 1,
    "quad_shuffle_xor(v, 2)": LANES ^ 2,
    "quad_broadcast(v, 3)": LANES // 4 * 4 + 3,
    "quad_sum(v)": np.repeat(np.arange(8) * 16 + 6, 4),
    "quad_shuffle_up(v, 1)": np.where(LANES % 4 < 1, LANES, LANES - 1),
    "simd_shuffle_xor(half4(lane, 1, 2, lane), 1).w": LANES ^ 1,
    "simd_shuffle_xor(uint4(lane), 1).z": LANES ^ 1,
}
LANE_VALUES = Values(
    (f"float({each})" for each in OF_LANES),
    before="uint lane = thread_index_in_simdgroup;\nfloat v = lane;",
    threads=64,
)


@pytest.mark.parametrize(("expression", "expected"), OF_LANES.items())
def test_lanes_see_each_other(expression: str, expected: np.ndarray) -> None:
    values = LANE_VALUES[f"float({expression})"]

    np.testing.assert_array_equal(values, np.tile(expected, 2))


def test_a_thousand_exchanges_do_not_mix_up() -> None:
    source = """
    uint lane = thread_index_in_simdgroup;
    uint v = thread_index_in_threadgroup;
    for (uint j = 0; j < 1000; ++j) {
      v = simd_shuffle(v, (lane * 7 + j) % 32) + simd_shuffle_xor(j * lane, 1);
    }
    out[thread_index_in_threadgroup] = v;
    """
    v = np.arange(96, dtype=np.uint32).reshape(3, 32)
    for j in range(1000):
        v = v[:, (LANES * 7 + j) % 32] + (j * (LANES ^ 1)).astype(np.uint32)

    out = run(source, grid=96, threadgroup=96, shape=(96,), dtype=mx.uint32)

    np.testing.assert_array_equal(out, v.ravel())


@pytest.mark.parametrize("threads", [1, 5, 31, 33, 40, 63])
def test_incomplete_simdgroups_work_with_the_lanes_that_exist(threads: int) -> None:
    source = """
    uint i = thread_index_in_threadgroup;
    out[i] = simd_sum(1.0f) + 100 * simd_shuffle_down(float(i), 1);
    """

    out = run(source, grid=threads, threadgroup=threads, shape=(threads,))

    lanes = np.arange(threads)
    size = np.minimum(32, threads - lanes // 32 * 32)
    following = np.where((lanes % 32) + 1 < size, lanes + 1, lanes)
    np.testing.assert_array_equal(out, size + 100 * following)


LAYOUT = """
METAL_FUNC uint2 place(uint lane) {
  uint quad = lane / 4;
  return uint2((quad & 4) + (lane / 2) % 4, (quad & 2) * 2 + (lane % 2) * 2);
}
template <typename T>
METAL_FUNC simdgroup_matrix<T, 8, 8> load(const device T* p, uint lane) {
  simdgroup_matrix<T, 8, 8> m;
  uint2 at = place(lane);
  m.thread_elements() = vec<T, 2>(p[8 * at.x + at.y], p[8 * at.x + at.y + 1]);
  return m;
}
"""


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("float16", "float16"),
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
    ],
)
def test_mixed_matrices_are_multiplied_in_float(left: str, right: str) -> None:
    source = """
    uint lane = thread_index_in_simdgroup;
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    simdgroup_matrix<L, 8, 8> x = load<L>(a, lane);
    simdgroup_matrix<R, 8, 8> y = load<R>(b, lane);
    simdgroup_multiply_accumulate(sum, x, y, sum);
    simdgroup_multiply_accumulate(sum, x, y, sum);
    uint2 at = place(lane);
    *(device float2*)(out + 8 * at.x + at.y) = sum.thread_elements();
    """
    random = np.random.default_rng(1)
    a = mx.array(random.standard_normal((8, 8), np.float32)).astype(getattr(mx, left))
    b = mx.array(random.standard_normal((8, 8), np.float32)).astype(getattr(mx, right))
    template = [("L", a.dtype), ("R", b.dtype)]

    out = run(source, a, b, shape=(8, 8), header=LAYOUT, template=template)

    x, y = (np.array(m.astype(mx.float32)) for m in (a, b))
    np.testing.assert_allclose(out, 1 + 2 * (x @ y), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("transpose", [False, True])
def test_matrices_are_loaded_and_stored_at_an_origin(transpose: bool) -> None:
    source = """
    threadgroup float tile[16 * 20];
    uint lane = thread_index_in_simdgroup;
    for (uint i = lane; i < 16 * 20; i += 32) { tile[i] = a[i]; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 m;
    simdgroup_load(m, tile, 20, ulong2(3, 5), TRANSPOSE);
    simdgroup_store(m, out, 8);
    """
    a = np.arange(320, dtype=np.float32)

    out = run(source, mx.array(a), shape=(8, 8), template=[("TRANSPOSE", transpose)])

    block = a.reshape(16, 20)[5:13, 3:11]
    np.testing.assert_array_equal(out, block.T if transpose else block)


def test_simdgroups_may_meet_at_one_barrier_from_different_lines() -> None:
    source = """
    threadgroup float hand[32];
    uint lane = thread_index_in_simdgroup;
    if (simdgroup_index_in_threadgroup == 0) {
      hand[lane] = a[lane];
      threadgroup_barrier(mem_flags::mem_threadgroup);
    } else {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      out[lane] = 2 * hand[lane];
    }
    """

    out = run(source, FLOATS, grid=64, threadgroup=64)

    np.testing.assert_array_equal(out, 2 * LANES)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "float32"])
def test_atomics_of_all_threads_arrive(dtype: str) -> None:
    source = """
    atomic_fetch_add_explicit(&out[0], T(1), memory_order_relaxed);
    atomic_fetch_max_explicit(&out[1], T(thread_position_in_grid.x),
                              memory_order_relaxed);
    T seen = atomic_load_explicit(&out[2], memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(
        &out[2], &seen, seen + T(2), memory_order_relaxed, memory_order_relaxed)) {}
    """
    kind = getattr(mx, dtype)

    with emulated(workers=4):
        out = run(
            source,
            shape=(3,),
            dtype=kind,
            grid=100_000,
            threadgroup=256,
            atomic_outputs=True,
            init_value=0,
            template=[("T", kind)],
        )

    assert out.tolist() == [100_000, 99_999, 200_000]


def test_the_order_of_threadgroups_follows_the_seed() -> None:
    source = """
    int turn = atomic_fetch_add_explicit(&out[0], 1, memory_order_relaxed);
    atomic_store_explicit(&out[turn + 1], int(threadgroup_position_in_grid.x),
                          memory_order_relaxed);
    """

    def order(seed: int) -> list[int]:
        with emulated(seed=seed, workers=1):
            out = run(
                source,
                shape=(65,),
                dtype=mx.int32,
                grid=64,
                threadgroup=1,
                atomic_outputs=True,
                init_value=0,
            )
        return out[1:].tolist()

    assert sorted(order(0)) == sorted(order(1)) == list(range(64))
    assert order(0) == order(0) != order(1)


def test_simd_sum_adds_lanes_in_ascending_order() -> None:
    values = np.random.default_rng(3).standard_normal(32).astype(np.float32)

    out = each_thread("simd_sum(a[i])", mx.array(values))

    expected = np.float32(0)
    for value in values:
        expected += value
    assert (out == expected).all()


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
