"""Writes the files of a native GPU compiler, from their published structures.

Mach-O as Apple's <mach-o/loader.h> has it, and the metadata as "FlatBuffers Internals"
describes a buffer.
"""

import struct
from collections.abc import Mapping, Sequence

Section = tuple[str, str, bytes]


def mach_o(sections: Sequence[Section]) -> bytes:
    """Returns an object file: one segment without a name that has all sections."""
    command = 72 + 80 * len(sections)
    offset = 32 + 24 + command  # an LC_UUID precedes the segment
    header = struct.pack("<8I", 0xFEEDFACF, 0x1000013, 0, 1, 2, 24 + command, 0, 0)
    uuid = struct.pack("<2I16s", 0x1B, 24, b"u" * 16)
    total = sum(len(content) for *_, content in sections)
    segment = struct.pack("<2I16s4Q", 0x19, command, b"", 0, total, offset, total)
    segment += struct.pack("<4I", 7, 7, len(sections), 0)
    listed = b""
    for segment_name, name, content in sections:
        names = struct.pack("<16s16s", name.encode(), segment_name.encode())
        where = struct.pack("<2Q8I", 0, len(content), offset, *(0,) * 7)
        listed += names + where
        offset += len(content)
    return header + uuid + segment + listed + b"".join(each for *_, each in sections)


def universal(files: Sequence[bytes], magic: int = 0xCBFEBABE) -> bytes:
    """Returns a file with several ones."""
    offset, heads = 8 + 20 * len(files), b""
    for file in files:
        heads += struct.pack(">5I", 0x1000013, 0, offset, len(file), 0)
        offset += len(file)
    return struct.pack(">2I", magic, len(files)) + heads + b"".join(files)


def table(fields: Mapping[int, tuple[int, int]], before: bytes = b"") -> bytes:
    """Returns a table of integers (value, bytes) behind its own list of fields."""
    offsets, body = [0] * (max(fields) + 1), b""
    for number, (value, width) in sorted(fields.items(), key=lambda f: -f[1][1]):
        offsets[number] = 4 + len(body)
        body += value.to_bytes(width, "little")
    body += bytes(-len(body) % 4)
    listed = struct.pack(f"<{len(offsets)}H", *offsets)
    listed = struct.pack("<2H", 4 + len(listed), 4 + len(body)) + listed
    listed += bytes(-len(before + listed) % 4)
    back = len(listed)
    return before + listed + struct.pack("<i", back) + body


def metadata(registers: int, spilled: int, width: int = 4) -> bytes:
    """Returns a buffer whose root names, in field 0, the table with both numbers.

    A number of 0 is left out, as builders do.
    """
    fields = {3: (7, 1), 5: (0xABCD, 2), 20: (9, 4), 0: (registers, width)}
    if spilled:
        fields[14] = (spilled, width)
    # The root is at 12: 4 bytes of its own offset, 6 of its list of fields, 2 to align.
    root = struct.pack("<I3H2xi", 12, 6, 8, 4, 8)
    inner = table(fields)
    begin = len(inner) - _table_bytes(inner)
    reference = 4 + begin  # from the reference, which 4 bytes of the root hold
    return root + struct.pack("<I", reference) + inner


def _table_bytes(inner: bytes) -> int:
    """Returns the bytes of the table at the end of what `table` wrote."""
    return struct.unpack_from("<2H", inner)[1]


def gpu_file(registers: int, spilled: int, code: int, width: int = 4) -> bytes:
    """Returns what `metal-tt` writes for a kernel."""
    kernel = mach_o(
        [
            ("__TEXT", "__text", b"\x08\x00" * (code // 2)),
            ("__GPU_METADATA", "__compute", metadata(registers, spilled, width)),
            ("__GPU_STATS", "__compute", b"s" * 5),
        ]
    )
    return mach_o([("__TEXT", "__vertex", b"v"), ("__TEXT", "__compute", kernel)])
