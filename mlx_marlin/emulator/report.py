"""What the emulator says when something is wrong."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from mlx_marlin.emulator import engine
from mlx_marlin.emulator.compiling import compiler
from mlx_marlin.emulator.language import lines

LANES = 32
_COMPLAINT = re.compile(
    r"(?P<file>.+?):(?P<line>\d+):(?P<column>\d+): "
    r"(?P<kind>(?:fatal )?error|note): (?P<text>.*)"
)
_MAX_COMPLAINTS = 12
_NO_FILES = frozenset({"<scratch space>", "<built-in>"})
"""Where clang says that macros have put text; no line of the kernel is there."""


class Fault(IntEnum):
    """Kinds of fault, as in runtime.h."""

    NONE = 0
    ACCESS = 1
    STACK_OVERFLOW = 2
    INSTRUCTION = 3
    ARITHMETIC = 4
    DEADLOCK = 5
    MISMATCH = 6
    THREADGROUP_LIMIT = 7
    MISUSE = 8
    THREADGROUP_CANARY = 9
    RESOURCES = 10
    THREADGROUP_ACCESS = 11
    RACE = 12
    POISON = 13
    BARRIER_SITES = 14
    LIVELOCK = 15
    TIME_LIMIT = 16
    INTERRUPTED = 17
    NO_LANE = 18


class Activity(IntEnum):
    """What a thread does, as in runtime.h."""

    READY = 0
    RETURNED = 1
    BARRIER = 2
    SIMD = 3


def compile_message(name: str, source: lines.SourceMap, complaint: str) -> str:
    """The compiler's messages, with the kernel's own lines in place of file names.

    Args:
        name: The kernel.
        source: Names its lines.
        complaint: What clang wrote.
    """
    result = [f"kernel {name} does not compile:"]
    for line in complaint.splitlines():
        found = _COMPLAINT.match(line)
        if found and found["file"] in _NO_FILES:
            continue
        if found and len(result) <= _MAX_COMPLAINTS:
            place = lines.Place(lines.shorten(found["file"]), int(found["line"]))
            text = found["text"].split(" [-W")[0]
            result.append(f"  {found['kind']}: {text}")
            result.append(f"    at {source.quote(place)}")
    return "\n".join(result) if len(result) > 1 else f"{result[0]}\n{complaint}"


@dataclass(frozen=True)
class Scene:
    """Everything that a report needs to name things."""

    name: str
    kernel: engine.Kernel
    source: lines.SourceMap
    buffers: Sequence[engine.Placed]
    outcome: engine.Outcome

    @property
    def report(self) -> engine.Report:
        """What the run time noted."""
        return self.outcome.report

    def places(self, address: int, *, returns: bool) -> list[lines.Place]:
        """The Metal lines of an address, or of the call that returns to it."""
        offset = address - self.kernel.base - (1 if returns else 0)
        return lines.places(self.kernel.path, offset) if offset >= 0 else []

    def line(self, address: int) -> str:
        """Where a waiting thread waits, in short."""
        found = self.places(address, returns=True)
        return self.source.name(found[0]) if found else "an unknown line"


def fault_message(scene: Scene) -> str:
    """What happened, where, and in which thread."""
    fault = Fault(scene.report.fault)
    what = _WHAT[fault](scene)
    if not scene.report.size.z:
        return f"kernel {scene.name}: {what}"
    message = [f"kernel {scene.name}: {what}", f"  {_who(scene, fault)}"]
    message.extend(f"  at {line}" for line in _where(scene))
    if fault == Fault.RACE:
        message.extend(_earlier(scene))
    return "\n".join(message)


def _who(scene: Scene, fault: Fault) -> str:
    report = scene.report
    group = f"threadgroup ({', '.join(map(str, report.threadgroup))})"
    if fault in (Fault.DEADLOCK, Fault.MISMATCH, Fault.THREADGROUP_CANARY):
        return f"in {group}"
    return f"in {group}, {_thread(report, report.thread)}"


def _thread(report: engine.Report, thread: int) -> str:
    x, y, _ = report.size
    position = (thread % x, thread // x % y, thread // x // y)
    return f"thread {position}, simdgroup {thread // LANES} lane {thread % LANES}"


def _where(scene: Scene) -> Iterator[str]:
    report = scene.report
    if not report.trace_length:
        return
    here, *callers = report.trace[: report.trace_length]
    called = (Fault.MISUSE, Fault.THREADGROUP_LIMIT, Fault.NO_LANE)
    by_signal = report.fault not in called
    found = scene.places(here, returns=not by_signal)
    yield from map(scene.source.quote, found)
    # The first caller is a guess, for a library function that faulted for the kernel.
    for caller in callers[1:] if found else callers:
        yield from map(scene.source.quote, scene.places(caller, returns=True))


def _verb(is_write: int) -> str:
    return "write" if is_write else "read"


def _access(scene: Scene) -> str:
    report = scene.report
    verb = _verb(report.is_write)
    for placed in scene.buffers:
        start = placed.region.reserved
        if start <= report.address < start + placed.region.reserved_bytes:
            return _buffer_access(placed, report.address - placed.address, verb)
    if report.address == 0:
        return f"{verb} through a misaligned or invalid pointer"
    return f"{verb} at address {report.address:#x}, far from every buffer"


def _buffer_access(placed: engine.Placed, offset: int, verb: str) -> str:
    size = placed.argument.size
    label = f"buffer {placed.argument.name!r} ({size} bytes)"
    if 0 <= offset + placed.argument.origin < size:
        return f"{verb} to byte {offset} of input {label}"
    return f"{verb} outside {label}, at byte {offset}"


def _threadgroup_access(scene: Scene) -> str:
    report = scene.report
    verb = _verb(report.is_write)
    offset = ctypes.c_int64(report.address).value
    return (
        f"{verb} outside threadgroup variable {_text(report)!r} "
        f"({report.amount} bytes), at byte {offset}"
    )


def _text(report: engine.Report) -> str:
    return bytes(report.text or b"").decode()


def _threads(scene: Scene) -> list[engine.ThreadState]:
    x, y, z = scene.report.size
    return list(scene.outcome.states[: x * y * z])


def _deadlock(scene: Scene) -> str:
    threads = _threads(scene)
    for start in range(0, len(threads), LANES):
        lanes = threads[start : start + LANES]
        if any(lane.activity == Activity.SIMD for lane in lanes):
            return _missing_lanes(scene, start // LANES, lanes)
    waiting = Counter(t.site for t in threads if t.activity == Activity.BARRIER)
    returned = sum(t.activity == Activity.RETURNED for t in threads)
    wait = ", ".join(
        f"{count} wait at {scene.line(site)}" for site, count in waiting.items()
    )
    return f"barrier not reached by all threads: {wait}, {returned} have returned"


def _mask(lanes: Sequence[engine.ThreadState], wanted: engine.ThreadState) -> int:
    return sum(
        1 << number
        for number, lane in enumerate(lanes)
        if (lane.activity, lane.site) == (wanted.activity, wanted.site)
    )


def _activities(scene: Scene, lanes: Sequence[engine.ThreadState]) -> Iterator[str]:
    seen = set()
    for lane in lanes:
        activity = Activity(lane.activity)
        waits = activity in (Activity.SIMD, Activity.BARRIER)
        key = (activity, lane.site if waits else 0)
        if key in seen:
            continue
        seen.add(key)
        if waits:
            operation = (lane.operation or b"threadgroup_barrier").decode()
            mask = _mask(lanes, lane)
            yield f"lanes {mask:08x} in {operation} at {scene.line(lane.site)}"
        elif activity == Activity.RETURNED:
            count = sum(other.activity == activity for other in lanes)
            yield f"{count} of {len(lanes)} have returned"


def _missing_lanes(
    scene: Scene, number: int, lanes: Sequence[engine.ThreadState]
) -> str:
    wanted = next(lane for lane in lanes if lane.activity == Activity.SIMD)
    operation = wanted.operation.decode()
    return f"{operation} with missing lanes in simdgroup {number}: " + ", ".join(
        _activities(scene, lanes)
    )


def _mismatch(scene: Scene) -> str:
    number = scene.report.thread // LANES
    lanes = _threads(scene)[number * LANES : (number + 1) * LANES]
    return f"lanes of simdgroup {number} in different operations: " + ", ".join(
        _activities(scene, lanes)
    )


def _byte(scene: Scene) -> str:
    """Names the byte of a race or of poison."""
    report = scene.report
    if report.text:
        return f"byte {report.address} of threadgroup variable {_text(report)!r}"
    for placed in scene.buffers:
        offset = report.address - placed.address + placed.argument.origin
        if 0 <= offset < placed.argument.size:
            return f"byte {offset} of buffer {placed.argument.name!r}"
    return f"the byte at address {report.address:#x}"


def _race(scene: Scene) -> str:
    report = scene.report
    earlier, now = _verb(report.other_is_write), _verb(report.is_write)
    between = "threads"
    if tuple(report.other_threadgroup) != tuple(report.threadgroup):
        between = "threadgroups"
    return f"race between {between} on {_byte(scene)}: {now} after {earlier}"


def _earlier(scene: Scene) -> Iterator[str]:
    report = scene.report
    group = ", ".join(map(str, report.other_threadgroup))
    yield (
        f"  earlier {_verb(report.other_is_write)} in threadgroup ({group}), "
        f"{_thread(report, report.other_thread)}"
    )
    for place in scene.places(report.other_site, returns=True):
        yield f"  at {scene.source.quote(place)}"


def _poison(scene: Scene) -> str:
    return f"read of a value that was never written, {_byte(scene)}"


def _barrier_sites(scene: Scene) -> str:
    other = scene.line(scene.report.other_site)
    return f"simdgroups wait at different barriers, others at {other}"


_TRAPS = {
    3: "integer division by zero",
    18: "index outside of an array",
    20: "shift by the width of the type or more (Metal takes it modulo the width)",
    22: "misaligned access: the address is no multiple of the type's alignment",
}
"""What the compiler's checks find, by the number in the trap instruction."""
_ANY_TRAP = (
    "misaligned access, integer division by zero, or shift by the width of the type or "
    "more, in trace mode also an index outside of an array (clang 19 does not tell "
    "which)"
)


def _trap(scene: Scene) -> str:
    code = ctypes.string_at(scene.report.trace[0], 5)
    number = -1
    if code.startswith(b"\x67\x0f\xb9\x40"):  # x86-64: ud1l number(%eax), %eax
        number = code[4]
    elif code[3] == 0xD4:  # arm64: brk #0x5500 + number
        number = int.from_bytes(code[:4], "little") >> 5 & 0xFF
    found = compiler.find()
    if number >= 0 and found is not None and not found.traps_name_checks:
        return _ANY_TRAP
    return _TRAPS.get(number, "trap: the code reached a point that it never should")


def _threadgroup_limit(scene: Scene) -> str:
    report = scene.report
    return (
        f"{report.amount} bytes of threadgroup memory with variable {_text(report)!r}, "
        "the limit is 32768"
    )


def _no_lane(scene: Scene) -> str:
    name = _text(scene.report)
    lane = scene.report.amount
    if name.startswith("quad"):
        return f"{name} asks for lane {lane - LANES}, a quad has 4 lanes"
    return f"{name} asks for lane {lane}, a simdgroup has {LANES} lanes"


def _misuse(scene: Scene) -> str:
    text = _text(scene.report)
    if " " in text:
        return text
    x, y, z = scene.report.size
    return f"{text} in an incomplete simdgroup (threadgroup of {x * y * z} threads)"


_WHAT: dict[Fault, Callable[[Scene], str]] = {
    Fault.ACCESS: _access,
    Fault.STACK_OVERFLOW: lambda scene: (
        "stack overflow (more than 124 KiB in a thread)"
    ),
    Fault.INSTRUCTION: _trap,
    Fault.ARITHMETIC: lambda scene: "integer division by zero",
    Fault.DEADLOCK: _deadlock,
    Fault.MISMATCH: _mismatch,
    Fault.THREADGROUP_LIMIT: _threadgroup_limit,
    Fault.MISUSE: _misuse,
    Fault.THREADGROUP_CANARY: lambda scene: (
        f"write outside threadgroup variable {_text(scene.report)!r}, close to it"
    ),
    Fault.RESOURCES: lambda scene: "the system refuses memory or signal handlers",
    Fault.THREADGROUP_ACCESS: _threadgroup_access,
    Fault.RACE: _race,
    Fault.POISON: _poison,
    Fault.BARRIER_SITES: _barrier_sites,
    Fault.LIVELOCK: lambda scene: (
        "livelock: it waits for an atomic that no running thread will change. Metal "
        "promises no other threadgroup's progress; emulated(resident=n) grants it to n"
    ),
    Fault.TIME_LIMIT: lambda scene: (
        "a threadgroup takes longer than the time limit: a loop that does not end, or "
        "emulated(time_limit=seconds) is too short"
    ),
    Fault.INTERRUPTED: lambda scene: "interrupted",
    Fault.NO_LANE: _no_lane,
}


def canary_message(name: str, placed: engine.Placed, side: int) -> str:
    """An output whose surroundings were written, too close to fault."""
    argument = placed.argument
    where = "before" if side == 1 else "behind"
    return (
        f"kernel {name}: write outside buffer {argument.name!r} "
        f"({argument.size} bytes), close {where} it"
    )
