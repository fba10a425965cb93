"""Threads that wait for each other: deadlocks, fences and atomics."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import metal_emulator
from metal_emulator import EmulatorError, emulated
from support.marks import needs_emulator
from support.metal_sources import run
from support.profiles import sampled
from support.trace_mode import report, traced

pytestmark = needs_emulator

GROUPS = 8
ATOMICS = "device atomic_uint* flags = (device atomic_uint*)out;\n"
LOAD = "atomic_load_explicit(&flags[0], memory_order_relaxed)"
CHAIN = (
    ATOMICS
    + """
uint group = threadgroup_position_in_grid.x;
if (thread_index_in_threadgroup == 0) {
  uint turn = threadgroups_per_grid.x - 1 - group;
  while (atomic_load_explicit(&flags[0], memory_order_relaxed) != turn) {}
  atomic_fetch_add_explicit(&flags[0], 1u, memory_order_relaxed);
}
"""
)
"""Every threadgroup waits for the one behind it."""
RING = (
    ATOMICS
    + f"""
if (thread_index_in_threadgroup == 0) {{
  atomic_fetch_add_explicit(&flags[0], 1u, memory_order_relaxed);
  while ({LOAD} != threadgroups_per_grid.x) {{}}
}}
"""
)
"""Every threadgroup waits for all others: fewer than all never end."""
ENDLESS = "volatile float x = 0;\nwhile (true) { x = x + 1; }"
MODES = pytest.mark.parametrize("trace", [False, True])


def waits(source: str, groups: int = GROUPS, threads: int = 32) -> mx.array:
    """The output of a kernel that begins with zeros, as integers."""
    out = run(
        source, grid=threads * groups, threadgroup=threads, name="bug", init_value=0
    )
    return mx.array(out).view(mx.uint32)


@sampled(2)
@MODES
@pytest.mark.parametrize("workers", [1, 3])
def test_waiting_for_a_threadgroup_that_does_not_run_is_reported(
    workers: int, trace: bool
) -> None:
    with (
        emulated(workers=workers, trace=trace),
        pytest.raises(EmulatorError, match="kernel bug: livelock") as caught,
    ):
        waits(CHAIN)

    message = str(caught.value)
    assert "thread (0, 0, 0), simdgroup 0 lane 0" in message
    assert "at source line 6: while (atomic_load_explicit(&flags[0]" in message


@sampled(3)
@MODES
@pytest.mark.parametrize("seed", range(3))
def test_threadgroups_that_are_resident_may_wait_for_each_other(
    seed: int, trace: bool
) -> None:
    with emulated(workers=1, resident=GROUPS, seed=seed, trace=trace):
        assert waits(CHAIN)[0] == GROUPS


def test_one_resident_threadgroup_too_few_is_a_livelock() -> None:
    with (
        emulated(workers=1, resident=GROUPS - 1),
        pytest.raises(EmulatorError, match="livelock"),
    ):
        waits(RING)


def test_trace_takes_residents_too() -> None:
    with emulated(workers=1):
        (counted,) = metal_emulator.trace(waits, CHAIN, resident=GROUPS)

    assert counted.threadgroups == GROUPS


@MODES
def test_a_spin_lock_passes_with_residents(trace: bool) -> None:
    source = (
        ATOMICS
        + """
    if (thread_index_in_threadgroup == 0) {
      while (atomic_exchange_explicit(&flags[0], 1u, memory_order_relaxed) != 0u) {}
      atomic_thread_fence(mem_flags::mem_device, memory_order_acquire);
      out[1] = out[1] + 1;
      atomic_thread_fence(mem_flags::mem_device, memory_order_release);
      atomic_store_explicit(&flags[0], 0u, memory_order_relaxed);
    }
    """
    )

    with emulated(workers=2, resident=4, trace=trace):
        out = waits(source, groups=64)

    assert out.view(mx.float32)[1] == 64


def test_simdgroups_of_a_threadgroup_may_wait_for_each_other() -> None:
    source = """
    threadgroup atomic_uint flag;
    uint i = thread_index_in_threadgroup;
    if (i == 0) { atomic_store_explicit(&flag, 0u, memory_order_relaxed); }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i < 32) {
      while (atomic_load_explicit(&flag, memory_order_relaxed) != 32u) {}
    } else {
      atomic_fetch_add_explicit(&flag, 1u, memory_order_relaxed);
    }
    out[i % 32] = i;
    """

    out = run(source, grid=64, threadgroup=64, shape=(32,))

    assert out.tolist()[31] in (31, 63)


def test_a_loop_that_reads_an_atomic_often_is_no_livelock() -> None:
    source = (
        ATOMICS
        + f"uint sum = 0;\nfor (int i = 0; i < 100000; ++i) {{ sum += {LOAD}; }}\n"
        + "out[thread_position_in_grid.x + 8] = float(sum + 1);"
    )

    out = run(source, grid=8, threadgroup=8, shape=(16,), init_value=0)

    assert out.tolist()[8:] == [1] * 8


@sampled(3)
@MODES
@pytest.mark.parametrize(
    "loop",
    [
        "while (true) { threadgroup_barrier(mem_flags::mem_device); }",
        f"while ({LOAD} == 0u) {{ simdgroup_barrier(mem_flags::mem_device); }}",
        ENDLESS,
        "while (true) {}",
        "for (uint i = 0; out[8] == 0; ++i) {}",
    ],
)
def test_a_loop_without_an_end_meets_the_time_limit(loop: str, trace: bool) -> None:
    with (
        emulated(time_limit=0.3, trace=trace),
        pytest.raises(EmulatorError, match="exceeds the time limit") as caught,
    ):
        waits(f"{ATOMICS}{loop}")

    assert "in threadgroup (" in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [("resident", 0), ("resident", 257), ("workers", 0), ("time_limit", 0.0)],
)
def test_wrong_options_are_named(option: str, value: float) -> None:
    with (
        pytest.raises(ValueError, match=f"{option}={value}"),
        emulated(**{option: value}),
    ):
        pass


LAST_GROUP = """
uint i = thread_index_in_threadgroup;
uint groups = threadgroups_per_grid.x;
device atomic_uint* arrived = (device atomic_uint*)out;
device uint* partial = out + 32;
threadgroup bool last;
partial[32 * threadgroup_position_in_grid.x + i] = i;
threadgroup_barrier(mem_flags::mem_device);
if (i == 0) {
  atomic_thread_fence(mem_flags::mem_device, memory_order_release);
  uint before = atomic_fetch_add_explicit(arrived, 1u, memory_order_relaxed);
  atomic_thread_fence(mem_flags::mem_device, memory_order_acquire);
  last = before == groups - 1;
}
threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
if (last) {
  uint sum = 0;
  for (uint group = 0; group < groups; ++group) { sum += partial[32 * group + i]; }
  partial[i] = sum;
}
"""
LAST = {"grid": 32 * 40, "shape": (32 * 41,), "dtype": mx.uint32, "init_value": 0}


@given(seed=st.integers(0, 99), workers=st.integers(1, 3))
@settings(max_examples=10)
def test_a_hand_over_by_fences_and_an_atomic_is_clean(seed: int, workers: int) -> None:
    with emulated(seed=seed, workers=workers):
        out = traced(LAST_GROUP, **LAST)

    np.testing.assert_array_equal(out[32:64], 40 * np.arange(32))


@sampled(8)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("atomic_thread_fence(mem_flags::mem_device, memory_order_release);", ""),
        ("atomic_thread_fence(mem_flags::mem_device, memory_order_acquire);", ""),
        ("memory_order_release)", "memory_order_relaxed)"),
        ("memory_order_acquire)", "memory_order_release)"),
        ("mem_device, memory_order_release", "mem_threadgroup, memory_order_release"),
        ("_release);", "_release, thread_scope_threadgroup);"),
        ("_acquire);", "_acquire, thread_scope_threadgroup);"),
        ("threadgroup_barrier(mem_flags::mem_device);", ""),
        ("threadgroup_barrier(mem_flags::mem_device | ", "threadgroup_barrier("),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_hand_over_that_lacks_something_races(
    before: str, after: str, workers: int
) -> None:
    assert LAST_GROUP.count(before) == 1

    with emulated(workers=workers):
        message = report(LAST_GROUP.replace(before, after), **LAST)

    assert "race between thread" in message
    assert "of buffer 'out'" in message
    assert "partial[32 * threadgroup_position_in_grid.x + i] = i;" in message


def test_what_is_written_behind_the_release_is_not_handed_over() -> None:
    fence = "  atomic_thread_fence(mem_flags::mem_device, memory_order_release);"
    late = LAST_GROUP.replace(fence, f"{fence}\n  partial[i + 32 * 40] = 1;")

    message = report(late, **{**LAST, "shape": (32 * 42,)})

    assert "race between threadgroups" in message
    assert "write after write" in message
    assert message.count("partial[i + 32 * 40] = 1;") == 2


def test_a_plain_store_hands_over_only_its_own_release() -> None:
    source = """
    uint group = threadgroup_position_in_grid.x;
    device atomic_uint* flag = (device atomic_uint*)out;
    if (group == 0) {
      out[8] = 1;
      atomic_thread_fence(mem_flags::mem_device, memory_order_release);
      atomic_store_explicit(flag, 1u, memory_order_relaxed);
    } else if (group == 1) {
      STORE
    } else if (atomic_load_explicit(flag, memory_order_relaxed) == 1) {
      atomic_thread_fence(mem_flags::mem_device, memory_order_acquire);
      out[9] = out[8];
    }
    """
    options = {"grid": 3, "threadgroup": 1, "shape": (16,), "dtype": mx.uint32}
    options["init_value"] = 0
    store = "atomic_store_explicit(flag, 1u, memory_order_relaxed);"

    reports = []
    for seed in range(20):
        with emulated(seed=seed, workers=1):
            traced(source.replace("STORE", ""), **options)
            try:
                traced(source.replace("STORE", store), **options)
            except EmulatorError as error:
                reports.append(str(error))

    # In the order 0, 1, 2.
    assert reports
    assert all("at source line 12: out[9] = out[8];" in each for each in reports)


LAST_SIMDGROUP = """
threadgroup float part[128];
threadgroup atomic_uint arrived;
threadgroup bool last[32];
uint i = thread_index_in_threadgroup;
uint group = simdgroup_index_in_threadgroup;
if (i == 0) { atomic_store_explicit(&arrived, 0u, memory_order_relaxed); }
threadgroup_barrier(mem_flags::mem_threadgroup);
part[i] = i;
simdgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index_in_simdgroup == 0) {
  atomic_thread_fence(RELEASED, memory_order_release, thread_scope_threadgroup);
  uint before = atomic_fetch_add_explicit(&arrived, 1u, memory_order_relaxed);
  atomic_thread_fence(ACQUIRED, memory_order_acquire, thread_scope_threadgroup);
  last[group] = before == 3;
}
simdgroup_barrier(mem_flags::mem_threadgroup);
if (last[group]) {
  float sum = 0;
  for (uint j = thread_index_in_simdgroup; j < 128; j += 32) { sum += part[j]; }
  out[32 * threadgroup_position_in_grid.x + thread_index_in_simdgroup] = sum;
}
"""
"""The last simdgroup to arrive reads what the others left in threadgroup memory."""
BOTH_FLAGS = "mem_flags::mem_device | mem_flags::mem_threadgroup"


def last_simdgroup(released: str, acquired: str) -> str:
    return LAST_SIMDGROUP.replace("RELEASED", released).replace("ACQUIRED", acquired)


@given(seed=st.integers(0, 99))
@settings(max_examples=10)
@pytest.mark.parametrize("flags", ["mem_flags::mem_threadgroup", BOTH_FLAGS])
def test_a_hand_over_in_threadgroup_memory_is_clean(flags: str, seed: int) -> None:
    source = last_simdgroup(flags, flags)

    with emulated(seed=seed):
        out = traced(source, grid=128 * 3, threadgroup=128, shape=(96,))

    np.testing.assert_array_equal(out, 4 * (np.arange(96) % 32) + 192)


@pytest.mark.parametrize(
    "source",
    [
        last_simdgroup("mem_flags::mem_device", BOTH_FLAGS),
        last_simdgroup(BOTH_FLAGS, "mem_flags::mem_device"),
        last_simdgroup(BOTH_FLAGS, "mem_flags::mem_none"),
        last_simdgroup(BOTH_FLAGS, BOTH_FLAGS).replace(
            "_release, thread_scope_threadgroup", "_release, thread_scope_simdgroup"
        ),
        last_simdgroup(BOTH_FLAGS, BOTH_FLAGS).replace(
            "_acquire, thread_scope_threadgroup", "_relaxed"
        ),
    ],
)
def test_a_hand_over_in_threadgroup_memory_that_lacks_something_races(
    source: str,
) -> None:
    message = report(source, grid=128, threadgroup=128)

    assert "of threadgroup variable 'part': read after write" in message
    assert "part[j]" in message
    assert "part[i] = i;" in message


def test_device_memory_is_handed_over_by_a_threadgroup_atomic_with_both_flags() -> None:
    source = """
    threadgroup atomic_uint flag;
    uint i = thread_index_in_threadgroup;
    if (i == 0) { atomic_store_explicit(&flag, 0u, memory_order_relaxed); }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i == 32) {
      out[1] = 5;
      atomic_thread_fence(FLAGS, memory_order_release);
      atomic_store_explicit(&flag, 1u, memory_order_relaxed);
    } else if (i == 0) {
      while (atomic_load_explicit(&flag, memory_order_relaxed) == 0u) {}
      atomic_thread_fence(FLAGS, memory_order_acquire);
      out[0] = out[1];
    }
    """
    options = {"grid": 64, "threadgroup": 64, "init_value": 0}

    assert traced(source.replace("FLAGS", BOTH_FLAGS), **options)[0] == 5
    assert "race" in report(source.replace("FLAGS", "mem_flags::mem_device"), **options)
