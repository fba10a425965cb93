"""Kernels that wait for other threads: reported or allowed."""

import mlx.core as mx
import pytest

import metal_emulator
from metal_emulator import EmulatorError, emulated
from support.marks import needs_emulator
from support.metal_sources import run
from support.profiles import sampled

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
