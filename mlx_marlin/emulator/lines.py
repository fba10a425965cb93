"""From generated lines and from addresses to places that a reader knows.

The shim's functions are all inlined into the kernel, so one address is enough: the line
that it belongs to, and the calls that were inlined around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_marlin.emulator import build

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
        self._header_lines = len(header.splitlines())
        self._body_line = body_line
        self._lines: dict[Place, str] = {}
        file, number = FILE, 0
        for line in text.split("\n"):
            number += 1
            if found := _LINE.match(line):
                file, number = found["file"] or file, int(found["line"]) - 1
            else:
                self._lines[Place(file, number)] = line.strip()

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
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as stream:
        try:
            dwarf = ELFFile(stream).get_dwarf_info()
        except ELFError:
            return []
        found = [place for place in _frames(dwarf, offset) if place is not None]
    return [place for place in found if place.file != "entry" and place.line]


def _frames(dwarf: DWARFInfo, offset: int) -> Iterator[Place | None]:
    for unit in dwarf.iter_CUs():
        program = dwarf.line_program_for_CU(unit)
        if program is None:
            continue
        row = _row(program, offset)
        if row is None:
            continue
        yield _place(program, row.file, row.line)
        # A function without inlined calls has no entry of its own here.
        calls = _calls(dwarf, unit.get_top_DIE(), offset)
        for call in reversed(calls[1:]):
            file = call.attributes["DW_AT_call_file"].value
            yield _place(program, file, call.attributes["DW_AT_call_line"].value)


def _calls(dwarf: DWARFInfo, top: DIE, offset: int) -> list[DIE]:
    """The function at an address and the calls inlined into it, outermost first."""
    found: list[DIE] = []
    candidates = list(top.iter_children())
    while candidates:
        entry = candidates.pop()
        if entry.is_null() or not _covers(dwarf, entry, offset):
            continue
        if entry.tag in _CALLS:
            found.append(entry)
        candidates = list(entry.iter_children())
    return found


def _covers(dwarf: DWARFInfo, entry: DIE, offset: int) -> bool:
    attributes = entry.attributes
    if "DW_AT_ranges" in attributes:
        return any(begin <= offset < end for begin, end in _ranges(dwarf, entry))
    if "DW_AT_low_pc" not in attributes or "DW_AT_high_pc" not in attributes:
        return False
    low, high = attributes["DW_AT_low_pc"].value, attributes["DW_AT_high_pc"]
    end = high.value if high.form == "DW_FORM_addr" else low + high.value
    return bool(low <= offset < end)


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


def _row(program: Any, offset: int) -> Any:
    """The line table's row that covers an address, or None."""
    previous = None
    for entry in program.get_entries():
        state = entry.state
        if state is None:
            continue
        if previous and previous.address <= offset < state.address:
            return previous
        previous = None if state.end_sequence else state
    return None


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
