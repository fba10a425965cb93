"""What a kernel moves and does, counted: a record that is equal on every machine.

Nothing here is a time. Bytes and lines say what a simdgroup asks of memory, not what a
cache answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Traffic:
    """What simdgroups do to one memory, on one line or on all.

    A simdgroup's access is one execution of an instruction by its lanes. An access is
    repeated if the same lanes have made it to the same addresses since they last met
    in a barrier or a simdgroup operation: a compiler that knows about address spaces
    would keep the value. Repeated accesses count in no other number than their bytes.

    Attributes:
        memory: Name of the buffer or of the threadgroup variable.
        space: "device" or "threadgroup".
        line: Where, or "" for everywhere.
        read_bytes: Bytes read; lanes that read the same byte in one access count once.
        repeated_read_bytes: Likewise, of repeated accesses.
        written_bytes: Bytes written, counted as reads are.
        repeated_written_bytes: Likewise, of repeated accesses.
        accesses: Accesses, after those to neighbouring bytes were merged into accesses
            of up to 16 bytes a lane, as a GPU's compiler does.
        lines_128: Aligned lines of 128 bytes that these accesses touch; device only.
        lines_64: Lines of 64 bytes.
        lines_32: Lines of 32 bytes.
        bank_cycles: Cycles that threadgroup memory of 32 banks of 4 bytes takes, if
            each serves one word a cycle to any number of lanes.
        atomics: Atomic operations, each lane's counted; no bytes are counted for them.
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
    atomics: int = 0


@dataclass(frozen=True)
class Operation:
    """How often simdgroups meet on one line.

    Attributes:
        kind: "matrix" (multiply-accumulate), "matrix memory" (load and store), "simd"
            (sums, scans, votes), "shuffle", "simdgroup barrier" or "barrier".
        name: The Metal function.
        line: Where.
        count: Executions by a simdgroup; of "barrier", by a threadgroup.
    """

    kind: str
    name: str
    line: str
    count: int


@dataclass(frozen=True)
class Counters:
    """One launch of one kernel; equal for every seed and number of workers.

    Attributes:
        kernel: Its name.
        threadgroups: Threadgroups of the launch.
        threadgroup_bytes: Threadgroup memory of one of them.
        traffic: Per memory and line, in order of name and line.
        operations: Per function and line.
    """

    kernel: str
    threadgroups: int
    threadgroup_bytes: int
    traffic: tuple[Traffic, ...]
    operations: tuple[Operation, ...]

    def of(self, memory: str) -> Traffic:
        """All lines' traffic of one buffer or threadgroup variable together.

        Raises:
            ValueError: If the kernel never touches it.
        """
        for found in self.memories():
            if found.memory == memory:
                return found
        known = ", ".join(repr(each.memory) for each in self.memories())
        raise ValueError(f"memory={memory!r} is none of those accessed: {known}")

    def memories(self) -> list[Traffic]:
        """The traffic of each memory, all lines together."""
        return _summed(self.traffic, lambda each: (each.memory, each.space, ""))

    def count(self, kind: str) -> int:
        """Executions of one kind of operation (see `Operation`) on all lines."""
        return sum(each.count for each in self.operations if each.kind == kind)

    def as_json(self) -> dict[str, Any]:
        """The record as what `json.dumps` takes."""
        return asdict(self)

    def table(self) -> str:
        """The record for a reader: totals of each memory, then lines, then meetings."""
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
    for each in traffic:
        numbers = astuple(each)[3:]
        known = totals.setdefault(key(each), [0] * len(numbers))
        totals[key(each)] = [a + b for a, b in zip(known, numbers, strict=True)]
    return [Traffic(*where, *numbers) for where, numbers in totals.items()]


def merged(traffic: Sequence[Traffic]) -> tuple[Traffic, ...]:
    """One entry for each memory and line, in order of name and line."""
    total = _summed(traffic, lambda each: (each.memory, each.space, each.line))
    return tuple(sorted(total, key=lambda each: (each.space, each.memory, each.line)))
