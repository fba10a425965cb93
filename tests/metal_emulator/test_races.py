"""Trace mode reports every planted race, and no correct hand-over."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from metal_emulator import EmulatorError, emulated
from support.marks import needs_emulator
from support.metal_sources import FLOATS, run
from support.profiles import drawn
from support.trace_mode import report, traced

pytestmark = needs_emulator

HAND_OVER = """
threadgroup float tile[64];
uint i = thread_index_in_threadgroup;
tile[i] = a[i];
BARRIER
out[i] = tile[i ^ OTHER];
"""


def hand_over(barrier: str, other: int) -> str:
    return HAND_OVER.replace("BARRIER", barrier).replace("OTHER", str(other))


THREADGROUP_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMDGROUP_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
BOTH = "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);"


@pytest.mark.parametrize(
    ("barrier", "other"),
    [(THREADGROUP_BARRIER, 33), (BOTH, 33), (SIMDGROUP_BARRIER, 1)],
)
def test_a_barrier_orders_threadgroup_memory(barrier: str, other: int) -> None:
    source = hand_over(barrier, other)

    out = traced(source, FLOATS, grid=64, threadgroup=64, shape=(64,))

    np.testing.assert_array_equal(out, np.arange(64) ^ other)


@pytest.mark.parametrize(
    ("barrier", "other"),
    [
        ("threadgroup_barrier(mem_flags::mem_none);", 1),
        ("threadgroup_barrier(mem_flags::mem_device);", 1),
        ("simdgroup_barrier(mem_flags::mem_device);", 1),
        ("float any = simd_sum(1.0f);", 1),
    ],
)
def test_what_orders_nothing_lets_lanes_race(barrier: str, other: int) -> None:
    source = hand_over(barrier, other)

    message = report(source, FLOATS, grid=64, threadgroup=64, shape=(64,))

    assert "race between threads on byte" in message
    assert "of threadgroup variable 'tile': read after write" in message
    assert f"at source line 6: out[i] = tile[i ^ {other}];" in message
    assert "at source line 4: tile[i] = a[i];" in message


def test_a_race_names_both_threads_and_both_lines() -> None:
    source = hand_over("threadgroup_barrier(mem_flags::mem_none);", 1)

    message = report(source, FLOATS, shape=(64,))

    assert message == (
        "kernel bug: race between threads on byte 120 of threadgroup variable 'tile': "
        "read after write\n"
        "  in threadgroup (0, 0, 0), thread (31, 0, 0), simdgroup 0 lane 31\n"
        "  at source line 6: out[i] = tile[i ^ 1];\n"
        "  earlier write in threadgroup (0, 0, 0), thread (30, 0, 0), simdgroup 0 "
        "lane 30\n"
        "  at source line 4: tile[i] = a[i];"
    )


def test_a_simdgroup_barrier_does_not_order_simdgroups() -> None:
    source = hand_over("simdgroup_barrier(mem_flags::mem_threadgroup);", 32)
    # Both simdgroups have written when either reads.
    source = source.replace(
        "simdgroup_b", "threadgroup_barrier(mem_flags::mem_none);\nsimdgroup_b"
    )

    message = report(source, FLOATS, grid=64, threadgroup=64, shape=(64,))

    assert "race between threads" in message
    assert "source line 7" in message


REUSED = """
threadgroup float tile[64];
uint i = thread_index_in_threadgroup;
float sum = 0;
for (uint round = 0; round < 2; ++round) {
  tile[i] = a[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sum += tile[i ^ 32];
  BARRIER
}
out[i] = sum;
"""


def test_memory_used_again_needs_a_second_barrier() -> None:
    options = {"grid": 64, "threadgroup": 64, "shape": (64,)}
    out = traced(REUSED.replace("BARRIER", THREADGROUP_BARRIER), FLOATS, **options)
    np.testing.assert_array_equal(out, 2 * (np.arange(64) ^ 32))

    message = report(REUSED.replace("BARRIER", ""), FLOATS, **options)

    assert "of threadgroup variable 'tile'" in message
    assert "at source line 6: tile[i] = a[i];" in message
    assert "at source line 8: sum += tile[i ^ 32];" in message


DEVICE = """
uint i = thread_position_in_grid.x;
out[i] = a[i];
BARRIER
out[i + 64] = out[i ^ 1];
"""


def test_device_memory_needs_its_own_flag() -> None:
    options = {"shape": (128,), "grid": 64, "threadgroup": 64}
    good = DEVICE.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_device);")
    traced(good, FLOATS, **options)

    message = report(DEVICE.replace("BARRIER", THREADGROUP_BARRIER), FLOATS, **options)

    assert "race between threads on byte" in message
    assert "of buffer 'out': read after write" in message
    assert "at source line 5: out[i + 64] = out[i ^ 1];" in message
    assert "at source line 3: out[i] = a[i];" in message


@pytest.mark.parametrize("workers", [1, 2])
def test_threadgroups_that_write_the_same_byte_race(workers: int) -> None:
    source = "uint i = thread_index_in_threadgroup;\nout[i] = a[i];"

    with emulated(workers=workers):
        message = report(source, FLOATS, grid=64)

    assert "race between threadgroups on byte" in message
    assert "of buffer 'out': write after write" in message
    assert message.count("at source line 2: out[i] = a[i];") == 2
    assert "threadgroup (0, 0, 0)" in message
    assert "threadgroup (1, 0, 0)" in message


def test_no_barrier_orders_threadgroups() -> None:
    source = """
    uint i = thread_position_in_grid.x;
    out[i] = a[i];
    threadgroup_barrier(mem_flags::mem_device);
    if (i >= 32) { out[i] = out[i - 32]; }
    """

    with emulated(workers=1, seed=3):
        message = report(source, FLOATS, grid=64, shape=(64,), init_value=0)

    assert "race between threadgroups" in message


@drawn(
    6,
    15,
    size=st.sampled_from([2, 3, 4]),
    step=st.integers(1, 6),
    seed=st.integers(0, 9),
)
def test_only_bytes_that_overlap_race(size: int, step: int, seed: int) -> None:
    source = f"""
    device uchar* bytes = out + {step} * thread_position_in_grid.x;
    *(device packed_uchar{size}*)bytes = packed_uchar{size}(uchar{size}(7));
    """
    options = {"grid": 64, "shape": (64 * step + 8,), "dtype": mx.uint8}
    options["init_value"] = 0  # nobody writes the gaps

    with emulated(seed=seed):
        if step >= size:
            traced(source, **options)
        else:
            assert "write after write" in report(source, **options)


@pytest.mark.parametrize("space", ["device", "threadgroup"])
def test_lanes_may_store_one_value_together_but_not_two(space: str) -> None:
    target = {"device": "out[0]", "threadgroup": "tile[3]"}[space]
    source = f"threadgroup float tile[8];\n{target} = VALUE;"

    traced(source.replace("VALUE", "7"), init_value=0)
    message = report(source.replace("VALUE", "thread_index_in_simdgroup == 31"))

    assert "write after write" in message
    assert "thread (31, 0, 0)" in message
    assert f"at source line 2: {target} =" in message


def test_simdgroups_may_not_store_one_value_together() -> None:
    message = report("out[0] = 7;", grid=64, threadgroup=64)

    assert "write after write" in message
    assert "simdgroup 0" in message
    assert "simdgroup 1" in message


def test_lanes_may_not_store_what_another_lane_reads() -> None:
    source = "if (out[0] < 2) { out[0] = 1; }"

    message = report(source, init_value=0)

    assert "race between threads on byte 0 of buffer 'out'" in message


@pytest.mark.parametrize("threadgroup", [32, 64])
@pytest.mark.parametrize("seed", range(6))
def test_a_reader_is_remembered_when_the_writer_reads_too(
    threadgroup: int, seed: int
) -> None:
    source = """
    uint i = thread_position_in_grid.x;
    if (i == 0) { out[1] = out[0]; }
    if (i == 32) { out[2] = out[0]; }
    if (i == 32) { out[0] = 5; }
    """

    with emulated(seed=seed, workers=1):
        message = report(source, grid=64, threadgroup=threadgroup, init_value=0)

    assert "on byte 0 of buffer 'out'" in message
    assert "source line 3: if (i == 0) { out[1] = out[0]; }" in message
    assert "source line 5: if (i == 32) { out[0] = 5; }" in message


def test_reads_of_what_nobody_wrote_are_reported() -> None:
    source = """
    threadgroup float tile[32];
    uint i = thread_index_in_threadgroup;
    if (i != 5) { tile[i] = 1; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = tile[i];
    """

    message = report(source)

    assert message == (
        "kernel bug: read of a value that was never written, byte 20 of threadgroup "
        "variable 'tile'\n"
        "  in threadgroup (0, 0, 0), thread (5, 0, 0), simdgroup 0 lane 5\n"
        "  at source line 6: out[i] = tile[i];"
    )


def test_threadgroup_memory_is_new_in_every_threadgroup() -> None:
    source = """
    threadgroup float tile[32];
    uint i = thread_index_in_threadgroup;
    if (threadgroup_position_in_grid.x == 0) { tile[i] = 1; }
    out[thread_position_in_grid.x] = tile[i];
    """

    with emulated(workers=1):
        message = report(source, grid=1024, shape=(1024,))

    assert "of threadgroup variable 'tile'" in message
    assert "never written" in message


def test_outputs_have_values_only_from_init_value() -> None:
    source = "uint i = thread_position_in_grid.x;\nout[i] += 1;"

    assert (traced(source, init_value=2) == 3).all()

    assert "byte 0 of buffer 'out'" in report(source)


@pytest.mark.parametrize(("index", "byte"), [(-1, -4), (9, 36)])
def test_device_bounds_are_exact(index: int, byte: int) -> None:
    a = mx.arange(9).astype(mx.float32)

    read = report(f"out[0] = a[{index}];", a, grid=1)
    write = report(f"out[{index}] = 1;", shape=(9,), grid=1)

    assert f"read outside buffer 'a' (36 bytes), at byte {byte}" in read
    assert f"write outside buffer 'out' (36 bytes), at byte {byte}" in write
    assert f"at source line 1: out[{index}] = 1;" in write


@pytest.mark.parametrize(("index", "byte"), [(-1, -4), (30, 120)])
def test_threadgroup_bounds_are_exact(index: int, byte: int) -> None:
    source = f"""
    threadgroup float tile[30];
    threadgroup float* flat = tile;
    flat[{index} + int(thread_index_in_simdgroup)] = 1;
    """

    message = report(source, grid=1)

    assert (
        f"write outside threadgroup variable 'tile' (120 bytes), at byte {byte}"
        in message
    )
    assert "at source line 4: flat[" in message


def test_a_wide_access_across_the_end_is_reported() -> None:
    a = mx.arange(18).astype(mx.uint16)

    message = report(
        "packed_ushort4 v = *(const device packed_ushort4*)(a + 15);\n"
        "out[0] = v[0] + v[3];",
        a,
        grid=1,
    )

    assert "read outside buffer 'a' (36 bytes), at byte 36" in message


def test_simdgroups_at_different_barriers_are_reported() -> None:
    source = """
    if (simdgroup_index_in_threadgroup == 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    } else {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    """

    message = report(source, grid=64, threadgroup=64)

    assert "simdgroups wait at different barriers, others at source line 3" in message
    assert "at source line 5: threadgroup_barrier" in message


def test_atomics_do_not_race_with_atomics() -> None:
    source = "atomic_fetch_add_explicit(out, 1u, memory_order_relaxed);"

    out = traced(
        source, grid=256, shape=(8,), dtype=mx.uint32, atomic_outputs=True, init_value=0
    )

    assert out[0] == 256


def test_an_atomic_races_with_a_plain_write() -> None:
    source = """
    if (thread_position_in_grid.x == 0) { ((device uint*)out)[0] = 1; }
    atomic_fetch_add_explicit(out, 1u, memory_order_relaxed);
    """

    message = report(
        source, shape=(8,), dtype=mx.uint32, atomic_outputs=True, init_value=0
    )

    assert "race between threads on byte 0 of buffer 'out'" in message
    assert "source line 2" in message
    assert "source line 3" in message


def test_lines_of_helpers_are_named_with_their_callers() -> None:
    header = "void put(device float* p, float v) {\n  p[0] = v;\n}\n"

    source = "\nput(out, a[thread_index_in_simdgroup]);"
    message = report(source, FLOATS, header=header)

    assert message.count("at header line 2: p[0] = v;") == 2
    assert message.count("at source line 2: put(out, a[") == 2


def test_more_accesses_than_a_log_holds_are_checked_and_right() -> None:
    source = """
    uint i = thread_position_in_grid.x;
    float sum = 0;
    for (uint j = 0; j < 9000 + 100 * i; ++j) { sum += a[(i + j) % 64]; }
    out[i] = simd_sum(sum);
    """
    counts = np.zeros(64)
    for i in range(32):
        np.add.at(counts, (i + np.arange(9000 + 100 * i)) % 64, 1)

    out = traced(source, mx.ones(64))

    assert (out == counts.sum()).all()


def test_a_lane_may_fill_its_log_when_all_others_have_returned() -> None:
    header = """
    __attribute__((noinline)) float sum(const device float* a, int depth) {
      if (depth > 0) { return sum(a, depth - 1) + a[depth]; }
      float total = 0;
      for (uint j = 0; j < 9000; ++j) { total += a[j % 64]; }
      return total;
    }
    """
    source = """
    if (thread_index_in_simdgroup > 0) { return; }
    out[0] = sum(a, 1) + sum(a, 9) + sum(a, 1);
    """

    out = traced(source, mx.ones(64), header=header, init_value=0)

    assert out[0] == 3 * 9000 + 11


def test_what_surrounds_a_block_decides_unless_it_says_so() -> None:
    source = "uint i = thread_position_in_grid.x;\nout[i / 2] = i;"
    with emulated(trace=True), emulated(seed=1), pytest.raises(EmulatorError):
        run(source)

    with emulated(trace=True), emulated(trace=False):
        run(source)
