"""The message on a fault: what happened, in which thread, on which line."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

from metal_emulator.compiling import compiler
from metal_emulator.reports import memory_faults, synchronization_faults
from metal_emulator.reports.context import LANES, Fault, FaultContext


def fault_message(fault: FaultContext) -> str:
    """Returns the message on a fault."""
    kind = Fault(fault.report.fault)
    head = f"kernel {fault.name}: {_DESCRIPTIONS[kind](fault)}"
    if not fault.report.size.z:
        return head
    message = [head, f"  {_thread(fault, kind)}"]
    message.extend(f"  at {line}" for line in _call_stack(fault, kind))
    if kind == Fault.RACE:
        message.extend(memory_faults.earlier_access(fault))
    return "\n".join(message)


def _thread(fault: FaultContext, kind: Fault) -> str:
    group = f"threadgroup ({', '.join(map(str, fault.report.threadgroup))})"
    if kind in (Fault.DEADLOCK, Fault.MISMATCH, Fault.THREADGROUP_CANARY):
        return f"in {group}"
    return f"in {group}, {fault.thread(fault.report.thread)}"


def _call_stack(fault: FaultContext, kind: Fault) -> Iterator[str]:
    report = fault.report
    if not report.trace_length:
        return
    here, *callers = report.trace[: report.trace_length]
    # The runtime reports these kinds from a call; a signal reports the others.
    returns = kind in (Fault.MISUSE, Fault.THREADGROUP_LIMIT, Fault.NO_LANE)
    found = fault.locations(here, returns=returns)
    yield from map(fault.source.quote, found)
    # The first caller is a guess, for faults in a library function without a frame.
    for caller in callers[1:] if found else callers:
        yield from map(fault.source.quote, fault.locations(caller, returns=True))


_TRAPS = {
    3: "integer division by zero",
    18: "index outside of an array",
    20: "shift by the width of the type or more (Metal takes it modulo the width)",
    22: "misaligned access: the address is not a multiple of the type's alignment",
}
"""The failed check, by the number in the trap instruction."""
_PREFIXES = bytes([0x66, *range(0x40, 0x50)])
"""Prefixes of x86-64's division that choose its width or registers."""
_ANY_TRAP = (
    "misaligned access, integer division by zero, or shift by the width of the type or "
    "more, in trace mode also an index outside of an array (clang 19 does not "
    "distinguish them)"
)


def _trap(fault: FaultContext) -> str:
    number = _trap_number(fault)
    found = compiler.find()
    if number >= 0 and found is not None and not found.traps_name_checks:
        return _ANY_TRAP
    return _TRAPS.get(number, "trap: the code reached a point that is unreachable")


def _trap_number(fault: FaultContext) -> int:
    """Returns the number in the trap instruction, or -1."""
    code = ctypes.string_at(fault.report.trace[0], 5)
    if code.startswith(b"\x67\x0f\xb9\x40"):  # x86-64: ud1l number(%eax), %eax
        return code[4]
    if code[3] == 0xD4:  # arm64: brk #0x5500 + number
        return int.from_bytes(code[:4], "little") >> 5 & 0xFF
    return -1


def _division(fault: FaultContext) -> str:
    """Describes a division that x86-64 faults on; clang checks divisors of scalars."""
    code = ctypes.string_at(fault.report.trace[0], 3)
    prefixes = code[: 3 - len(code.lstrip(_PREFIXES))]
    wide = any(prefix & 0xF8 == 0x48 for prefix in prefixes)
    bits = 64 if wide else 16 if 0x66 in prefixes else 32
    if code[len(prefixes)] == 0xF6:
        bits = 8
    if fault.report.amount % 2**bits == 2 ** (bits - 1):
        return (
            "integer division that overflows: the least value by -1 (in vectors or 0)"
        )
    return _TRAPS[3]


def _no_lane(fault: FaultContext) -> str:
    name, lane = fault.text, fault.report.amount
    if " " in name:  # a sentence about an element of a cooperative tensor
        return f"{name} {lane}"
    if name.startswith("quad"):
        return f"{name} asks for lane {lane - LANES}, a quad has 4 lanes"
    return f"{name} asks for lane {lane}, a simdgroup has {LANES} lanes"


def _misuse(fault: FaultContext) -> str:
    if " " in fault.text:
        return fault.text
    threads = fault.thread_count
    return f"{fault.text} in an incomplete simdgroup (threadgroup of {threads} threads)"


def _constant(text: str) -> Callable[[FaultContext], str]:
    return lambda fault: text


_DESCRIPTIONS: dict[Fault, Callable[[FaultContext], str]] = {
    Fault.ACCESS: memory_faults.access,
    Fault.STACK_OVERFLOW: _constant("stack overflow (more than 124 KiB in a thread)"),
    Fault.INSTRUCTION: _trap,
    Fault.ARITHMETIC: _division,
    Fault.DEADLOCK: synchronization_faults.deadlock,
    Fault.MISMATCH: synchronization_faults.mismatch,
    Fault.THREADGROUP_LIMIT: memory_faults.threadgroup_limit,
    Fault.MISUSE: _misuse,
    Fault.THREADGROUP_CANARY: memory_faults.threadgroup_canary,
    Fault.RESOURCES: _constant("the system refuses memory or signal handlers"),
    Fault.THREADGROUP_ACCESS: memory_faults.threadgroup_access,
    Fault.RACE: memory_faults.race,
    Fault.POISON: memory_faults.poison,
    Fault.BARRIER_SITES: synchronization_faults.barrier_sites,
    Fault.LIVELOCK: _constant(
        "livelock: it waits for an atomic that no running thread will change. Metal "
        "promises no other threadgroup's progress; emulated(resident=n) grants it to n"
    ),
    Fault.TIME_LIMIT: _constant(
        "a threadgroup exceeds the time limit: the kernel has an endless loop, or "
        "emulated(time_limit=seconds) is too short"
    ),
    Fault.INTERRUPTED: _constant("interrupted"),
    Fault.NO_LANE: _no_lane,
}
