"""Damaged and hostile checkpoints end in a ValueError that names file and tensor."""

import json
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin.checkpoints.folder import INDEX
from mlx_marlin.checkpoints.reading import read_checkpoint
from support import foreign_checkpoints as foreign
from support.limits import limited
from support.one_layer import (
    LAYER,
    auto_round,
    awq,
    compressed,
    gptq,
    modelopt,
    mxfp4,
    settings_of,
    stock,
)
from support.profiles import profile

FILE = "model.safetensors"
SEEDS = 20 if profile() == "quick" else 40


CHECKPOINTS = [gptq, awq, compressed, stock, auto_round, modelopt, mxfp4]


def read_all(path: Path) -> None:
    for _, value in read_checkpoint(path):
        arrays = [value] if isinstance(value, mx.array) else [value.words, value.scales]
        mx.eval(arrays)


def change_bytes(rng: random.Random, path: Path) -> None:
    file = path / rng.choice([FILE, "config.json"])
    data = bytearray(file.read_bytes())
    # Most of them in the header: anything may stand in the data.
    end = min(len(data), 1200)
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(end)] = rng.choice((0, 0x7D, 0x2D, 0x39, rng.randrange(256)))
    file.write_bytes(data)


def truncate(rng: random.Random, path: Path) -> None:
    file = path / rng.choice([FILE, "config.json"])
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data))])


def change_header(rng: random.Random, path: Path) -> None:
    data = (path / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entry = header[rng.choice(sorted(header))]
    value = rng.choice([0, 1, -1, 7, 2**31, 2**62, 2**70, None, "x", 1.5, [], {}, True])
    match rng.randrange(5):
        case 0:
            entry["dtype"] = rng.choice(
                ["F16", "I32", "U8", "F64", "I64", "BOOL", value]
            )
        case 1:
            entry["shape"] = rng.choice([value, [value], entry["shape"][::-1], []])
        case 2:
            entry["shape"][rng.randrange(len(entry["shape"]))] = value
        case 3:
            entry["data_offsets"][rng.randrange(2)] = value
        case 4:
            header[rng.choice(sorted(header))] = value
    text = json.dumps(header).encode()
    size = rng.choice([len(text), len(text), length, 2**63, 0])
    whole = size.to_bytes(8, "little") + text + data[8 + length :]
    (path / FILE).write_bytes(whole)


def change_arrays(rng: random.Random, path: Path) -> None:
    """Another dtype, another shape or one array less."""
    arrays = dict(mx.load(str(path / FILE)))
    name = rng.choice(sorted(arrays))
    array = arrays[name]
    match rng.randrange(5):
        case 0:
            del arrays[name]
        case 1:
            arrays[name] = array.view(rng.choice([mx.uint8, mx.int16, mx.float16]))
        case 2:
            arrays[name] = array.flatten()
        case 3:
            arrays[name] = array[: rng.randrange(array.shape[0])]
        case 4:
            arrays[name] = array.reshape(1, *array.shape)
    mx.eval(arrays)
    mx.save_safetensors(str(path / FILE), arrays)


def replace_file(rng: random.Random, path: Path) -> None:
    """A file that has no end, is none, is too large or is elsewhere."""
    names = [FILE, "config.json", "tokenizer.json", "quantize_config.json", INDEX]
    file = path / rng.choice(names)
    file.unlink(missing_ok=True)
    match rng.randrange(7):
        case 0:
            os.mkfifo(file)
        case 1:
            file.symlink_to(rng.choice(["/dev/zero", "/dev/tty", "/dev/random"]))
        case 2:
            file.symlink_to(rng.choice([file.name, "nowhere", "..", "/proc/kmsg"]))
        case 3:
            file.mkdir()
        case 4:
            file.touch()
            os.truncate(file, rng.choice([0, 2**30, 2**40]))
        case 5:
            os.mkfifo(path / "fifo")
            file.symlink_to(path / "fifo")
        case 6:
            file.symlink_to("/etc/passwd")


DAMAGES: list[Callable[[random.Random, Path], None]] = [
    change_bytes,
    truncate,
    change_header,
    change_arrays,
    replace_file,
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_damaged_checkpoints_are_refused_or_read(
    tmp_path: Path, damage: Callable, checkpoint: Callable[[], foreign.Folder]
) -> None:
    refused = 0
    for seed in range(SEEDS):
        path = checkpoint().write(tmp_path / str(seed))
        damage(random.Random(f"{damage.__name__} {checkpoint.__name__} {seed}"), path)
        with limited():
            message = outcome(path)
        assert message is None or str(path) in message
        refused += message is not None
    assert refused > SEEDS // 10


def outcome(path: Path) -> str | None:
    """Returns the message of the error that reading ends in; None without one."""
    try:
        read_all(path)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def refusal(path: Path) -> str:
    tracemalloc.start()
    message = outcome(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000
    assert message is not None
    return message


def header(path: Path, text: bytes, data: int = 0) -> Path:
    """Writes a checkpoint's only file: its header, and as many bytes of data."""
    whole = len(text).to_bytes(8, "little") + text + bytes(data)
    (stock().write(path) / FILE).write_bytes(whole)
    return path


def entries(*tensors: tuple[str, str, list[int], int, int]) -> bytes:
    """A header: names, dtypes, shapes, and where the data begin and end."""
    found = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        for name, dtype, shape, begin, end in tensors
    }
    return json.dumps(found).encode()


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = stock().write(tmp_path)
    (path / FILE).write_bytes((2**40).to_bytes(8, "little") + b"{")
    assert "header of 1099511627776 bytes" in refusal(path)


TWICE = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{%s,%s}" % (TWICE, TWICE), "key 'a' occurs twice"),
        (
            entries(("a", "U8", [4], 0, 4), ("b", "U8", [4], 3, 7)),
            "tensors 'a' and 'b' overlap",
        ),
        # Shapes that MLX cannot hold.
        (entries(("x", "F32", [2**32 + 1, 0], 0, 0)), "tensor 'x': shape="),
        (entries(("x", "F32", [1] * 5000, 0, 4)), "tensor 'x': shape="),
        (entries(("x" * 5000, "F32", [1], 0, 4)), "a name of 200 letters or less"),
        (b"{%s,%s}" % ((b'"%s":{}' % (b"x" * 5000),) * 2), "occurs twice"),
        (entries(("x", "F" * 5000, [1], 0, 4)), "tensor 'x': dtype"),
    ],
    ids=["twice", "overlap", "long", "deep", "name", "key", "dtype"],
)
def test_headers_that_lie_are_refused(
    tmp_path: Path, text: bytes, message: str
) -> None:
    said = refusal(header(tmp_path, text, 8))
    assert message in said
    assert len(said.replace(str(tmp_path), "")) < 500


INDEXES: list[tuple[dict[str, Any], str | None]] = [
    *(
        ({"a.b.weight": name}, "expected a safetensors file in the same folder")
        for name in ("../x.safetensors", "/etc/x.safetensors", "x.bin", 1)
    ),
    (
        {f"{LAYER}.weight": FILE, "d.weight": "model-2.safetensors"},
        "model-2.safetensors: no such file",
    ),
    # An index of other weights is not used.
    ({"a.b.qweight": FILE, "c.weight": FILE}, None),
    (
        dict.fromkeys(["a.b.qweight", "c.weight"], "model-00001-of-00002.safetensors"),
        None,
    ),
]


@pytest.mark.parametrize(("index", "message"), INDEXES)
def test_an_index_that_leads_elsewhere_is_refused(
    tmp_path: Path, index: dict[str, Any], message: str | None
) -> None:
    path = stock().write(tmp_path)
    (path / INDEX).write_text(json.dumps({"weight_map": index}))
    if message is None:
        assert [name for name, _ in read_checkpoint(path)] == [f"{LAYER}.weight"]
    else:
        assert message in refusal(path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    path = stock().write(tmp_path)
    stock().write(tmp_path, "model-2.safetensors")
    assert "occurs in model-2.safetensors too" in refusal(path)


@pytest.mark.parametrize("checkpoint", [gptq, compressed])
@pytest.mark.parametrize("change", ["number", "floats", "truths"])
def test_arrays_of_another_kind_are_refused(
    tmp_path: Path, checkpoint: Callable[[], foreign.Folder], change: str
) -> None:
    folder = checkpoint()
    dtype = {"floats": np.float32, "truths": np.bool_}.get(change)
    for name, array in folder.arrays.items():
        if "scale" in name and change == "floats":
            continue  # scales may have any float dtype
        other = array.flatten()[0] if dtype is None else array.astype(dtype)
        changed = foreign.Folder(
            folder.config, {**folder.arrays, name: np.array(other)}
        )
        with pytest.raises(ValueError, match=rf"tensor '{LAYER}\.weight'"):
            read_all(changed.write(tmp_path))


def test_settings_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkpoint_format='marlin', expected one of"):
        read_all(gptq(checkpoint_format="marlin").write(tmp_path))
    folder = compressed()
    settings_of(folder)["config_groups"]["group_0"]["weights"]["num_bits"] = [3]
    with pytest.raises(ValueError, match=r"bits=\[3\], expected an integer"):
        read_all(folder.write(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": ' + "9" * 5000 + "}", r"config\.json: not valid JSON"),
        ('{"a": 0, "b": 0, "b": 0}', r"config\.json: not valid JSON.*key 'b' occurs"),
    ],
)
def test_a_config_that_is_not_read_is_named(
    tmp_path: Path, text: str, message: str
) -> None:
    gptq().write(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_all(tmp_path)
