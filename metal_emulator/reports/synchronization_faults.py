"""Descriptions of threads that do not meet in a barrier or simdgroup operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import IntEnum

from metal_emulator.native import ThreadState
from metal_emulator.reports.context import LANES, FaultContext


class Activity(IntEnum):
    """States of a thread, as in runtime.h."""

    READY = 0
    RETURNED = 1
    BARRIER = 2
    SIMD = 3


def deadlock(fault: FaultContext) -> str:
    """Describes a deadlock: missing lanes, or a barrier not all threads reach."""
    threads = _threads(fault)
    for start in range(0, len(threads), LANES):
        lanes = threads[start : start + LANES]
        if any(lane.activity == Activity.SIMD for lane in lanes):
            return _missing_lanes(fault, start // LANES, lanes)
    waiting = Counter(t.site for t in threads if t.activity == Activity.BARRIER)
    returned = sum(t.activity == Activity.RETURNED for t in threads)
    wait = ", ".join(
        f"{count} wait at {fault.line(site)}" for site, count in waiting.items()
    )
    return f"barrier not reached by all threads: {wait}, {returned} have returned"


def mismatch(fault: FaultContext) -> str:
    """Describes lanes of a simdgroup that wait in different operations."""
    number = fault.report.thread // LANES
    lanes = _threads(fault)[number * LANES : (number + 1) * LANES]
    return f"lanes of simdgroup {number} in different operations: " + ", ".join(
        _activities(fault, lanes)
    )


def barrier_sites(fault: FaultContext) -> str:
    """Describes simdgroups that wait at different barriers."""
    other = fault.line(fault.report.other_site)
    return f"simdgroups wait at different barriers, others at {other}"


def _threads(fault: FaultContext) -> list[ThreadState]:
    return list(fault.outcome.states[: fault.thread_count])


def _missing_lanes(
    fault: FaultContext, number: int, lanes: Sequence[ThreadState]
) -> str:
    waiting = next(lane for lane in lanes if lane.activity == Activity.SIMD)
    operation = waiting.operation.decode()
    return f"{operation} with missing lanes in simdgroup {number}: " + ", ".join(
        _activities(fault, lanes)
    )


def _activities(fault: FaultContext, lanes: Sequence[ThreadState]) -> Iterator[str]:
    """Yields a description of every group of lanes in the same state."""
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
            yield f"lanes {mask:08x} in {operation} at {fault.line(lane.site)}"
        elif activity == Activity.RETURNED:
            count = sum(other.activity == activity for other in lanes)
            yield f"{count} of {len(lanes)} have returned"


def _mask(lanes: Sequence[ThreadState], wanted: ThreadState) -> int:
    return sum(
        1 << number
        for number, lane in enumerate(lanes)
        if (lane.activity, lane.site) == (wanted.activity, wanted.site)
    )
