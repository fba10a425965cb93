"""MLX's own checkpoints are read without rounding."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_marlin import unpack
from mlx_marlin.checkpoints.reading import read_checkpoint, tensors
from support import foreign_checkpoints as foreign

FORMATS = [
    *(("affine", bits, size) for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128)),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]


def saved(path: Path, arrays: dict[str, mx.array], config: dict) -> Path:
    foreign.Folder(config).write(path)
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    return path


@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_every_mode_is_read_exactly(
    tmp_path: Path, mode: str, bits: int, group_size: int, dtype: mx.Dtype
) -> None:
    w = mx.random.normal((40, 256), key=mx.random.key(bits)).astype(dtype)
    parts = mx.quantize(w, group_size, bits, mode)
    names = ("weight", "scales", "biases")
    layer = {f"a.{name}": part for name, part in zip(names, parts, strict=False)}
    settings = {"mode": mode, "bits": bits, "group_size": group_size}
    path = saved(tmp_path, {**layer, "norm.weight": w[0]}, {"quantization": settings})
    read = dict(read_checkpoint(path))
    for stored, back in zip(parts, unpack(read["a.weight"]), strict=True):
        assert mx.array_equal(stored, back)
    assert mx.array_equal(read["norm.weight"], w[0])
    assert {*read} == {"a.weight", "norm.weight"}


def test_tensors_are_not_read_before_they_are_asked_for(tmp_path: Path) -> None:
    w = mx.random.normal((32, 128), key=mx.random.key(0)).astype(mx.float16)
    path = saved(tmp_path, {"a.weight": w}, {})
    (tensor,) = tensors(path)
    assert (tensor.name, tensor.format, tensor.shape) == ("a.weight", "F16", (32, 128))
    assert tensor.nbytes == w.nbytes
    assert mx.array_equal(tensor.read(), w)
    assert mx.array_equal(tensor.read(), w)  # a second time from the file again
