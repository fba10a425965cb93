"""From generated lines and from addresses to places that a reader knows.

The shim's functions are all inlined into the kernel, so one address is enough: the line
that it belongs to, and the calls that were inlined around it.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from mlx_marlin.emulator.compiling import build

if TYPE_CHECKING:
    from elftools.dwarf.die import DIE
    from elftools.dwarf.dwarfinfo import DWARFInfo

FILE = "kernel.metal"
"""Name of the generated text where no `#line` of the kernel's author says otherwise."""

_LINE = re.compile(r'\s*#\s*line\s+(?P<line>\d+)(?:\s+"(?P<file>[^"]*)")?')
_CALLS = frozenset({"DW_TAG_subprogram", "DW_TAG_inlined_subroutine"})


@dataclass(frozen=True)
class Place:
    """A line, as `#line` directives count it."""

    file: str
    line: int


class SourceMap:
    """Names the lines of a generated kernel after its author's header and source."""

    def __init__(self, text: str, header: str, body_line: int) -> None:
        self._text = text
        self._header_lines = len(header.splitlines())
        self._body_line = body_line

    @functools.cached_property
    def _lines(self) -> dict[Place, str]:
        """What stands where; only a report asks, and most kernels have none."""
        lines: dict[Place, str] = {}
        file, number = FILE, 0
        for line in self._text.split("\n"):
            number += 1
            if found := _LINE.match(line):
                file, number = found["file"] or file, int(found["line"]) - 1
            else:
                lines[Place(file, number)] = line.strip()
        return lines

    def name(self, place: Place) -> str:
        """For instance "source line 12"."""
        if place.file != FILE:
            return f"{place.file} line {place.line}"
        if place.line >= self._body_line:
            return f"source line {place.line - self._body_line + 1}"
        if place.line <= self._header_lines:
            return f"header line {place.line}"
        return f"generated signature, line {place.line - self._header_lines}"

    def quote(self, place: Place) -> str:
        """The place and what stands there."""
        line = self._lines.get(place, "")
        return f"{self.name(place)}: {line}" if line else self.name(place)


def shorten(file: str) -> str:
    """A file of the shim without its folder."""
    return (
        f"the emulator's {Path(file).name}"
        if file.startswith(str(build.INCLUDE))
        else file
    )


def places(library: Path, offset: int) -> list[Place]:
    """The Metal lines behind an address of a library, innermost call first.

    Args:
        library: ELF file with line tables.
        offset: Address relative to where the file is loaded.

    Returns:
        Nothing if the file has no line tables that can be read (as on macOS, where they
        stay in the object files) or if the address is not in Metal text.
    """
    return places_of_all(library, [offset])[offset]


def places_of_all(library: Path, offsets: Sequence[int]) -> dict[int, list[Place]]:
    """`places` of many addresses; reading the tables is what takes time."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    found: dict[int, list[Place]] = {offset: [] for offset in offsets}
    with library.open("rb") as stream:
        try:
            dwarf = ELFFile(stream).get_dwarf_info()
        except ELFError:
            return found
        for unit in dwarf.iter_CUs():
            program = dwarf.line_program_for_CU(unit)
            if program is None:
                continue
            rows = _rows(program, found)
            calls = _calls(dwarf, unit.get_top_DIE(), list(rows))
            for offset, (row, near) in rows.items():
                frames = [*_frames(program, row, calls[offset])]
                metal = [place for place in frames if _is_metal(place)]
                nearby = _place(program, near.file, near.line)
                if not metal and _is_metal(nearby):
                    metal = [nearby]
                found[offset] += metal
    return found


def _is_metal(place: Place | None) -> TypeGuard[Place]:
    return place is not None and place.file != "entry" and place.line > 0


def _frames(program: Any, row: Any, calls: list[DIE]) -> Iterator[Place | None]:
    yield _place(program, row.file, row.line)
    # A function without inlined calls has no entry of its own here.
    for call in reversed(calls[1:]):
        file = call.attributes["DW_AT_call_file"].value
        yield _place(program, file, call.attributes["DW_AT_call_line"].value)


def _calls(dwarf: DWARFInfo, top: DIE, offsets: Sequence[int]) -> dict[int, list[DIE]]:
    """The functions at addresses and the calls inlined into them, outermost first."""
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
    """The line table's rows that cover addresses; none for those outside of it.

    Each with the last row before it that has a line, or itself: code that the compiler
    has made of two lines has none.
    """
    wanted = sorted(offsets)
    found: dict[int, tuple[Any, Any]] = {}
    previous = near = None
    for entry in program.get_entries():
        state = entry.state
        if state is None:
            continue
        if previous and previous.address < state.address:
            first = bisect_left(wanted, previous.address)
            for offset in wanted[first : bisect_left(wanted, state.address)]:
                found[offset] = previous, near
        previous = None if state.end_sequence else state
        near = state if state.line or near is None else near
    return found


def _place(program: Any, index: int, line: int) -> Place | None:
    """None for the shim's own lines."""
    header = program.header
    newest = header.version >= 5
    file = header.file_entry[index if newest else index - 1]
    name = file.name.decode()
    if file.dir_index > 0:
        folders = header.include_directory
        folder = folders[file.dir_index if newest else file.dir_index - 1].decode()
        name = f"{folder}/{name}"
    return None if name.startswith(f"{build.SHIM}/") else Place(name, line)
