"""Arrays are written to files of a size, and any reader of safetensors reads them."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.writing import Shards


def drawn(dtype: str, shape: tuple[int, ...]) -> mx.array:
    return (mx.random.uniform(shape=shape) * 100).astype(
        mx.bool_ if dtype == "bool" else getattr(mx, dtype)
    )


DTYPES = [f"{sign}int{bits}" for sign in ("u", "") for bits in (8, 16, 32, 64)]
DTYPES += ["bool", "float16", "bfloat16", "float32"]
ARRAYS = {f"a.{dtype}": drawn(dtype, (3, 5)) for dtype in DTYPES} | {
    "empty": mx.zeros((0, 4)),
    "scalar": mx.array(2.5),
    'odd "name" é': mx.arange(7),
    "transposed": mx.arange(6).reshape(2, 3).T,
}


def test_mlx_and_the_safetensors_library_read_what_was_written(tmp_path: Path) -> None:
    with Shards(tmp_path, {"format": "mlx"}) as shards:
        for name, array in ARRAYS.items():
            shards.add(name, array)

    file = tmp_path / "model.safetensors"
    read, metadata = mx.load(str(file), return_metadata=True)
    assert metadata == {"format": "mlx"}
    assert {*read} == {*ARRAYS}
    for name, array in ARRAYS.items():
        assert read[name].dtype == array.dtype
        assert mx.array_equal(read[name], array)
    # NumPy has no bfloat16: the library refuses the file, and reads it without that.
    rest = {name: a for name, a in ARRAYS.items() if a.dtype != mx.bfloat16}
    with Shards(tmp_path, {}) as shards:
        for name, array in rest.items():
            shards.add(name, array)
    for name, array in load_file(file).items():
        np.testing.assert_array_equal(array, np.array(rest[name]))
    assert not [*tmp_path.glob("*.json")]


def test_several_files_have_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"layer.{i}" for i in range(23)]
    arrays = [mx.arange(10.0) + 10 * i for i in range(23)]
    monkeypatch.setattr(Shards, "shard_bytes", 80)  # two in a file
    with Shards(tmp_path, {}) as shards:
        for name, array in zip(names, arrays, strict=True):
            shards.add(name, array)
    (tmp_path / "config.json").write_text("{}")

    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-00012.safetensors" for i in range(1, 13)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 23 * 40}
    assert index["weight_map"] == {n: files[i // 2] for i, n in enumerate(names)}
    folder = Folder(tmp_path)
    for name, array in zip(names, arrays, strict=True):
        assert mx.array_equal(folder.read(name), array)


def test_a_name_may_occur_once(tmp_path: Path) -> None:
    with Shards(tmp_path, {}) as shards:
        shards.add("a", mx.zeros(3))
        with pytest.raises(ValueError, match="'a' occurs twice"):
            shards.add("a", mx.zeros(3))
