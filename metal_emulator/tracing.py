"""Trace mode: the runtime's input and output structures, and their conversion."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence

from metal_emulator import counters, engine
from metal_emulator.language import lines
from metal_emulator.memory import MappedArgument

VALUES = 11
MAX_COUNTERS = 1 << 16
THREADGROUP_MEMORY = 1 << 16
OPERATION = 1 << 17
"""First number of an operation in `Counter.memory`, as in trace.h.

Buffers are numbered from 0, threadgroup variables from THREADGROUP_MEMORY.
"""
OPERATIONS = {
    0: "simd",
    1: "shuffle",
    2: "simdgroup barrier",
    3: "matrix",
    4: "matrix memory",
    5: "tensor",
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
    """The counters of one instruction and one memory, as in trace.h."""

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


def request(kernel: engine.Kernel, buffers: Sequence[MappedArgument]) -> Trace:
    """Returns the structure with which the runtime traces a launch."""
    memories = (Memory * max(1, len(buffers)))(*map(_memory, buffers))
    return Trace(
        library=kernel.base,
        library_bytes=kernel.size,
        memories=memories,
        memory_count=len(buffers),
        counters=_counters,
        counter_capacity=MAX_COUNTERS,
    )


def _memory(buffer: MappedArgument) -> Memory:
    argument = buffer.argument
    begin = buffer.address - argument.origin
    return Memory(
        begin=begin,
        bytes=argument.size,
        reserved=buffer.region.reserved,
        reserved_bytes=buffer.region.reserved_bytes,
        writable=argument.writable,
        written=argument.contents is not None,
        residue=begin % 16,
    )


def launch_counters(
    name: str,
    kernel: engine.Kernel,
    source: lines.SourceMap,
    buffers: Sequence[MappedArgument],
    threadgroups: int,
    trace: Trace,
) -> counters.Counters:
    """Returns the counters of a launch, by line."""
    counted = [trace.counters[index] for index in range(trace.counter_count)]
    names = _line_names(kernel, source, [counter.site for counter in counted])
    traffic: list[counters.Traffic] = []
    operations: dict[tuple[str, str, str], int] = defaultdict(int)
    for counter in counted:
        line, label = names[counter.site], (counter.name or b"").decode()
        values = counter.values
        if counter.memory >= OPERATION:
            kind = OPERATIONS[counter.memory - OPERATION]
            operations[kind, label, line] += values[VALUES - 1]
        elif counter.memory >= THREADGROUP_MEMORY:
            traffic.append(counters.Traffic(label, "threadgroup", line, *values))
        else:
            label = buffers[counter.memory].argument.name
            traffic.append(counters.Traffic(label, "device", line, *values))
    return counters.Counters(
        kernel=name,
        threadgroups=threadgroups,
        threadgroup_bytes=trace.threadgroup_bytes,
        traffic=counters.merged(traffic),
        operations=tuple(
            counters.Operation(*key, count) for key, count in sorted(operations.items())
        ),
    )


def _line_names(
    kernel: engine.Kernel, source: lines.SourceMap, sites: Sequence[int]
) -> dict[int, str]:
    """Returns the name of the innermost Metal line of every return address."""
    # A call precedes its return address.
    found = lines.locations_by_offset(kernel.path, [site - 1 for site in sites])
    return {
        site: source.name(found[site - 1][0]) if found[site - 1] else "an unknown line"
        for site in sites
    }
