"""The container is read as it was written, and refuses what lies."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.checkpoints.gguf import Container
from mlx_marlin.checkpoints.gguf.container import LONGEST_NAME, Cursor
from support.gguf_blocks import PLAIN, QUANTIZED
from support.gguf_files import Written, gguf_bytes, random_tensor, text

INTEGERS = {"u8": (8, 0), "i8": (7, 1), "u16": (16, 0), "i16": (15, 1)}
INTEGERS |= {"u32": (32, 0), "i32": (31, 1), "u64": (64, 0), "i64": (63, 1)}
HEAD = 24
"""Bytes before the metadata."""


def integers(kind: str) -> st.SearchStrategy[int]:
    bits, signed = INTEGERS[kind]
    return st.integers(-(1 << bits) * signed, (1 << bits) - 1)


scalars: st.SearchStrategy[tuple[str, Any]] = st.one_of(
    *(st.tuples(st.just(kind), integers(kind)) for kind in INTEGERS),
    st.tuples(st.just("f32"), st.floats(width=32, allow_nan=False)),
    st.tuples(st.just("f64"), st.floats(allow_nan=False)),
    st.tuples(st.just("bool"), st.booleans()),
    st.tuples(st.just("string"), st.text(max_size=9)),
)


def arrays_of(kind: str) -> st.SearchStrategy[tuple[str, Any]]:
    items = st.text(max_size=5) if kind == "string" else integers(kind)
    return st.tuples(st.just("array"), st.tuples(st.just(kind), st.lists(items)))


arrays = st.sampled_from([*INTEGERS, "string"]).flatmap(arrays_of)
nested = st.lists(arrays.map(lambda drawn: drawn[1]), max_size=3)
values = st.one_of(
    scalars,
    arrays,
    nested.map(lambda drawn: ("array", ("array", drawn))),
)


def plain(value: Any) -> Any:
    """Returns what was read, with lists for arrays."""
    if isinstance(value, memoryview):
        return value.tolist()
    return [plain(each) for each in value] if isinstance(value, list) else value


def written(kind: str, value: Any) -> Any:
    if kind != "array":
        return value
    return [written(value[0], each) for each in value[1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def opened(folder: Path, octets: bytes) -> Container:
    path = folder / "tested.gguf"
    path.unlink(missing_ok=True)  # an older map of it may still be in use
    path.write_bytes(octets)
    return Container(path)


@pytest.mark.parametrize("version", [2, 3])
@given(metadata=st.dictionaries(st.text(max_size=20), values, max_size=6))
def test_metadata_is_read_as_it_was_written(
    version: int, metadata: dict[str, Any], folder: Path
) -> None:
    metadata.pop("general.alignment", None)
    metadata.pop("split.count", None)

    container = opened(folder, gguf_bytes(metadata, version=version))

    assert container.version == version
    read = {key: plain(value) for key, value in container.metadata.items()}
    assert read == {key: written(*value) for key, value in metadata.items()}


@pytest.mark.parametrize("alignment", [1, 32, 64, 4096])
def test_tensors_lie_where_the_file_says(alignment: int, folder: Path) -> None:
    random = np.random.default_rng(0)
    tensors = [
        random_tensor("one", "Q4_0", (3, 64), random),
        random_tensor("two", "F32", (5,), random),
        random_tensor("three", "Q6_K", (2, 3, 256), random),
    ]
    metadata = {"general.alignment": alignment}

    container = opened(folder, gguf_bytes(metadata, tensors, alignment=alignment))

    for tensor in tensors:
        info = container.tensors[tensor.name]
        assert (info.type.name, info.shape) == (tensor.type, tensor.shape)
        assert bytes(container.data(info)) == tensor.data


def test_each_of_twelve_parts_has_its_own_tensors(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tensors = [random_tensor(f"t.{i}", "F32", (2, 3), random) for i in range(25)]
    files = [tmp_path / f"m-{part:05}-of-00012.gguf" for part in range(1, 13)]
    for part, file in enumerate(files):
        split = {"split.no": ("u16", part), "split.count": ("u16", 12)}
        split |= {"split.tensors.count": ("i32", 25)}
        file.write_bytes(gguf_bytes(split, tensors[part::12]))

    container = Container(files[0])

    order = [tensor for part in range(12) for tensor in tensors[part::12]]
    assert [*container.tensors] == [tensor.name for tensor in order]
    for tensor in tensors:
        info = container.tensors[tensor.name]
        assert bytes(container.data(info)) == tensor.data
        container.release(info)
        assert bytes(container.data(info)) == tensor.data


def test_the_gguf_package_reads_the_same(folder: Path) -> None:
    random = np.random.default_rng(0)
    tensors = [
        random_tensor(f"tensor.{kind}", kind, (2, 3, 256), random)
        for kind in (*PLAIN, *QUANTIZED)
    ]
    metadata = {"text": "a ▁", "number": ("i16", -3), "list": ["b", "", "cd"]}
    container = opened(folder, gguf_bytes(metadata, tensors))

    reader = GGUFReader(container.path)

    for key, value in container.metadata.items():
        assert reader.fields[key].contents() == value
    assert [tensor.name for tensor in reader.tensors] == [*container.tensors]
    for tensor in reader.tensors:
        info = container.tensors[tensor.name]
        assert tensor.tensor_type.name == info.type.name
        assert tuple(tensor.shape.tolist()) == info.shape[::-1]
        assert tensor.data.tobytes() == bytes(container.data(info))


def test_large_vocabularies_are_read(folder: Path) -> None:
    tokens = [f"token {index} ▁" for index in range(150_000)]

    container = opened(folder, gguf_bytes({"tokens": tokens}))

    assert container.metadata["tokens"] == tokens


GOOD = [
    Written("one", "F32", (4, 8), bytes(128)),
    Written("two", "F32", (8,), bytes(32)),
]


def u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def u64(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def info_bytes(
    name: str = "one",
    shape: tuple[int, ...] = (4, 8),
    type_number: int = 0,
    offset: int = 0,
    dimensions: int | None = None,
) -> bytes:
    """Returns what a file says about a tensor."""
    count = len(shape) if dimensions is None else dimensions
    sizes = u32(count) + u64(*reversed(shape))
    return text(name) + sizes + u32(type_number) + u64(offset)


def head(tensors: int, values: int) -> bytes:
    return b"GGUF" + u32(3) + u64(tensors, values)


def file_of(*infos: bytes) -> bytes:
    octets = head(len(infos), 0) + b"".join(infos)
    return octets + bytes(-len(octets) % 32) + bytes(256)


def file_of_value(value: bytes, count: int = 1) -> bytes:
    return head(0, count) + text("key") + value


def file_of_shape(*shape: int, type_number: int = 0) -> bytes:
    return file_of(info_bytes(shape=shape, type_number=type_number))


HUGE = (1 << 64) - 1
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "short": (b"GG", "first bytes"),
    "magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "version 1": (b"GGUF" + u32(1) + bytes(40), "version 1"),
    "version 4": (b"GGUF" + u32(4) + bytes(40), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
    "tensor count": (head(HUGE, 0), "tensors"),
    "value count": (head(0, HUGE), "values of metadata"),
    "truncated head": (b"GGUF" + u32(3) + u64(0), "ends at byte"),
    "key length": (head(0, 1) + u64(HUGE) + bytes(40), "metadata key"),
    "long key": (
        head(0, 1) + text("k" * (LONGEST_NAME + 1)) + bytes(9),
        "metadata key",
    ),
    "key is not text": (head(0, 1) + u64(1) + b"\xff" + bytes(9), "UTF-8"),
    "value type": (file_of_value(u32(13) + bytes(8)), "'key' has the unknown type 13"),
    "string length": (file_of_value(u32(8) + u64(HUGE)), "metadata 'key'"),
    "string is not text": (file_of_value(u32(8) + u64(1) + b"\xff"), "'key'.*UTF-8"),
    "array type": (file_of_value(u32(9, 13) + u64(1)), "'key' is an array of"),
    "array count": (file_of_value(u32(9, 4) + u64(HUGE)), "metadata 'key'"),
    "string count": (file_of_value(u32(9, 8) + u64(HUGE)), "strings of metadata 'key'"),
    "string in array": (
        file_of_value(u32(9, 8) + u64(2) + text("a") + u64(HUGE)),
        "a string of metadata 'key'",
    ),
    "arrays count": (file_of_value(u32(9, 9) + u64(HUGE)), "arrays of metadata 'key'"),
    "deep arrays": (
        file_of_value(u32(9) + (u32(9) + u64(1)) * 9 + u32(0) + u64(0)),
        "'key' has arrays 5 deep",
    ),
    "same key": (
        file_of_value(u32(4, 1) + text("key") + u32(4, 2), 2),
        "two values have the key 'key'",
    ),
    "alignment": (gguf_bytes({"general.alignment": 24}), "general.alignment"),
    "alignment of 0": (gguf_bytes({"general.alignment": 0}), "general.alignment"),
    "alignment as text": (gguf_bytes({"general.alignment": "32"}), "general.alignment"),
    "several files": (gguf_bytes({"split.count": ("u16", 3)}), "split.count"),
    "no dimension": (file_of_shape(), "'one' has 0 dimensions"),
    "five dimensions": (file_of_shape(*(1,) * 5), "'one' has 5 dimensions"),
    "dimension count": (
        file_of(info_bytes(dimensions=1 << 31)),
        "'one' has 2147483648",
    ),
    "empty shape": (file_of_shape(0, 8), "'one' has the shape"),
    "unknown type": (file_of_shape(4, 8, type_number=4), "has the unknown type 4"),
    "part of a block": (
        file_of_shape(2, 48, type_number=2),
        "'one' .*whole blocks of 32",
    ),
    "large shape": (file_of_shape(1 << 63, 1 << 63), "'one' .* past"),
    "product of 2^64": (file_of_shape(1 << 32, 1 << 32), "'one' .* past"),
    "past the end": (file_of(info_bytes(offset=160)), "'one' .* past"),
    "far offset": (file_of(info_bytes(offset=1 << 63)), "'one' .* past"),
    "odd offset": (file_of(info_bytes(offset=8)), "'one' starts at offset 8"),
    "same name": (
        file_of(info_bytes(), info_bytes(offset=128)),
        "two tensors have the name 'one'",
    ),
    "overlap": (
        file_of(info_bytes(), info_bytes("two", offset=96)),
        "tensors 'one' and 'two' overlap",
    ),
    "name is not text": (
        file_of(u64(1) + b"\xff" + info_bytes("")[8:]),
        "a tensor's name.*UTF-8",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(case: str, folder: Path) -> None:
    octets, message = DAMAGED[case]

    with pytest.raises(ValueError, match=message) as caught:
        opened(folder, octets)

    assert "tested.gguf" in str(caught.value)


def test_every_truncation_is_refused(folder: Path) -> None:
    octets = gguf_bytes({"key": ["a", "b"], "number": 3}, GOOD)
    opened(folder, octets)

    for end in range(len(octets)):
        with pytest.raises(ValueError, match=r"tested\.gguf"):
            opened(folder, octets[:end])


def test_too_many_strings_are_refused() -> None:
    texts = memoryview(bytes(8 * 60))
    cursor = Cursor(texts, Path("tested.gguf"), objects=50)
    assert cursor.texts(30, "first") == [""] * 30

    with pytest.raises(ValueError, match=r"tested\.gguf.*30 strings of second"):
        cursor.texts(30, "second")


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("text", 3),
        ("integer", "3"),
        ("integer", True),
        ("integer", ("i32", -1)),
        ("real", "3"),
        ("real", float("nan")),
        ("real", float("inf")),
        ("integer", [1, 2]),
    ],
)
def test_values_of_another_kind_are_refused(
    method: str, value: Any, folder: Path
) -> None:
    container = opened(folder, gguf_bytes({"key": value}))

    with pytest.raises(ValueError, match=r"tested\.gguf.*'key'"):
        getattr(container, method)("key")
    with pytest.raises(ValueError, match=r"tested\.gguf.*'other' is missing"):
        getattr(container, method)("other")
