"""Descriptions of invalid accesses, races and reads of unwritten memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from metal_emulator.memory import MappedArgument
from metal_emulator.reports.context import FaultContext, verb


def access(fault: FaultContext) -> str:
    """Describes an access outside of a buffer, or a write to an input."""
    report = fault.report
    action = verb(report.is_write)
    for buffer in fault.buffers:
        start = buffer.region.reserved
        if start <= report.address < start + buffer.region.reserved_bytes:
            return _buffer_access(buffer, report.address - buffer.address, action)
    if report.address == 0:
        return f"{action} through a misaligned or invalid pointer"
    return f"{action} at address {report.address:#x}, far from every buffer"


def _buffer_access(buffer: MappedArgument, offset: int, action: str) -> str:
    size = buffer.argument.size
    label = f"buffer {buffer.argument.name!r} ({size} bytes)"
    if 0 <= offset + buffer.argument.origin < size:
        return f"{action} to byte {offset} of input {label}"
    return f"{action} outside {label}, at byte {offset}"


def threadgroup_access(fault: FaultContext) -> str:
    """Describes an access outside of a threadgroup variable."""
    report = fault.report
    offset = ctypes.c_int64(report.address).value
    return (
        f"{verb(report.is_write)} outside threadgroup variable {fault.text!r} "
        f"({report.amount} bytes), at byte {offset}"
    )


def threadgroup_canary(fault: FaultContext) -> str:
    """Describes a write close to a threadgroup variable, found after the launch."""
    return f"write outside threadgroup variable {fault.text!r}, close to it"


def threadgroup_limit(fault: FaultContext) -> str:
    """Describes a kernel that needs too much threadgroup memory."""
    return (
        f"{fault.report.amount} bytes of threadgroup memory with variable "
        f"{fault.text!r}, the limit is 32768"
    )


def poison(fault: FaultContext) -> str:
    """Describes a read of memory that was never written."""
    return f"read of a value that was never written, {_byte(fault)}"


def race(fault: FaultContext) -> str:
    """Describes two accesses that nothing orders."""
    report = fault.report
    earlier, now = verb(report.other_is_write), verb(report.is_write)
    between = "threads"
    if tuple(report.other_threadgroup) != tuple(report.threadgroup):
        between = "threadgroups"
    return f"race between {between} on {_byte(fault)}: {now} after {earlier}"


def earlier_access(fault: FaultContext) -> Iterator[str]:
    """Yields the lines of a message on the first of two accesses that race."""
    report = fault.report
    group = ", ".join(map(str, report.other_threadgroup))
    yield (
        f"  earlier {verb(report.other_is_write)} in threadgroup ({group}), "
        f"{fault.thread(report.other_thread)}"
    )
    for location in fault.locations(report.other_site, returns=True):
        yield f"  at {fault.source.quote(location)}"


def canary_message(name: str, buffer: MappedArgument, side: int) -> str:
    """Returns the message on an output whose surrounding bytes were changed."""
    argument = buffer.argument
    where = "before" if side == 1 else "behind"
    return (
        f"kernel {name}: write outside buffer {argument.name!r} "
        f"({argument.size} bytes), close {where} it"
    )


def _byte(fault: FaultContext) -> str:
    """Names the byte that is raced for or unwritten."""
    report = fault.report
    if report.text:
        return f"byte {report.address} of threadgroup variable {fault.text!r}"
    for buffer in fault.buffers:
        offset = report.address - buffer.address + buffer.argument.origin
        if 0 <= offset < buffer.argument.size:
            return f"byte {offset} of buffer {buffer.argument.name!r}"
    return f"the byte at address {report.address:#x}"
