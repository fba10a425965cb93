"""Trace mode reports every planted race, and no correct hand-over."""

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from metal_emulator import EmulatorError, emulated
from support.marks import needs_emulator
from support.metal_sources import FLOATS, run
from support.profiles import drawn, sampled
from support.trace_mode import report, traced

pytestmark = needs_emulator

BARRIERS = {
    "threadgroup": "threadgroup_barrier(mem_flags::mem_threadgroup);",
    "both": "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);",
    "simdgroup": "simdgroup_barrier(mem_flags::mem_threadgroup);",
    "none": "threadgroup_barrier(mem_flags::mem_none);",
    "device": "threadgroup_barrier(mem_flags::mem_device);",
    "simdgroup, device": "simdgroup_barrier(mem_flags::mem_device);",
    "simd_sum": "float any = simd_sum(1.0f);",
}
HAND_OVER = "\n".join(
    [
        "threadgroup float tile[64];",
        "uint i = thread_index_in_threadgroup;",
        "tile[i] = a[i];",
        *(f"if (b[0] == {j}) {{ {each} }}" for j, each in enumerate(BARRIERS.values())),
        "out[i] = tile[i ^ b[1]];",
    ]
)
WROTE = "at source line 3: tile[i] = a[i];"
READ = "at source line 11: out[i] = tile[i ^ b[1]];"


def hand_over(barrier: str, other: int) -> tuple[str, mx.array, mx.array]:
    """Returns a kernel that has every barrier, and inputs that choose one of them."""
    return HAND_OVER, FLOATS, mx.array([[*BARRIERS].index(barrier), other])


@pytest.mark.parametrize(
    ("barrier", "other"), [("threadgroup", 33), ("both", 33), ("simdgroup", 1)]
)
def test_a_barrier_orders_threadgroup_memory(barrier: str, other: int) -> None:
    out = traced(*hand_over(barrier, other), grid=64, threadgroup=64, shape=(64,))

    np.testing.assert_array_equal(out, np.arange(64) ^ other)
    plain = run(*hand_over(barrier, other), grid=64, threadgroup=64, shape=(64,))
    np.testing.assert_array_equal(plain, out)


@pytest.mark.parametrize("barrier", ["none", "device", "simdgroup, device", "simd_sum"])
def test_what_orders_nothing_lets_lanes_race(barrier: str) -> None:
    message = report(*hand_over(barrier, 1), grid=64, threadgroup=64, shape=(64,))

    assert "race between threads on byte" in message
    assert "of threadgroup variable 'tile': read after write" in message
    assert READ in message
    assert WROTE in message


def test_a_race_names_both_threads_and_both_lines() -> None:
    message = report(*hand_over("none", 1), shape=(64,))

    assert message == (
        "kernel bug: race between threads on byte 120 of threadgroup variable 'tile': "
        "read after write\n"
        "  in threadgroup (0, 0, 0), thread (31, 0, 0), simdgroup 0 lane 31\n"
        f"  {READ}\n"
        "  earlier write in threadgroup (0, 0, 0), thread (30, 0, 0), simdgroup 0 "
        "lane 30\n"
        f"  {WROTE}"
    )


def test_a_simdgroup_barrier_does_not_order_simdgroups() -> None:
    source, *inputs = hand_over("simdgroup", 32)
    # Both simdgroups have written when either reads.
    met = source.replace("\nif", f"\n{BARRIERS['none']}\nif", 1)

    message = report(met, *inputs, grid=64, threadgroup=64, shape=(64,))

    assert "race between threads" in message
    assert "source line 12" in message


def test_memory_used_again_needs_a_second_barrier() -> None:
    source = """
    threadgroup float tile[64];
    uint i = thread_index_in_threadgroup;
    float sum = 0;
    for (uint round = 0; round < 2; ++round) {
      tile[i] = a[i];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      sum += tile[i ^ 32];
      if (b) { threadgroup_barrier(mem_flags::mem_threadgroup); }
    }
    out[i] = sum;
    """
    options = {"grid": 64, "threadgroup": 64, "shape": (64,)}

    out = traced(source, FLOATS, True, **options)
    message = report(source, FLOATS, False, **options)

    np.testing.assert_array_equal(out, 2 * (np.arange(64) ^ 32))
    assert "of threadgroup variable 'tile'" in message
    assert "at source line 6: tile[i] = a[i];" in message
    assert "at source line 8: sum += tile[i ^ 32];" in message


def test_device_memory_needs_its_own_flag() -> None:
    source = """
    uint i = thread_position_in_grid.x;
    out[i] = a[i];
    if (b) { threadgroup_barrier(mem_flags::mem_device); }
    else { threadgroup_barrier(mem_flags::mem_threadgroup); }
    out[i + 64] = out[i ^ 1];
    """
    options = {"shape": (128,), "grid": 64, "threadgroup": 64}

    traced(source, FLOATS, True, **options)
    message = report(source, FLOATS, False, **options)

    assert "race between threads on byte" in message
    assert "of buffer 'out': read after write" in message
    assert "at source line 6: out[i + 64] = out[i ^ 1];" in message
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


@drawn(
    6,
    size=st.sampled_from([2, 3, 4]),
    step=st.integers(1, 6),
    seed=st.integers(0, 9),
)
def test_only_bytes_that_overlap_race(size: int, step: int, seed: int) -> None:
    source = f"""
    device uchar* bytes = out + a * thread_position_in_grid.x;
    *(device packed_uchar{size}*)bytes = packed_uchar{size}(uchar{size}(7));
    """
    options = {"grid": 64, "shape": (64 * step + 8,), "dtype": mx.uint8}
    options["init_value"] = 0  # nobody writes the gaps

    with emulated(seed=seed):
        if step >= size:
            traced(source, step, **options)
        else:
            assert "write after write" in report(source, step, **options)


@pytest.mark.parametrize("space", ["device", "threadgroup"])
def test_lanes_may_store_one_value_together_but_not_two(space: str) -> None:
    target = {"device": "out[0]", "threadgroup": "tile[3]"}[space]
    source = f"threadgroup float tile[8];\n{target} = VALUE;"

    traced(source.replace("VALUE", "7"), init_value=0)
    message = report(source.replace("VALUE", "thread_index_in_simdgroup == 31"))

    assert "write after write" in message
    assert "thread (31, 0, 0)" in message
    assert f"at source line 2: {target} =" in message


def test_one_store_that_the_compiler_copied_is_one() -> None:
    source = """
    uint lane = thread_index_in_simdgroup;
    bool first = lane < 16;
    if (first) { out[lane + 1] = 5; }
    out[0] = VALUE;
    if (first) { out[lane + 1] += 5; } else { out[lane + 1] = 1; }
    """

    out = traced(source.replace("VALUE", "7"), shape=(33,))
    message = report(source.replace("VALUE", "lane"), shape=(33,))

    np.testing.assert_array_equal(out, [7] + [10] * 16 + [1] * 16)
    assert "write after write" in message


@pytest.mark.parametrize("threadgroup", [32, 64])
@pytest.mark.parametrize("seed", range(6))
@sampled(6)
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


UPDATES = (
    "atomic_fetch_add_explicit(p, 1u, memory_order_relaxed);",
    "atomic_fetch_max_explicit(p, 1u, memory_order_relaxed);",
    "atomic_exchange_explicit(p, 1u, memory_order_relaxed);",
    "uint seen = 0; atomic_compare_exchange_weak_explicit(p, &seen, 1u, "
    "memory_order_relaxed, memory_order_relaxed);",
)


@pytest.mark.parametrize(
    ("memory", "name"),
    [("threadgroup", "threadgroup variable 'sum'"), ("device", "buffer 'out'")],
)
@pytest.mark.parametrize("update", UPDATES)
def test_an_atomic_update_reads_what_it_changes(
    update: str, memory: str, name: str
) -> None:
    """All in one kernel, so that one compile serves all cases."""
    chosen = UPDATES.index(update) + (len(UPDATES) if memory == "device" else 0)
    places = ("&sum", "(device atomic_uint*)out")
    steps = (
        f"if (a % 100 == {number}) {{ auto p = {place}; {each} }}"
        for number, (place, each) in enumerate(itertools.product(places, UPDATES))
    )
    store = "if (a >= 100 && i == 0) {{ auto p = {}; atomic_store_explicit(p, 0u, "
    store += "memory_order_relaxed); }}"
    source = "\n".join(
        [
            "threadgroup atomic_uint sum; uint i = thread_index_in_threadgroup;",
            *map(store.format, places),
            "threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);",
            *steps,
        ]
    )

    message = report(source, chosen, shape=(1,), dtype=mx.uint32)
    traced(source, chosen + 100, shape=(1,), dtype=mx.uint32)

    assert f"read of a value that was never written, byte 0 of {name}" in message
    assert f"at source line {5 + chosen}: " in message


def test_outputs_have_values_only_from_init_value() -> None:
    source = "uint i = thread_position_in_grid.x;\nout[i] += 1;"

    assert (traced(source, init_value=2) == 3).all()

    assert "byte 0 of buffer 'out'" in report(source)


@pytest.mark.parametrize(("index", "byte"), [(-1, -4), (9, 36)])
def test_device_bounds_are_exact(index: int, byte: int) -> None:
    a = mx.arange(9).astype(mx.float32)

    read = report("out[0] = a[b];", a, index, grid=1)
    write = report("out[a] = 1;", index, shape=(9,), grid=1)

    assert f"read outside buffer 'a' (36 bytes), at byte {byte}" in read
    assert f"write outside buffer 'out' (36 bytes), at byte {byte}" in write
    assert "at source line 1: out[a] = 1;" in write


@pytest.mark.parametrize(("index", "byte"), [(-1, -4), (30, 120)])
def test_threadgroup_bounds_are_exact(index: int, byte: int) -> None:
    source = """
    threadgroup float tile[30];
    threadgroup float* flat = tile;
    flat[a + int(thread_index_in_simdgroup)] = 1;
    """

    message = report(source, index, grid=1)

    assert (
        f"write outside threadgroup variable 'tile' (120 bytes), at byte {byte}"
        in message
    )
    assert "at source line 4: flat[" in message


def test_atomics_do_not_race_with_atomics() -> None:
    source = "atomic_fetch_add_explicit(out, 1u, memory_order_relaxed);"

    out = traced(
        source, grid=256, shape=(8,), dtype=mx.uint32, atomic_outputs=True, init_value=0
    )

    assert out[0] == 256


HEADER = "void put(device float* p, float v) {\n  p[0] = v;\n}\n"
REPORTS: dict[str, tuple[str, dict[str, Any], Sequence[str]]] = {
    "no barrier orders threadgroups": (
        "uint i = thread_position_in_grid.x; out[i] = 1;\n"
        "threadgroup_barrier(mem_flags::mem_device);\n"
        "if (i >= 32) { out[i] = out[i - 32]; }",
        {"grid": 64, "shape": (64,), "init_value": 0},
        ["race between threadgroups"],
    ),
    "simdgroups may not store one value together": (
        "out[0] = 7;",
        {"grid": 64, "threadgroup": 64},
        ["write after write", "simdgroup 0", "simdgroup 1"],
    ),
    "an atomic update is a write": (
        "auto p = (device atomic_uint*)out; uint lane = thread_index_in_simdgroup;\n"
        "if (lane == 5) { atomic_fetch_add_explicit(p, 1u, memory_order_relaxed); }\n"
        "if (lane == 6) { out[1] = out[0]; }",
        {"init_value": 0},
        ["race between threads on byte 0 of buffer 'out': read after write", "lane 6"],
    ),
    "lanes may not store what another lane reads": (
        "if (out[0] < 2) { out[0] = 1; }",
        {"init_value": 0},
        ["race between threads on byte 0 of buffer 'out'"],
    ),
    "threadgroup memory is new in every threadgroup": (
        "threadgroup float tile[32]; uint i = thread_index_in_threadgroup;\n"
        "if (threadgroup_position_in_grid.x == 0) { tile[i] = 1; }\n"
        "out[thread_position_in_grid.x] = tile[i];",
        {"grid": 1024, "shape": (1024,)},
        ["never written", "of threadgroup variable 'tile'"],
    ),
    "a wide access across the end": (
        "const device ushort* a = (const device ushort*)out;\n"
        "packed_ushort4 v = *(const device packed_ushort4*)(a + 15);\n"
        "out[0] = v[0] + v[3];",
        {"grid": 1, "shape": (9,), "init_value": 0},
        ["read outside buffer 'out' (36 bytes), at byte 36"],
    ),
    "simdgroups at different barriers": (
        "if (simdgroup_index_in_threadgroup == 0) {\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup); } else {\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup); }",
        {"grid": 64, "threadgroup": 64},
        [
            "simdgroups wait at different barriers, others at source line 2",
            "at source line 3: threadgroup_barrier",
        ],
    ),
    "an atomic races with a plain write": (
        "if (thread_position_in_grid.x == 0) { ((device uint*)out)[0] = 1; }\n"
        "atomic_fetch_add_explicit(out, 1u, memory_order_relaxed);",
        {"shape": (8,), "dtype": mx.uint32, "atomic_outputs": True, "init_value": 0},
        ["race between threads on byte 0 of buffer 'out'", "line 1", "line 2"],
    ),
    "lines of helpers are named with their callers": (
        "\nput(out, thread_index_in_simdgroup);",
        {"header": HEADER},
        ["at header line 2: p[0] = v;", "at source line 2: put(out, thread_index"],
    ),
}
"""Kernels, options of the call, and what is said."""


@pytest.mark.parametrize(("source", "options", "words"), REPORTS.values(), ids=REPORTS)
def test_what_trace_mode_finds_is_told(
    source: str, options: dict[str, Any], words: Sequence[str]
) -> None:
    with emulated(workers=1, seed=3):
        message = report(source, **options)

    assert [each for each in words if each not in message] == []
    if "header" in options:  # both stores are told so
        assert [message.count(each) for each in words] == [2, 2]


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
