"""Writes safetensors files one array at a time, as shards with an index.

A header comes before the data, and the data is written first: room for the header is
left, and what it does not need is filled with spaces, which the format allows.
"""

import json
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import mlx.core as mx

from mlx_marlin import regular_files
from mlx_marlin.checkpoints.folder import INDEX
from mlx_marlin.weights.dtypes import dtype_name

SHARD_BYTES = 5_000_000_000
"""Bytes of arrays in a file; Hugging Face's default."""
ENTRY_BYTES = 200
"""Room in a header for an array beside its name."""
ALIGNMENT = 8
"""The data begins at a multiple of it, as the safetensors library writes it."""

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
}
"""The safetensors name of each dtype."""


class Shards:
    """Writes arrays to `model-*.safetensors` in a folder; use it in a `with` block.

    Only the array that is being written is in memory. At the end of the block the files
    get their final names, and there is an index if there are several.

    `shard_bytes`: bytes of arrays after which another file is begun.
    """

    def __init__(
        self,
        path: Path,
        names: list[str],
        metadata: dict[str, str],
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self._path = path
        self._metadata = metadata
        self._shard_bytes = shard_bytes
        room = sum(len(json.dumps(name)) + ENTRY_BYTES for name in names)
        room += len(json.dumps(metadata)) + ENTRY_BYTES
        self._header_bytes = -(-(8 + room) // ALIGNMENT) * ALIGNMENT - 8
        self._files: list[Path] = []
        self._file: BinaryIO | None = None
        self._header: dict[str, object] = {}
        self._end = 0
        self._total = 0
        self._shard_of: dict[str, int] = {}

    def __enter__(self) -> Self:
        """Begins the block."""
        return self

    def __exit__(
        self,
        error: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finishes the files, or closes them if an exception leaves the block."""
        if error is None:
            self._finish_file()
            self._name_files()
        elif self._file is not None:
            with suppress(OSError):  # what it could not write is no longer wanted
                self._file.close()

    def add(self, name: str, array: mx.array) -> None:
        """Writes an array."""
        if name in self._shard_of:
            raise ValueError(f"{self._path}: tensor {name!r} occurs twice")
        if self._file is None or self._end + array.nbytes > self._shard_bytes:
            self._finish_file()
            self._begin_file()
        assert self._file is not None
        if array.size:
            octets = mx.contiguous(array).reshape(-1).view(mx.uint8)
            with regular_files.named(self._files[-1]):
                self._file.write(memoryview(octets))  # type: ignore[arg-type]
        begin, self._end = self._end, self._end + array.nbytes
        self._header[name] = {
            "dtype": DTYPES[dtype_name(array.dtype)],
            "shape": array.shape,
            "data_offsets": [begin, self._end],
        }
        self._shard_of[name] = len(self._files) - 1
        self._total += array.nbytes

    def _begin_file(self) -> None:
        file = self._path / f"model-{len(self._files) + 1:05}.safetensors"
        self._files.append(file)
        self._file = file.open("xb")
        self._file.seek(8 + self._header_bytes)
        self._header = {"__metadata__": self._metadata} if self._metadata else {}
        self._end = 0

    def _finish_file(self) -> None:
        if self._file is None:
            return
        text = json.dumps(self._header).encode()
        assert len(text) <= self._header_bytes, "a header without room"
        with regular_files.named(self._files[-1]):
            self._file.seek(0)
            self._file.write(self._header_bytes.to_bytes(8, "little"))
            self._file.write(text.ljust(self._header_bytes))
            self._file.close()
        self._file = None

    def _name_files(self) -> None:
        count = len(self._files)
        if count == 1:
            self._files[0].rename(self._path / "model.safetensors")
        if count < 2:
            return
        final = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for file, name in zip(self._files, final, strict=True):
            file.rename(self._path / name)
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": {name: final[i] for name, i in self._shard_of.items()},
        }
        regular_files.write(self._path / INDEX, json.dumps(index, indent=1))
