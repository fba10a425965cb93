"""Reading values of a GGUF file in steps that stay inside the file."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from mlx_marlin.checkpoints.gguf.block_types import BLOCK_TYPES, BlockType

Numbers: TypeAlias = "memoryview[Any]"
"""An array of scalars, in the file."""
Value: TypeAlias = "bool | int | float | str | Numbers | list[str] | list[Value]"
"""A value of the metadata."""

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Types of scalars: `struct`'s letter by GGUF's number."""
STRING, ARRAY = 8, 9
DEEPEST = 4
"""Arrays of arrays of ... that are read."""
LONGEST_NAME = 200
"""Bytes of a key or of a tensor's name, which messages quote."""
MOST_DIMENSIONS = 4
LONGEST_TEXT = 1 << 26
"""Bytes of any other string; a tokenizer as JSON has about 2^24."""
MOST_OBJECTS = 1 << 22
"""Strings, arrays and tensors of a file: large vocabularies have 2^18 tokens and 2^19
merges."""


@dataclass(slots=True)
class Cursor:
    """A position in a file's bytes."""

    data: memoryview
    path: Path
    position: int = 0
    objects: int = MOST_OBJECTS  # python objects that may still be made of the file

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.data)

    def take(self, nbytes: int, what: str) -> memoryview:
        """Returns the next bytes."""
        if nbytes > self.size - self.position:
            raise ValueError(
                f"{self.path}: {what} at byte {self.position} has {nbytes} bytes, "
                f"but the file ends at byte {self.size}"
            )
        self.position += nbytes
        return self.data[self.position - nbytes : self.position]

    def number(self, letter: str, what: str = "a number") -> int:
        """Returns the next integer, of `struct`'s type `letter`."""
        value: int = self.scalar(letter, what)  # type: ignore[assignment]
        return value

    def scalar(self, letter: str, what: str) -> bool | int | float:
        """Returns the next scalar, of `struct`'s type `letter`."""
        step = struct.calcsize("<" + letter)
        value: bool | int | float = struct.unpack("<" + letter, self.take(step, what))[
            0
        ]
        return value

    def text(self, what: str, longest: int = LONGEST_TEXT) -> str:
        """Returns the next string."""
        nbytes = self.number("Q", what)
        if nbytes > longest:
            raise ValueError(
                f"{self.path}: {what} at byte {self.position} has {nbytes} bytes, "
                f"more than {longest}"
            )
        return self._decoded(self.take(nbytes, what), what)

    def texts(self, count: int, what: str) -> list[str]:
        """Returns the next strings."""
        self.claim(count, 8, f"strings of {what}")
        read, length = [], struct.Struct("<Q").unpack_from
        data, position, size = self.data, self.position, self.size
        for _ in range(count):  # this loop runs for each token of a vocabulary
            start = position + 8
            if start > size or length(data, position)[0] > size - start:
                raise ValueError(
                    f"{self.path}: a string of {what} at byte {position} "
                    f"ends past the file's {size} bytes"
                )
            position = start + length(data, position)[0]
            read.append(self._decoded(data[start:position], what))
        self.position = position
        return read

    def claim(self, count: int, least: int, what: str) -> None:
        """Checks that things of `least` bytes may follow, before memory is taken."""
        if count > (self.size - self.position) // least:
            raise ValueError(
                f"{self.path}: {count} {what} at byte {self.position} cannot be in "
                f"the {self.size - self.position} bytes that are left"
            )
        self.objects -= count
        if self.objects < 0:
            raise ValueError(
                f"{self.path}: {count} {what} at byte {self.position} are more than "
                f"the {MOST_OBJECTS} strings, arrays and tensors that are read"
            )

    def _decoded(self, octets: memoryview, what: str) -> str:
        try:
            return str(octets, "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path}: {what} before byte {self.position} is not UTF-8: {error}"
            ) from None


def read_metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    """Reads the metadata."""
    cursor.claim(count, 13, "values of metadata")  # key's length, type, value
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.text("a metadata key", LONGEST_NAME)
        if key in metadata:
            raise ValueError(f"{cursor.path}: two values have the key {key!r}")
        what = f"metadata {key!r}"
        metadata[key] = _read_value(cursor, cursor.number("I", what), what, 0)
    return metadata


def read_tensor_info(
    cursor: Cursor,
) -> tuple[str, BlockType, tuple[int, ...], int]:
    """Reads what the file says about a tensor."""
    name = cursor.text("a tensor's name", LONGEST_NAME)
    what = f"tensor {name!r}"
    dimensions = cursor.number("I", what)
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise ValueError(
            f"{cursor.path}: {what} has {dimensions} dimensions, expected 1 to "
            f"{MOST_DIMENSIONS}"
        )
    shape = tuple(cursor.number("Q", what) for _ in range(dimensions))[::-1]
    type_number, offset = cursor.number("I", what), cursor.number("Q", what)
    if type_number not in BLOCK_TYPES:
        raise ValueError(
            f"{cursor.path}: {what} has the unknown type {type_number}; "
            f"known are {', '.join(block.name for block in BLOCK_TYPES.values())}"
        )
    block = BLOCK_TYPES[type_number]
    if 0 in shape:
        raise ValueError(f"{cursor.path}: {what} has the shape {shape}, which is empty")
    if shape[-1] % block.elements:
        raise ValueError(
            f"{cursor.path}: {what} {shape} of {block.name} has rows that are not "
            f"whole blocks of {block.elements}"
        )
    return name, block, shape, offset


def _read_value(cursor: Cursor, type_number: int, what: str, depth: int) -> Value:
    if type_number == STRING:
        return cursor.text(what)
    if type_number == ARRAY:
        return _read_array(cursor, what, depth + 1)
    if type_number not in SCALARS:
        raise ValueError(f"{cursor.path}: {what} has the unknown type {type_number}")
    return cursor.scalar(SCALARS[type_number], what)


def _read_array(cursor: Cursor, what: str, depth: int) -> Value:
    if depth > DEEPEST:
        raise ValueError(f"{cursor.path}: {what} has arrays {depth} deep")
    type_number, count = cursor.number("I", what), cursor.number("Q", what)
    if type_number == STRING:
        return cursor.texts(count, what)
    if type_number == ARRAY:
        cursor.claim(count, 12, f"arrays of {what}")  # type and count of each
        return [_read_array(cursor, what, depth + 1) for _ in range(count)]
    if type_number not in SCALARS:
        raise ValueError(
            f"{cursor.path}: {what} is an array of the unknown type {type_number}"
        )
    letter = SCALARS[type_number]
    nbytes = count * struct.calcsize("<" + letter)
    array: Numbers = cursor.take(nbytes, what).cast(letter)  # type: ignore[call-overload]
    return array
