"""Trace mode's request to the run time, and its answer."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence

from mlx_marlin.emulator import counters, engine
from mlx_marlin.emulator.language import lines

VALUES = 10
MAX_COUNTERS = 1 << 16
THREADGROUP_MEMORY = 1 << 16
OPERATION = 1 << 17
"""Numbers of what is counted start here, as in trace.h; buffers start at 0."""
OPERATIONS = {
    0: "simd",
    1: "shuffle",
    2: "simdgroup barrier",
    3: "matrix",
    4: "matrix memory",
    16: "barrier",
}


class Memory(ctypes.Structure):
    """A buffer, as in trace.h."""

    _fields_ = [
        ("begin", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
        ("reserved_bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("written", ctypes.c_uint32),
        ("residue", ctypes.c_uint64),
        ("cells", ctypes.c_uint64),
        ("unwritten", ctypes.c_uint64),
        ("first_unwritten", ctypes.c_uint64),
    ]


class Counter(ctypes.Structure):
    """What one place does to one memory, as in trace.h."""

    _fields_ = [
        ("site", ctypes.c_uint32),
        ("memory", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("values", ctypes.c_uint64 * VALUES),
        ("next", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class Trace(ctypes.Structure):
    """A traced launch, as in trace.h."""

    _fields_ = [
        ("library", ctypes.c_uint64),
        ("library_bytes", ctypes.c_uint64),
        ("memories", ctypes.POINTER(Memory)),
        ("memory_count", ctypes.c_uint64),
        ("counters", ctypes.POINTER(Counter)),
        ("counter_capacity", ctypes.c_uint64),
        ("counter_count", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint64),
        ("locks", ctypes.c_uint64),
        ("locations", ctypes.c_uint64),
        ("order_lock", ctypes.c_uint8),
    ]


_counters = (Counter * MAX_COUNTERS)()


def request(kernel: engine.Kernel, buffers: Sequence[engine.Placed]) -> Trace:
    """What the run time must know to trace a launch."""
    memories = (Memory * max(1, len(buffers)))(*map(_memory, buffers))
    return Trace(
        library=kernel.base,
        library_bytes=kernel.size,
        memories=memories,
        memory_count=len(buffers),
        counters=_counters,
        counter_capacity=MAX_COUNTERS,
    )


def _memory(placed: engine.Placed) -> Memory:
    argument = placed.argument
    begin = placed.address - argument.origin
    return Memory(
        begin=begin,
        bytes=argument.size,
        reserved=placed.region.reserved,
        reserved_bytes=placed.region.reserved_bytes,
        writable=argument.writable,
        written=argument.contents is not None,
        residue=begin % 16,
    )


def answer(
    name: str,
    kernel: engine.Kernel,
    source: lines.SourceMap,
    buffers: Sequence[engine.Placed],
    threadgroups: int,
    trace: Trace,
) -> counters.Counters:
    """What the run time has counted, by lines.

    Args:
        name: Of the kernel.
        kernel: The traced build.
        source: Names its lines.
        buffers: The same as for `request`.
        threadgroups: Number of them in the launch.
        trace: After the launch.
    """
    counted = [trace.counters[at] for at in range(trace.counter_count)]
    place = _places(kernel, source, [each.site for each in counted])
    traffic: list[counters.Traffic] = []
    operations: dict[tuple[str, str, str], int] = defaultdict(int)
    for each in counted:
        where, label = place[each.site], (each.name or b"").decode()
        if each.memory >= OPERATION:
            kind = OPERATIONS[each.memory - OPERATION]
            operations[kind, label, where] += each.values[VALUES - 1]
        elif each.memory >= THREADGROUP_MEMORY:
            traffic.append(counters.Traffic(label, "threadgroup", where, *each.values))
        else:
            label = buffers[each.memory].argument.name
            traffic.append(counters.Traffic(label, "device", where, *each.values))
    return counters.Counters(
        kernel=name,
        threadgroups=threadgroups,
        threadgroup_bytes=trace.threadgroup_bytes,
        traffic=counters.merged(traffic),
        operations=tuple(
            counters.Operation(*key, count) for key, count in sorted(operations.items())
        ),
    )


def _places(
    kernel: engine.Kernel, source: lines.SourceMap, sites: Sequence[int]
) -> dict[int, str]:
    """Names the innermost Metal line of each return address."""
    # The call lies before the address that it returns to.
    found = lines.places_of_all(kernel.path, [site - 1 for site in sites])
    return {
        site: source.name(found[site - 1][0]) if found[site - 1] else "an unknown line"
        for site in sites
    }
