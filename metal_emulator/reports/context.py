"""A fault and the launch in which it occurred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from metal_emulator import engine, native
from metal_emulator.language import lines
from metal_emulator.memory import MappedArgument

LANES = 32


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


@dataclass(frozen=True)
class FaultContext:
    """A fault, and what is needed to name threads, buffers and lines."""

    name: str
    kernel: engine.Kernel
    source: lines.SourceMap
    buffers: Sequence[MappedArgument]
    outcome: engine.Outcome

    @property
    def report(self) -> native.Report:
        """The report of the runtime."""
        return self.outcome.report

    @property
    def text(self) -> str:
        """The name of a variable or function in the report, or ""."""
        return bytes(self.report.text or b"").decode()

    @property
    def thread_count(self) -> int:
        """Threads of the threadgroup that faulted."""
        x, y, z = self.report.size
        return int(x * y * z)

    def locations(self, address: int, *, returns: bool) -> list[lines.Location]:
        """Returns the Metal lines of an instruction, innermost call first."""
        offset = address - self.kernel.base - (1 if returns else 0)
        return lines.locations(self.kernel.path, offset) if offset >= 0 else []

    def line(self, return_address: int) -> str:
        """Returns the name of the line that made a call."""
        found = self.locations(return_address, returns=True)
        return self.source.name(found[0]) if found else "an unknown line"

    def thread(self, number: int) -> str:
        """Describes a thread by its position, simdgroup and lane."""
        x, y, _ = self.report.size
        position = (number % x, number // x % y, number // x // y)
        return f"thread {position}, simdgroup {number // LANES} lane {number % LANES}"


def verb(is_write: int) -> str:
    """Returns "write" or "read"."""
    return "write" if is_write else "read"
