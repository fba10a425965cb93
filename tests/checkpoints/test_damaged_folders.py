"""Damaged and hostile checkpoints end in a ValueError that names file and tensor."""

import json
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from mlx_marlin.checkpoints.folder import INDEX
from mlx_marlin.checkpoints.reading import read_checkpoint
from support import foreign_checkpoints as foreign
from support.limits import limited

FILE = "model.safetensors"


def gptq() -> foreign.Folder:
    weight = foreign.drawn_weight(np.random.default_rng(0), 32, 128, 64, 4)
    return foreign.Folder(
        foreign.gptq_config(4, 2), foreign.gptq_arrays("a.b", weight, 2)
    )


def awq() -> foreign.Folder:
    weight = foreign.drawn_weight(np.random.default_rng(0), 32, 128, 64, 4)
    return foreign.Folder(foreign.awq_config(), foreign.awq_arrays("a.b", weight))


def compressed() -> foreign.Folder:
    weight = foreign.drawn_weight(np.random.default_rng(0), 32, 128, 64, 3)
    return foreign.Folder(
        foreign.compressed_config(3),
        foreign.compressed_arrays("a.b", weight, symmetric=False),
    )


def stock() -> foreign.Folder:
    rng = np.random.default_rng(0)
    arrays = {
        "a.b.weight": rng.integers(0, 2**32, (32, 16), np.uint32),
        "a.b.scales": rng.uniform(size=(32, 2)).astype(np.float16),
        "a.b.biases": rng.uniform(size=(32, 2)).astype(np.float16),
        "c.weight": rng.uniform(size=(4, 8)).astype(np.float32),
    }
    return foreign.Folder({"quantization": {"bits": 4, "group_size": 64}}, arrays)


def auto_round() -> foreign.Folder:
    folder = gptq()
    settings = folder.config["quantization_config"]
    for key in ("checkpoint_format", "desc_act", "quant_method"):
        del settings[key]
    packing = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    settings |= packing | {"extra_config": {"c": {"bits": 16}, "a.b": {"bits": 4}}}
    return folder


def modelopt() -> foreign.Folder:
    rng = np.random.default_rng(0)
    arrays = {
        "a.b.weight": rng.integers(0, 256, (32, 64), np.uint8),
        "a.b.weight_scale": rng.integers(1, 0x7E, (32, 8), np.uint8),
        "a.b.weight_scale_2": np.array([2**-9], np.float32),
    }
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    return foreign.Folder({"quantization_config": settings}, arrays)


def mxfp4() -> foreign.Folder:
    rng = np.random.default_rng(0)
    arrays = {
        "a.b.weight_packed": rng.integers(0, 256, (32, 64), np.uint8),
        "a.b.weight_scale": rng.integers(1, 0x7E, (32, 4), np.uint8),
    }
    config = foreign.nvfp4_config()
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["format"] = config["quantization_config"]["format"] = "mxfp4-pack-quantized"
    group["weights"] |= {"group_size": 32, "strategy": "group"}
    return foreign.Folder(config, arrays)


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
    for seed in range(50):
        path = checkpoint().write(tmp_path / str(seed))
        damage(random.Random(f"{damage.__name__} {checkpoint.__name__} {seed}"), path)
        with limited():
            message = outcome(path)
        assert message is None or str(path) in message
        refused += message is not None
    assert refused > 5


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


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = stock().write(tmp_path)
    (path / FILE).write_bytes((2**40).to_bytes(8, "little") + b"{")
    assert "header of 1099511627776 bytes" in refusal(path)


def test_a_key_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    path = stock().write(tmp_path)
    entry = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = f"{{{entry},{entry}}}".encode()
    (path / FILE).write_bytes(len(text).to_bytes(8, "little") + text + b"0")
    assert "key 'a' occurs twice" in refusal(path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "x.bin", 1])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, name: object) -> None:
    path = stock().write(tmp_path)
    index = {"weight_map": {"a.b.weight": name}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "expected a safetensors file in the same folder" in refusal(path)


def test_an_index_that_names_a_missing_file_is_refused(tmp_path: Path) -> None:
    path = stock().write(tmp_path)
    index = {"weight_map": {"a.b.weight": FILE, "d.weight": "model-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-2.safetensors: no such file" in refusal(path)


@pytest.mark.parametrize("file", [FILE, "model-00001-of-00002.safetensors"])
def test_an_index_of_other_weights_is_not_used(tmp_path: Path, file: str) -> None:
    path = stock().write(tmp_path)
    index = {"weight_map": {"a.b.qweight": file, "c.weight": file}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert outcome(path) is None
    assert {name for name, _ in read_checkpoint(path)} == {"a.b.weight", "c.weight"}


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    path = stock().write(tmp_path)
    stock().write(tmp_path, "model-2.safetensors")
    assert "occurs in model-2.safetensors too" in refusal(path)


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    path = stock().write(tmp_path)
    entries = {
        name: {"dtype": "U8", "shape": [4], "data_offsets": [begin, begin + 4]}
        for name, begin in (("a", 0), ("b", 3))
    }
    text = json.dumps(entries).encode()
    (path / FILE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert "tensors 'a' and 'b' overlap" in refusal(path)


@pytest.mark.parametrize("checkpoint", [gptq, compressed])
@pytest.mark.parametrize("change", ["number", "floats", "truths"])
def test_arrays_of_another_kind_are_refused(
    tmp_path: Path, checkpoint: Callable[[], foreign.Folder], change: str
) -> None:
    folder = checkpoint()
    original = dict(folder.arrays)
    dtype = {"floats": np.float32, "truths": np.bool_}.get(change)
    for name, array in original.items():
        if "scale" in name and change == "floats":
            continue  # scales may have any float dtype
        other = array.flatten()[0] if dtype is None else array.astype(dtype)
        folder.write(tmp_path)
        arrays = {**original, name: np.array(other)}
        save_file({name: a.copy() for name, a in arrays.items()}, tmp_path / FILE)
        with pytest.raises(ValueError, match=r"tensor 'a\.b\.weight'"):
            read_all(tmp_path)


def test_an_unknown_version_of_gptq_is_refused(tmp_path: Path) -> None:
    folder = gptq()
    folder.config["quantization_config"]["checkpoint_format"] = "marlin"
    folder.write(tmp_path)
    with pytest.raises(ValueError, match="checkpoint_format='marlin', expected one of"):
        read_all(tmp_path)


def test_a_width_that_is_no_number_is_refused(tmp_path: Path) -> None:
    folder = compressed()
    groups = folder.config["quantization_config"]["config_groups"]
    groups["group_0"]["weights"]["num_bits"] = [3]
    folder.write(tmp_path)
    with pytest.raises(ValueError, match=r"bits=\[3\], expected an integer"):
        read_all(tmp_path)


@pytest.mark.parametrize("text", ['{"a": ' + "9" * 5000 + "}", '{"a": 1, "a": 2}'])
def test_a_config_that_is_not_read_is_named(tmp_path: Path, text: str) -> None:
    gptq().write(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        read_all(tmp_path)


def test_a_key_that_occurs_twice_is_named(tmp_path: Path) -> None:
    gptq().write(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 0, "b": 0, "b": 0}')
    with pytest.raises(ValueError, match="key 'b' occurs twice"):
        read_all(tmp_path)


@pytest.mark.parametrize("shape", [[2**32 + 1, 0], [1] * 5000])
def test_shapes_that_mlx_cannot_hold_are_refused(tmp_path: Path, shape: list) -> None:
    gptq().write(tmp_path)
    size = 0 if 0 in shape else 4
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    header = json.dumps({"x": entry}).encode()
    length = len(header).to_bytes(8, "little")
    (tmp_path / FILE).write_bytes(length + header + bytes(size))
    with pytest.raises(ValueError, match="tensor 'x': shape="):
        read_all(tmp_path)
