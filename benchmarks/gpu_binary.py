"""Reads what Apple's native GPU compiler says of a kernel: registers, spills, size.

`metal-tt` writes a Mach-O file, alone or as a slice of a universal file. Its section
`__TEXT,__compute` holds one more Mach-O file, the kernel. There the section
`__TEXT,__text` is the code, and `__GPU_METADATA,__compute` is a FlatBuffer: the table
that field 0 of its root names has the registers and the spilled bytes.

Sources: Mach-O: Apple's <mach-o/loader.h> and <mach-o/fat.h>. FlatBuffers: "FlatBuffers
Internals" of flatbuffers.dev. The fields: meTile's reader of Metal archives (EXP-0020).
Every offset is checked, because a field of another compiler may mean something else.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MACH_O = 0xFEEDFACF
UNIVERSAL = (0xCAFEBABE, 0xCBFEBABE)
"""Of universal files in general, and of those of GPU code. They are big-endian."""
MOST_SLICES = 64
HEADER_BYTES, SEGMENT_BYTES, SECTION_BYTES = 32, 72, 80
"""Sizes of `mach_header_64`, `segment_command_64` and `section_64`."""
SEGMENT_COMMAND = 0x19
"""`LC_SEGMENT_64`."""
REGISTERS, SPILLED = 0, 14
"""Fields of the inner table: 32-bit registers of a thread, and its spilled bytes."""
MOST_REGISTERS = 512
"""More than any GPU has for a thread: then the field is another one."""
Sections = dict[tuple[str, str], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a native compiler says of a kernel.

    Attributes:
        registers: 32-bit registers of a thread.
        spilled_bytes: Bytes of a thread that did not fit its registers.
        code_bytes: Size of the instructions.
    """

    registers: int
    spilled_bytes: int
    code_bytes: int


def figures(data: bytes) -> Figures:
    """Returns the figures of the kernel in a file of `metal-tt`.

    Args:
        data: The file, with one kernel.

    Raises:
        ValueError: If the file is damaged, or has another structure.
    """
    for file in _slices(data):
        outer = sections(file)
        if kernel := outer.get(("__TEXT", "__compute")):
            break
    else:
        raise ValueError("the file has no section __TEXT,__compute")
    inner = sections(kernel)
    for wanted in (("__TEXT", "__text"), ("__GPU_METADATA", "__compute")):
        if wanted not in inner:
            raise ValueError(f"the kernel has no section {','.join(wanted)}")
    registers, spilled = _metadata(inner["__GPU_METADATA", "__compute"])
    if not 0 < registers <= MOST_REGISTERS:
        raise ValueError(f"registers={registers}, expected 1 to {MOST_REGISTERS}")
    code = len(inner["__TEXT", "__text"])
    return Figures(registers=registers, spilled_bytes=spilled, code_bytes=code)


def sections(data: bytes) -> Sections:
    """Returns the contents of the sections of a 64-bit Mach-O file, by their names.

    The names are those in the section itself: an object file has all of them in one
    segment without a name.

    Raises:
        ValueError: If the file is damaged, or no such file.
    """
    magic, *_, commands, size, _, _ = _unpacked("<8I", data, 0, "the header")
    if magic != MACH_O:
        raise ValueError(f"magic number {magic:#x}, expected {MACH_O:#x}")
    end = HEADER_BYTES + size
    found: Sections = {}
    at = HEADER_BYTES
    for _ in range(commands):
        command, length = _unpacked("<2I", data, at, "a command")
        if length < 8 or at + length > min(end, len(data)):
            raise ValueError(f"a command of {length} bytes at {at} exceeds the file")
        if command == SEGMENT_COMMAND:
            found.update(_of_segment(data, at, length))
        at += length
    return found


def _of_segment(
    data: bytes, at: int, length: int
) -> Iterator[tuple[tuple[str, str], bytes]]:
    (count,) = _unpacked("<I", data, at + 64, "a segment")
    if SEGMENT_BYTES + count * SECTION_BYTES > length:
        raise ValueError(f"{count} sections exceed a command of {length} bytes")
    for index in range(count):
        begin = at + SEGMENT_BYTES + index * SECTION_BYTES
        name, segment, _, size, offset = _unpacked(
            "<16s16s2QI", data, begin, "a section"
        )
        if offset + size > len(data):
            raise ValueError(f"a section of {size} bytes at {offset} exceeds the file")
        yield (_text(segment), _text(name)), data[offset : offset + size]


def _slices(data: bytes) -> Iterator[bytes]:
    """Yields the files of a universal file, or the file itself."""
    magic, count = _unpacked(">2I", data, 0, "the header")
    if magic not in UNIVERSAL:
        yield data
        return
    if count > MOST_SLICES:
        raise ValueError(f"{count} slices, expected at most {MOST_SLICES}")
    for index in range(count):
        _, _, offset, size, _ = _unpacked(">5I", data, 8 + 20 * index, "a slice")
        if offset + size > len(data):
            raise ValueError(f"a slice of {size} bytes at {offset} exceeds the file")
        part = data[offset : offset + size]
        if part[:4] == struct.pack("<I", MACH_O):
            yield part


def _metadata(data: bytes) -> tuple[int, int]:
    """Returns registers and spilled bytes; a field that is not stored is 0."""
    root = _table(data, _unpacked("<I", data, 0, "the metadata")[0])
    if 0 not in root:
        raise ValueError("field 0 of the metadata's root is missing")
    at, _ = root[0]
    inner = _table(data, at + _unpacked("<I", data, at, "a reference")[0])
    return _integer(data, inner, REGISTERS), _integer(data, inner, SPILLED)


def _integer(data: bytes, table: dict[int, tuple[int, int]], field: int) -> int:
    at, room = table.get(field, (0, 0))
    return int.from_bytes(data[at : at + min(room, 4)], "little")


def _table(data: bytes, at: int) -> dict[int, tuple[int, int]]:
    """Returns where a table's fields are, and the bytes to the next one.

    The schema is not known, so a number is as wide as the bytes before the next field,
    which alignment fills with zeros.
    """
    (back,) = _unpacked("<i", data, at, "a table")
    begin = at - back
    length, size = _unpacked("<2H", data, begin, "a table's fields")
    if length < 4 or length % 2 or at + size > len(data):
        raise ValueError(f"a table of {size} bytes with {length} of fields is damaged")
    offsets = _unpacked(f"<{length // 2 - 2}H", data, begin + 4, "a table's fields")
    if any(offset and not 4 <= offset < size for offset in offsets):
        raise ValueError(f"a field is outside its table of {size} bytes")
    ends = sorted({*filter(None, offsets), size})
    room = {first: after - first for first, after in pairwise(ends)}
    return {
        index: (at + offset, room[offset])
        for index, offset in enumerate(offsets)
        if offset
    }


def _unpacked(format: str, data: bytes, at: int, what: str) -> tuple[Any, ...]:
    if at < 0 or at + struct.calcsize(format) > len(data):
        raise ValueError(f"{what} at {at} exceeds {len(data)} bytes")
    return struct.unpack_from(format, data, at)


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode("latin-1")
