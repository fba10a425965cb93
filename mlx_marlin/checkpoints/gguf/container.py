"""The container of GGUF: metadata, and where each tensor lies.

Nothing in a file is trusted: every count, length and offset is compared with the size
of the file before memory is taken.
"""

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from mlx_marlin import regular_files
from mlx_marlin.checkpoints.gguf.blocks import BLOCK_TYPES, BlockType
from mlx_marlin.checkpoints.location import PART

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
        return int(self.scalar(letter, what))

    def scalar(self, letter: str, what: str) -> bool | int | float:
        """Returns the next scalar, of `struct`'s type `letter`."""
        format = struct.Struct("<" + letter)
        value: bool | int | float = format.unpack(self.take(format.size, what))[0]
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


MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the file says about a tensor."""

    name: str  # name in llama.cpp, such as "blk.0.attn_q.weight"
    type: BlockType
    shape: tuple[int, ...]  # shape, rows first: [..., n, k]
    start: int  # its first byte in the file
    nbytes: int


class Container:
    """A GGUF file, mapped into memory.

    In `metadata` an array of numbers is a memoryview, one of strings or of arrays a
    list. `tensors` are in the order of the file.
    """

    def __init__(self, path: str | Path, number: int = 0):
        """Opens and checks a file, and the other parts of a divided model.

        A file is of version 2 or 3, little-endian, and the first part; `number` tells
        which part of another file it is. An error names the key or the tensor.
        """
        self.path = Path(path)
        with regular_files.open_file(self.path) as file:
            if not file.read(1):
                raise ValueError(f"{self.path}: the file is empty")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = Cursor(memoryview(self._map), self.path)
        self.version = _read_version(cursor)
        tensor_count, value_count = cursor.number("Q"), cursor.number("Q")
        self.metadata = read_metadata(cursor, value_count)
        self.tensors = self._read_tensors(cursor, tensor_count)
        self._parts: dict[str, Container] = {}
        if number == 0:
            self._add_parts()
        elif self.integer("split.no", number) != number:
            raise self.refusal("split.no", f"must be {number}, as in the file's name")

    def data(self, info: TensorInfo) -> memoryview:
        """Returns the bytes of a tensor, without a copy."""
        if (part := self._parts.get(info.name)) is not None:
            return part.data(info)
        return memoryview(self._map)[info.start : info.start + info.nbytes]

    def release(self, info: TensorInfo) -> None:
        """Gives back the memory of a tensor's bytes, which are read anew if needed.

        Otherwise pages of the file count as memory of the process while it is open.
        """
        if (part := self._parts.get(info.name)) is not None:
            part.release(info)
        elif hasattr(mmap, "MADV_DONTNEED"):
            first = info.start - info.start % mmap.PAGESIZE
            end = info.start + info.nbytes
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)

    def text(self, key: str) -> str:
        """Returns a string of the metadata."""
        value = self._value(key)
        if not isinstance(value, str):
            raise self.refusal(key, "is not a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns an integer of the metadata, or the default if it is missing."""
        if default is not None and key not in self.metadata:
            return default
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refusal(key, "is not an integer of at least 0")
        return value

    def real(self, key: str) -> float:
        """Returns a number of the metadata."""
        value = self._value(key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or value - value != 0:  # type: ignore[operator]
            raise self.refusal(key, "is not a finite number")
        return float(value)  # type: ignore[arg-type]

    def flag(self, key: str, default: bool = False) -> bool:
        """Returns a truth value of the metadata."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "is neither True nor False")
        return value

    def refusal(self, key: str, reason: str) -> ValueError:
        """Returns an error about a key of the metadata."""
        shown = repr(self.metadata[key])[:60] if key in self.metadata else "missing"
        return ValueError(f"{self.path}: metadata {key!r} ({shown}) {reason}")

    def _value(self, key: str) -> Value:
        if key not in self.metadata:
            raise ValueError(f"{self.path}: metadata {key!r} is missing")
        return self.metadata[key]

    def _add_parts(self) -> None:
        """Adds the tensors of the other files of a divided model."""
        count = self.integer("split.count", 1)
        if count > 1:
            for number, file in enumerate(self._later_parts(count), 1):
                part = Container(file, number)
                self._check_part(part)
                for tensor, info in part.tensors.items():
                    if tensor in self.tensors:
                        raise ValueError(f"{file}: tensor {tensor!r} is in two parts")
                    self.tensors[tensor], self._parts[tensor] = info, part
        total = "split.tensors.count"
        if self.integer(total, len(self.tensors)) != len(self.tensors):
            raise self.refusal(total, f"must be {len(self.tensors)}, as in all parts")

    def _later_parts(self, count: int) -> list[Path]:
        """Returns the files of the second and later parts."""
        name = PART.fullmatch(self.path.name)
        if name is None or int(name[3]) != count:
            raise self.refusal(
                "split.count",
                f"says that the model is divided into {count} files, expected a name "
                f"such as MODEL-00001-of-{count:05}.gguf",
            )
        files = [
            self.path.with_name(f"{name[1]}-{number:05}-of-{count:05}.gguf")
            for number in range(1, count + 1)
        ]
        if self.integer("split.no", 0) != 0 or files[0] != self.path:
            raise self.refusal("split.no", f"expected the first part, {files[0].name}")
        return files[1:]

    def _check_part(self, part: "Container") -> None:
        """Refuses metadata of a later part that are not those of the first, or new.

        Tools write all metadata to the first part and only "split.*" to the others.
        """
        for key in part.metadata.keys() - {"split.no", "general.alignment"}:
            if key not in self.metadata:
                raise part.refusal(key, f"expected no such key: {self.path} has none")
            if part.metadata[key] != self.metadata[key]:
                raise part.refusal(key, f"must be that of {self.path}")

    def _read_tensors(self, cursor: Cursor, count: int) -> dict[str, TensorInfo]:
        cursor.claim(count, 32, "tensors")
        key = "general.alignment"
        alignment = self.integer(key, DEFAULT_ALIGNMENT)
        if alignment == 0 or alignment & (alignment - 1):
            raise self.refusal(key, "is not a power of two")
        read = [read_tensor_info(cursor) for _ in range(count)]
        start = -(-cursor.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, block, shape, offset in read:
            nbytes = prod(shape) // block.elements * block.nbytes
            info = TensorInfo(name, block, shape, start + offset, nbytes)
            if name in tensors:
                raise ValueError(f"{self.path}: two tensors have the name {name!r}")
            if offset % alignment:
                raise ValueError(
                    f"{self.path}: tensor {name!r} starts at offset {offset}, "
                    f"which is not a multiple of {alignment}"
                )
            if info.start + nbytes > cursor.size:
                raise ValueError(
                    f"{self.path}: tensor {name!r} {shape} of {block.name} ends at "
                    f"byte {info.start + nbytes}, past the file's {cursor.size}"
                )
            tensors[name] = info
        ordered = sorted(tensors.values(), key=lambda info: info.start)
        for before, after in pairwise(ordered):
            if before.start + before.nbytes > after.start:
                raise ValueError(
                    f"{self.path}: tensors {before.name!r} and {after.name!r} overlap"
                )
        return tensors


def _read_version(cursor: Cursor) -> int:
    if bytes(cursor.take(4, "the file's first bytes")) != MAGIC:
        raise ValueError(f"{cursor.path}: not a GGUF file, it does not begin with GGUF")
    version = cursor.number("I")
    if version & 0xFFFF == 0:
        raise ValueError(
            f"{cursor.path}: a big-endian GGUF file, only little-endian ones are read"
        )
    if version not in VERSIONS:
        raise ValueError(
            f"{cursor.path}: GGUF version {version} is not one of {[*VERSIONS]}"
        )
    return version
