"""Maps generated lines and addresses to lines of the kernel's author.

All functions of the shim headers are inlined into the kernel, so an address determines
the line and the calls that were inlined around it.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from metal_emulator.compiling import build

if TYPE_CHECKING:
    from elftools.dwarf.die import DIE
    from elftools.dwarf.dwarfinfo import DWARFInfo

FILE = "kernel.metal"
"""File name of the generated text, unless a `#line` of the kernel changes it."""

_LINE = re.compile(r'\s*#\s*line\s+(?P<line>\d+)(?:\s+"(?P<file>[^"]*)")?')
_PLACE = ("file", "line", "column")
_CALLS = frozenset({"DW_TAG_subprogram", "DW_TAG_inlined_subroutine"})


@dataclass(frozen=True)
class Location:
    """A line, as `#line` directives count it."""

    file: str
    line: int


class SourceMap:
    """Names lines of a generated kernel by the header and source of its author."""

    def __init__(self, text: str, header: str, body_line: int) -> None:
        self.text = text
        self._header_lines = len(header.splitlines())
        self._body_line = body_line

    @functools.cached_property
    def _lines(self) -> dict[Location, str]:
        """The text by location, computed only for error messages."""
        lines: dict[Location, str] = {}
        file, number = FILE, 0
        for line in self.text.split("\n"):
            number += 1
            if found := _LINE.match(line):
                file, number = found["file"] or file, int(found["line"]) - 1
            else:
                lines[Location(file, number)] = line.strip()
        return lines

    def name(self, location: Location) -> str:
        """Returns a name such as "source line 12"."""
        if location.file != FILE:
            return f"{location.file} line {location.line}"
        if location.line >= self._body_line:
            return f"source line {location.line - self._body_line + 1}"
        if location.line <= self._header_lines:
            return f"header line {location.line}"
        return f"generated signature, line {location.line - self._header_lines}"

    def quote(self, location: Location) -> str:
        """Returns the name of a line and its text."""
        line = self._lines.get(location, "")
        return f"{self.name(location)}: {line}" if line else self.name(location)


def shorten(file: str) -> str:
    """Returns the name of a file, for shim headers without the folder."""
    return (
        f"the emulator's {Path(file).name}"
        if file.startswith(str(build.INCLUDE))
        else file
    )


def locations(library: Path, offset: int) -> list[Location]:
    """Returns the Metal lines of an address in a library, innermost call first."""
    return locations_by_offset(library, [offset])[offset]


def locations_by_offset(
    library: Path, offsets: Sequence[int]
) -> dict[int, list[Location]]:
    """Returns `locations` of several addresses, reading the line tables once."""
    found: dict[int, list[Location]] = {offset: [] for offset in offsets}
    for offset, program, row, last_row, calls in _debug_info(library, offsets):
        found[offset] += _metal_frames(program, row, last_row, calls)
    return found


def places(library: Path, offsets: Sequence[int]) -> list[tuple[Any, ...] | None]:
    """Returns what tells the places in the source of several addresses apart.

    That is the function, line and column, also of the calls that were inlined around
    it; None where it is not known.
    """
    found: dict[int, tuple[Any, ...]] = {}
    for offset, _, row, _, calls in _debug_info(library, offsets):
        inlined = [
            tuple(call.attributes[f"DW_AT_call_{name}"].value for name in _PLACE)
            for call in calls[1:]
        ]
        if row.line and calls:  # otherwise code that was merged from two lines
            # Two instances of a template are two functions on the same lines.
            function = calls[0].offset
            found[offset] = (function, (row.file, row.line, row.column), *inlined)
    return [found.get(offset) for offset in offsets]


def _debug_info(
    library: Path, offsets: Iterable[int]
) -> Iterator[tuple[int, Any, Any, Any, list[DIE]]]:
    """Yields for each address its line table, row, last row with a line, and calls."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as stream:
        try:
            dwarf = ELFFile(stream).get_dwarf_info()
        except ELFError:
            return
        for unit in dwarf.iter_CUs():
            program = dwarf.line_program_for_CU(unit)
            if program is None:
                continue
            rows = _rows(program, offsets)
            calls = _calls(dwarf, unit.get_top_DIE(), list(rows))
            for offset, (row, last_row) in rows.items():
                yield offset, program, row, last_row, calls[offset]


def _metal_frames(
    program: Any, row: Any, last_row: Any, calls: list[DIE]
) -> list[Location]:
    """Returns the Metal lines of a row, or the last Metal line before it."""
    metal = [frame for frame in _frames(program, row, calls) if _is_metal(frame)]
    previous = _location(program, last_row.file, last_row.line)
    return metal if metal or not _is_metal(previous) else [previous]


def _is_metal(location: Location | None) -> TypeGuard[Location]:
    return location is not None and location.file != "entry" and location.line > 0


def _frames(program: Any, row: Any, calls: list[DIE]) -> Iterator[Location | None]:
    yield _location(program, row.file, row.line)
    # calls[0] is the function itself.
    for call in reversed(calls[1:]):
        file = call.attributes["DW_AT_call_file"].value
        yield _location(program, file, call.attributes["DW_AT_call_line"].value)


def _calls(dwarf: DWARFInfo, top: DIE, offsets: Sequence[int]) -> dict[int, list[DIE]]:
    """Returns the function at each address and its inlined calls, outermost first."""
    found: dict[int, list[DIE]] = {offset: [] for offset in offsets}
    candidates = [(entry, list(offsets)) for entry in top.iter_children()]
    while candidates:
        entry, wanted = candidates.pop()
        covered = [] if entry.is_null() else _covered(dwarf, entry, wanted)
        if not covered:
            continue
        if entry.tag in _CALLS:
            for offset in covered:
                found[offset].append(entry)
        candidates += [(child, covered) for child in entry.iter_children()]
    return found


def _covered(dwarf: DWARFInfo, entry: DIE, offsets: Sequence[int]) -> list[int]:
    attributes = entry.attributes
    if "DW_AT_ranges" in attributes:
        ranges = list(_ranges(dwarf, entry))
        return [o for o in offsets if any(begin <= o < end for begin, end in ranges)]
    if "DW_AT_low_pc" not in attributes or "DW_AT_high_pc" not in attributes:
        return []
    low, high = attributes["DW_AT_low_pc"].value, attributes["DW_AT_high_pc"]
    end = high.value if high.form == "DW_FORM_addr" else low + high.value
    return [offset for offset in offsets if low <= offset < end]


def _ranges(dwarf: DWARFInfo, entry: DIE) -> Iterator[tuple[int, int]]:
    ranges: Any = dwarf.range_lists()
    base = entry.cu.get_top_DIE().attributes.get("DW_AT_low_pc")
    start = base.value if base else 0
    at = entry.attributes["DW_AT_ranges"].value
    for item in ranges.get_range_list_at_offset(at, entry.cu):
        if hasattr(item, "base_address"):
            start = item.base_address
        elif item.is_absolute:
            yield item.begin_offset, item.end_offset
        else:
            yield start + item.begin_offset, start + item.end_offset


def _rows(program: Any, offsets: Iterable[int]) -> dict[int, tuple[Any, Any]]:
    """Returns the row of the line table that covers each address, if there is one.

    Each row comes with the last row that has a line: code that the compiler merged from
    two lines has none.
    """
    wanted = sorted(offsets)
    found: dict[int, tuple[Any, Any]] = {}
    previous = last_row = None
    for entry in program.get_entries():
        state = entry.state
        if state is None:
            continue
        if previous and previous.address < state.address:
            first = bisect_left(wanted, previous.address)
            for offset in wanted[first : bisect_left(wanted, state.address)]:
                found[offset] = previous, last_row
        previous = None if state.end_sequence else state
        last_row = state if state.line or last_row is None else last_row
    return found


def _location(program: Any, index: int, line: int) -> Location | None:
    """Returns a line of the table, or None if it is in a shim header."""
    header = program.header
    first = 0 if header.version >= 5 else 1
    file = header.file_entry[index - first]
    name = file.name.decode()
    if file.dir_index > 0:
        folder = header.include_directory[file.dir_index - first].decode()
        name = f"{folder}/{name}"
    return None if name.startswith(f"{build.SHIM}/") else Location(name, line)
