"""Files are written shard by shard, and memory holds few tensors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.writing import Shards
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from support import foreign_checkpoints as foreign
from support import foreign_models
from support.foreign_models import CONFIG, Format, shapes, write_llama
from support.gguf_blocks import SIZES
from support.gguf_cases import CASES
from support.gguf_files import Written, gguf_bytes


def mlx_arrays(layer: str, weight: foreign.IntegerWeight) -> dict[str, np.ndarray]:
    parts = mx.quantize(mx.array(weight.values.astype(np.float16)))
    names = ("weight", "scales", "biases")
    return {f"{layer}.{n}": np.array(p) for n, p in zip(names, parts, strict=True)}


def nvfp4_arrays(layer: str, weight: foreign.IntegerWeight) -> dict[str, np.ndarray]:
    n, k = weight.codes.shape
    return {
        f"{layer}.weight_packed": weight.codes[:, : k // 2].astype(np.uint8),
        f"{layer}.weight_scale": np.full((n, k // 16), 0x38, np.uint8),
        f"{layer}.weight_global_scale": np.ones(1, np.float32),
    }


FORMATS = {name: foreign_models.FORMATS[name] for name in ("gptq", "awq", "compressed")}
FORMATS |= {
    "mlx": Format(
        mlx_arrays, {"quantization": {"bits": 4, "group_size": 64}}, {"bits": 4}
    ),
    "nvfp4": Format(nvfp4_arrays, foreign.nvfp4_config(), {"bits": 4}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_other_layers_are_not_in_memory(tmp_path: Path, name: str) -> None:
    arrays, settings, options = FORMATS[name]
    write_llama(tmp_path / "source", arrays, settings, **options)
    source = open_source(tmp_path / "source")
    assert source.model is not None  # it has small arrays of its own
    before = mx.get_active_memory()

    parameters = source.parameters()
    next(parameters)

    # The scales alone of 14 layers in float16 have 17,000 bytes.
    assert mx.get_active_memory() - before < 9_000


PEAK = """
import resource, sys
from pathlib import Path
import mlx.core as mx
from mlx_marlin.checkpoints.quantization import Quantization

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
"""
CONVERT = f"""{PEAK}
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.checkpoints.writing import Shards
import mlx_lm.models.llama, mlx_lm.utils

Shards.shard_bytes = 20_000_000
before = peak()
how = Quantization(quantizer=sys.argv[3]) if len(sys.argv) > 3 else None
layout = "mlx" if how is None else "marlin"
source = open_source(Path(sys.argv[1]))
for row in convert(source, Path(sys.argv[2]), layout=layout, quantization=how):
    pass
print(peak() - before)
"""
READ = f"""{PEAK}
from mlx_marlin.checkpoints.gguf import read
import gguf

tensors = read(sys.argv[1], Quantization())
small = next(tensors).read()
mx.eval(small)
before = peak()
for tensor in tensors:
    weight = tensor.read()
    mx.eval(weight.codes, weight.scales)
    del weight
print(peak() - before)
"""


def growth(program: str, *arguments: object) -> int:
    """Returns by how many bytes a program says that its memory has grown."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout)


WIDE, LAYERS = 1024, 24


@pytest.fixture(scope="module")
def large_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 24 layers, 350 MB, whose largest weights have 2 MB."""
    path = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": WIDE, "intermediate_size": WIDE}
    config = CONFIG | sizes | {"num_hidden_layers": LAYERS}
    (path / "config.json").write_text(json.dumps(config))
    matrix = mx.random.normal((WIDE, WIDE), mx.float16)
    arrays = {
        f"{name}.weight": matrix[: shape[0]] if len(shape) == 2 else matrix[0]
        for name, shape in shapes(config).items()
    }
    with Shards(path, {}) as shards:
        for name, array in arrays.items():
            shards.add(name, array)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", [[], ["nearest"]])
def test_a_conversion_takes_the_memory_of_few_tensors(
    large_llama: Path, tmp_path: Path, quantizer: list[str]
) -> None:
    grown = growth(CONVERT, large_llama, tmp_path / "result", *quantizer)
    total = sum(file.stat().st_size for file in large_llama.iterdir())
    assert grown < min(total / 3, 20_000_000 + 3 * 2 * WIDE * WIDE + 100_000_000)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts kilobytes as Linux does")
@pytest.mark.parametrize(
    ("kind", "count", "rows", "bits", "more"),
    [
        *(("Q8_0", 10, 1024, 8.5, 0), ("Q2_K", 10, 1024, 2.625, 0)),
        ("IQ4_XS", 10, 1024, 4.25, 0),
        ("IQ2_XXS", 2, 4096, 4.5, 100_000_000),
    ],
)
def test_tensors_of_gguf_that_were_read_take_no_memory(
    kind: str, count: int, rows: int, bits: float, more: int, tmp_path: Path
) -> None:
    """A type without kernels is decoded a few rows at a time."""
    columns = 8192
    elements, nbytes = SIZES[kind]
    nbytes *= rows * columns // elements
    infos = [Written("output_norm.weight", "F32", (8,), bytes(32))]
    # The tensors' data are a hole in the file: no one has to write it.
    holes = [
        Written(f"blk.{layer}.ffn_up.weight", kind, (rows, columns), b"")
        for layer in range(count)
    ]
    path = tmp_path / "large.gguf"
    path.write_bytes(with_holes(infos, holes, nbytes))
    os.truncate(path, path.stat().st_size + count * nbytes)

    assert growth(READ, path) < 4 * rows * columns * bits / 8 + more


def with_holes(infos: list[Written], holes: list[Written], nbytes: int) -> bytes:
    """Returns a file that ends where the data of the last tensors begin."""
    metadata = CASES["qwen2"].metadata | {"qwen2.block_count": len(holes)}
    octets = gguf_bytes(metadata, [*infos, *holes])
    for index, hole in enumerate(holes):
        name = hole.name.encode()
        at = octets.index(name) + len(name) + 4 + 16 + 4
        offset = 32 + index * nbytes
        octets = octets[:at] + offset.to_bytes(8, "little") + octets[at + 8 :]
    return octets


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
