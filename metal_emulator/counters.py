"""Counters of a kernel's memory traffic and operations, equal on every machine.

Counters are not times. Bytes and cache lines are those that simdgroups request; caches
are not modelled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Traffic:
    """Accesses of one buffer or threadgroup variable, on one line or on all lines.

    An access is one execution of an instruction by the lanes of a simdgroup. An access
    is repeated if the same lanes have accessed the same addresses since their last
    barrier or simdgroup operation: a compiler that knows address spaces would keep the
    value in a register. Only the bytes of repeated accesses are counted.

    Attributes:
        memory: Name of the buffer or of the threadgroup variable.
        space: "device" or "threadgroup".
        line: Name of the line, or "" for all lines.
        read_bytes: Bytes read. A byte that several lanes read in one access counts
            once.
        repeated_read_bytes: Bytes read by repeated accesses.
        written_bytes: Bytes written, counted like bytes read.
        repeated_written_bytes: Bytes written by repeated accesses.
        accesses: Accesses, after accesses to neighbouring bytes are merged into
            accesses of up to 16 bytes per lane, as a GPU's compiler does.
        lines_128: Aligned cache lines of 128 bytes that these accesses touch; 0 for
            threadgroup memory.
        lines_64: Cache lines of 64 bytes.
        lines_32: Cache lines of 32 bytes.
        bank_cycles: Cycles of threadgroup memory with 32 banks of 4 bytes, each of
            which serves one word per cycle to any number of lanes.
        lane_read_bytes: Bytes that reads return to lanes: a byte that several lanes
            read in one access counts once for each. Repeated accesses are left out.
        atomics: Atomic operations of all lanes; their bytes are not counted.
    """

    memory: str
    space: str
    line: str
    read_bytes: int = 0
    repeated_read_bytes: int = 0
    written_bytes: int = 0
    repeated_written_bytes: int = 0
    accesses: int = 0
    lines_128: int = 0
    lines_64: int = 0
    lines_32: int = 0
    bank_cycles: int = 0
    lane_read_bytes: int = 0
    atomics: int = 0


@dataclass(frozen=True)
class Operation:
    """The number of executions of a collective operation on one line.

    Attributes:
        kind: "matrix" (multiply-accumulate), "matrix memory" (load and store),
            "tensor" (matmul2d), "simd" (sums, scans, votes), "shuffle",
            "simdgroup barrier" or "barrier".
        name: The Metal function.
        line: Name of the line.
        count: Executions by simdgroups, or by threadgroups for "barrier".
    """

    kind: str
    name: str
    line: str
    count: int


@dataclass(frozen=True)
class Counters:
    """The counters of one launch, equal for every seed and number of workers.

    Attributes:
        kernel: Name of the kernel.
        threadgroups: Threadgroups of the launch.
        threadgroup_bytes: Threadgroup memory of one threadgroup.
        traffic: Accesses per memory and line, sorted by memory and line.
        operations: Collective operations per function and line.
    """

    kernel: str
    threadgroups: int
    threadgroup_bytes: int
    traffic: tuple[Traffic, ...]
    operations: tuple[Operation, ...]

    def of(self, memory: str) -> Traffic:
        """Returns the traffic of one buffer or threadgroup variable on all lines.

        Raises:
            ValueError: If the kernel does not access it.
        """
        for found in self.memories():
            if found.memory == memory:
                return found
        known = ", ".join(repr(traffic.memory) for traffic in self.memories())
        raise ValueError(
            f"memory={memory!r}, expected one the kernel accesses: {known}"
        )

    def memories(self) -> list[Traffic]:
        """Returns the traffic of every memory, summed over the lines."""
        return _summed(
            self.traffic, lambda traffic: (traffic.memory, traffic.space, "")
        )

    def count(self, kind: str) -> int:
        """Returns the executions of one kind of operation (see `Operation`)."""
        return sum(
            operation.count for operation in self.operations if operation.kind == kind
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the counters as values that `json.dumps` accepts."""
        return asdict(self)

    def table(self) -> str:
        """Returns the counters as text: totals, then lines, then operations."""
        head = (
            f"kernel {self.kernel}: {self.threadgroups} threadgroups, "
            f"{self.threadgroup_bytes} bytes of threadgroup memory each"
        )
        rows = [*self.memories(), *self.traffic]
        parts = [head, *_columns(_TRAFFIC_HEAD, map(_traffic_row, rows))]
        if self.operations:
            cells = ([o.name, o.line, str(o.count)] for o in self.operations)
            parts += ["", *_columns(["operation", "line", "count"], cells)]
        return "\n".join(parts)


_NUMBERS = [field.name for field in fields(Traffic)][3:]
_TRAFFIC_HEAD = ["memory", "line", *(name.replace("_", " ") for name in _NUMBERS)]


def _traffic_row(traffic: Traffic) -> list[str]:
    name = traffic.memory if traffic.space == "device" else f"{traffic.memory} (tg)"
    return [name, traffic.line or "all", *map(str, astuple(traffic)[3:])]


def _columns(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    cells = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in cells
    ]


def _summed(
    traffic: Sequence[Traffic], key: Callable[[Traffic], tuple[str, str, str]]
) -> list[Traffic]:
    totals: dict[tuple[str, str, str], list[int]] = {}
    for part in traffic:
        numbers = astuple(part)[3:]
        total = totals.setdefault(key(part), [0] * len(numbers))
        totals[key(part)] = [a + b for a, b in zip(total, numbers, strict=True)]
    return [Traffic(*labels, *numbers) for labels, numbers in totals.items()]


def merged(traffic: Sequence[Traffic]) -> tuple[Traffic, ...]:
    """Returns one entry per memory and line, sorted by memory and line."""
    total = _summed(traffic, lambda part: (part.memory, part.space, part.line))
    return tuple(
        sorted(total, key=lambda part: (part.space, part.memory, _numbered(part.line)))
    )


def _numbered(line: str) -> list[str | int]:
    """Returns a key that sorts line 10 after line 9."""
    return [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", line)]
