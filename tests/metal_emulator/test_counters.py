"""What the counters of trace mode say of kernels whose traffic is known."""

import json
import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_emulator import Counters, emulated, trace
from support.marks import needs_emulator
from support.metal_sources import FLOATS, run

pytestmark = needs_emulator

BYTES = mx.arange(256).astype(mx.uint8)


def counted(source: str, *inputs: Any, **options: Any) -> Counters:
    (counters,) = trace(run, source, *inputs, name="counted", **options)
    return counters


def test_lines_come_in_the_order_of_their_numbers() -> None:
    body = "\n".join(f"out[i * 12 + {n}] = a[i] + {n};" for n in range(12))
    source = f"uint i = thread_position_in_grid.x;\n{body}"

    counters = counted(source, FLOATS, grid=4, shape=(48,))

    lines = [each.line for each in counters.traffic if each.memory == "out"]
    numbers = [int(re.findall(r"\d+", line)[0]) for line in lines]
    assert numbers == sorted(numbers)
    assert numbers[-1] - numbers[0] == 11


def test_bytes_and_lines_of_a_copy_are_exact() -> None:
    source = "uint i = thread_position_in_grid.x;\nout[i] = a[i];"

    counters = counted(source, FLOATS, grid=64, shape=(64,))

    assert counters.threadgroups == 2
    assert counters.threadgroup_bytes == 0
    read, written = counters.of("a"), counters.of("out")
    assert read.read_bytes == written.written_bytes == 256
    assert read.written_bytes == written.read_bytes == 0
    assert (read.lane_read_bytes, written.lane_read_bytes) == (256, 0)
    for traffic in (read, written):
        assert traffic.accesses == 2
        lines = traffic.lines_128, traffic.lines_64, traffic.lines_32
        assert lines == (2, 4, 8)
    assert counters.operations == ()
    shifted = FLOATS[1:]  # whose lines are counted from where it starts
    mx.eval(shifted)
    assert counted(source, shifted).of("a").lines_32 == 5


LANES = np.arange(32)


@pytest.mark.parametrize(
    ("index", "bytes_read", "lines"),
    [
        (LANES, 32, (1, 1, 1)),
        (8 * LANES, 32, (2, 4, 8)),
        (3 * LANES, 32, (1, 2, 3)),
        (LANES // 4, 8, (1, 1, 1)),
        (0 * LANES, 1, (1, 1, 1)),
        (31 - LANES, 32, (1, 1, 1)),
    ],
)
def test_lines_depend_on_the_stride(
    index: np.ndarray, bytes_read: int, lines: tuple[int, int, int]
) -> None:
    source = "uint i = thread_index_in_simdgroup;\nout[i] = a[b[i]];"

    traffic = counted(source, BYTES, mx.array(index)).of("a")

    assert traffic.read_bytes == bytes_read
    assert traffic.lane_read_bytes == 32
    assert (traffic.lines_128, traffic.lines_64, traffic.lines_32) == lines


def test_neighbouring_narrow_reads_are_one_access() -> None:
    orders = {"0123": 1, "3210": 1, "0213": 2, "01": 1, "02": 2}
    lines = ["uint i = thread_index_in_simdgroup;"]
    for nth, order in enumerate(orders):
        reads = " + ".join(f"a[{128 * nth + int(at)} + 4 * i]" for at in order)
        lines.append(f"out[{32 * nth} + i] = float({reads});")

    bytes_ = mx.arange(640).astype(mx.uint8)
    counters = counted("\n".join(lines), bytes_, shape=(5, 32))

    found = {
        t.line: (t.read_bytes, t.accesses) for t in counters.traffic if t.read_bytes
    }
    assert found == {
        f"source line {2 + nth}": (32 * len(order), accesses)
        for nth, (order, accesses) in enumerate(orders.items())
    }


def test_accesses_of_more_than_16_bytes_stay_apart() -> None:
    source = """
    uint i = thread_index_in_simdgroup;
    const device float4* v = (const device float4*)a;
    float4 sum = v[2 * i] + v[2 * i + 1];
    out[i] = sum.x + sum.y + sum.z + sum.w;
    """

    traffic = counted(source, mx.ones(256)).of("a")

    assert traffic.read_bytes == 1024
    assert traffic.accesses == 2
    assert traffic.lines_128 == 16


REPEATED = """
uint i = thread_index_in_simdgroup;
float first = a[i];
out[i] = first;
BETWEEN
out[i + 32] = *(const volatile device float*)(a + i);
"""


def test_a_second_read_is_repeated_unless_lanes_meet_in_between() -> None:
    same = counted(REPEATED.replace("BETWEEN", ""), FLOATS, shape=(64,))
    barrier = "simdgroup_barrier(mem_flags::mem_device);"
    apart = counted(REPEATED.replace("BETWEEN", barrier), FLOATS, shape=(64,))

    assert same.of("a").read_bytes == same.of("a").repeated_read_bytes == 128
    assert same.of("a").lane_read_bytes == 128
    assert same.of("a").lines_128 == 1
    assert apart.of("a").lane_read_bytes == 256
    assert apart.of("a").read_bytes == 256
    assert apart.of("a").repeated_read_bytes == 0
    assert apart.of("a").lines_128 == 2


@pytest.mark.parametrize(
    ("index", "cycles"),
    [
        (LANES, 1),
        (2 * LANES, 2),
        (32 * LANES, 32),
        (33 * LANES, 1),
        (LANES // 2, 1),
        (0 * LANES, 1),
    ],
)
def test_bank_cycles_are_the_fullest_bank(index: np.ndarray, cycles: int) -> None:
    source = """
    threadgroup float tile[1056];
    uint i = thread_index_in_simdgroup;
    for (uint j = i; j < 1056; j += 32) { tile[j] = j; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = tile[a[i]];
    """

    counters = counted(source, mx.array(index))

    (read,) = [
        t for t in counters.traffic if t.memory == "tile" and t.line == "source line 6"
    ]
    assert read.bank_cycles == cycles
    assert counters.threadgroup_bytes == 4224
    assert counters.of("tile").bank_cycles == cycles + 33


def test_operations_are_counted_by_kind_and_line() -> None:
    source = """
    threadgroup float m[64];
    uint i = thread_index_in_threadgroup;
    m[i] = 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 x, y(0.0f);
    simdgroup_load(x, m);
    for (int j = 0; j < 3; ++j) { simdgroup_multiply_accumulate(y, x, x, y); }
    float v = simd_sum(y.thread_elements()[0]);
    v = simd_shuffle_xor(v, 1);
    simdgroup_barrier(mem_flags::mem_device);
    out[thread_position_in_grid.x] = v;
    """

    counters = counted(source, grid=128, threadgroup=64, shape=(128,))

    kinds = {o.name: (o.kind, o.line, o.count) for o in counters.operations}
    assert kinds == {
        "threadgroup_barrier": ("barrier", "source line 5", 2),
        "simdgroup_load": ("matrix memory", "source line 7", 4),
        "simdgroup_multiply_accumulate": ("matrix", "source line 8", 12),
        "simd_sum": ("simd", "source line 9", 4),
        "simd_shuffle_xor": ("shuffle", "source line 10", 4),
        "simdgroup_barrier": ("simdgroup barrier", "source line 11", 4),
    }
    assert counters.count("matrix") == 12
    assert counters.of("m").read_bytes == 4 * 256


def test_atomics_are_counted_by_lane() -> None:
    source = """
    if (thread_index_in_simdgroup < 5) {
      atomic_fetch_max_explicit(out, 1u, memory_order_relaxed);
    }
    """

    counters = counted(
        source, grid=96, shape=(8,), dtype=mx.uint32, atomic_outputs=True, init_value=0
    )

    assert counters.of("out").atomics == 15
    assert counters.of("out").written_bytes == 0


RAGGED = """
uint i = thread_position_in_grid.x;
float sum = 0;
for (uint j = 0; j < uint(a[i % 64]) + ROUNDS; ++j) {
  if ((i * 7 + j) % 3 == 0) { sum += a[j % 64]; } else { sum += a[(i + j) % 64]; }
}
out[i] = simd_sum(sum);
"""


@given(seed=st.integers(0, 999), workers=st.integers(1, 3))
@settings(max_examples=10)
def test_counters_are_equal_for_every_schedule(seed: int, workers: int) -> None:
    source = RAGGED.replace("ROUNDS", "5")
    options = {"grid": 2048, "threadgroup": 64, "shape": (2048,)}
    with emulated(seed=0, workers=1):
        expected = counted(source, FLOATS, **options)

    with emulated(seed=seed, workers=workers):
        assert counted(source, FLOATS, **options) == expected


def test_long_logs_lose_nothing() -> None:
    source = RAGGED.replace("ROUNDS", "10000")
    stores = """
    volatile device float* mine = out + thread_index_in_simdgroup;
    for (uint j = 0; j < 20000; ++j) { *mine = j; }
    """

    with emulated(workers=1):
        one = counted(source, FLOATS, grid=128, threadgroup=64, shape=(128,))
    with emulated(workers=2, seed=5):
        two = counted(source, FLOATS, grid=128, threadgroup=64, shape=(128,))
    traffic = counted(stores).of("out")

    assert one == two
    assert traffic.written_bytes + traffic.repeated_written_bytes == 20000 * 128


def test_every_launch_of_a_call_is_told_in_order() -> None:
    def both() -> None:
        run("out[thread_position_in_grid.x] = 1;", name="first")
        run("out[thread_position_in_grid.x] = 2;", name="second")

    names = [counters.kernel for counters in trace(both)]

    assert names == ["first", "second"]


def test_counters_are_readable_by_programs_and_people() -> None:
    source = "uint i = thread_position_in_grid.x;\nout[i] = simd_sum(a[i]);"
    counters = counted(source, FLOATS)

    record = json.loads(json.dumps(counters.as_json()))
    table = counters.table().splitlines()

    assert record["kernel"] == "counted"
    assert record["traffic"][0]["memory"] == "a"
    assert record["traffic"][0]["read_bytes"] == 128
    assert record["operations"][0]["name"] == "simd_sum"
    assert table[0] == (
        "kernel counted: 1 threadgroups, 0 bytes of threadgroup memory each"
    )
    assert table[1].split()[:2] == ["memory", "line"]
    assert table[2].split()[:3] == ["a", "all", "128"]
    assert table[-1].split() == ["simd_sum", "source", "line", "2", "1"]


def test_a_memory_that_is_not_there_is_named() -> None:
    counters = counted("out[thread_position_in_grid.x] = 1;")

    with pytest.raises(ValueError, match=r"memory='w', expected .*'out'"):
        counters.of("w")
