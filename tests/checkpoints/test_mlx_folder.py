"""MLX's own checkpoints and compressed-tensors' nvfp4 are read without rounding."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin import unpack
from mlx_marlin.checkpoints.reading import read_checkpoint, tensors
from support import foreign_checkpoints
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


def test_layers_may_have_settings_of_their_own(tmp_path: Path) -> None:
    w = mx.random.normal((32, 128), key=mx.random.key(0)).astype(mx.float16)
    arrays = {}
    for layer, bits, size in (("a", 4, 64), ("b", 8, 32)):
        names = ("weight", "scales", "biases")
        for name, part in zip(names, mx.quantize(w, size, bits), strict=True):
            arrays[f"{layer}.{name}"] = part
    config = {
        "quantization": {
            "bits": 4,
            "group_size": 64,
            "b": {"bits": 8, "group_size": 32},
            "c": False,
        }
    }
    read = dict(read_checkpoint(saved(tmp_path, arrays, config)))
    assert (read["a.weight"].bits, read["a.weight"].group_size) == (4, 64)
    assert (read["b.weight"].bits, read["b.weight"].group_size) == (8, 32)


@pytest.mark.parametrize("divisor", [np.nan, np.inf, 0.0, -1.0])
def test_divisors_of_compressed_tensors_are_numbers_above_0(
    divisor: float, tmp_path: Path
) -> None:
    arrays = {
        "a.weight_packed": mx.zeros((32, 64), mx.uint8),
        "a.weight_scale": mx.ones((32, 8), mx.uint8),
        "a.weight_global_scale": mx.array([divisor]),
    }
    path = saved(tmp_path, arrays, foreign_checkpoints.nvfp4_config())
    with pytest.raises(ValueError, match=r"a\.weight.*(NaN or infinite|above 0)"):
        dict(read_checkpoint(path))


def test_tensors_are_not_read_before_they_are_asked_for(tmp_path: Path) -> None:
    w = mx.random.normal((32, 128), key=mx.random.key(0)).astype(mx.float16)
    path = saved(tmp_path, {"a.weight": w}, {})
    (tensor,) = tensors(path)
    assert (tensor.name, tensor.format, tensor.shape) == ("a.weight", "F16", (32, 128))
    assert tensor.nbytes == w.nbytes
    assert mx.array_equal(tensor.read(), w)
    assert mx.array_equal(tensor.read(), w)  # a second time from the file again


def test_nvfp4_of_compressed_tensors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n, k, divisor = 32, 128, 512.0  # a power of two: no rounding anywhere
    codes = rng.integers(0, 16, (n, k), np.uint8)
    scales = rng.integers(1, 0x7E, (n, k // 16), np.uint8)
    arrays = {
        "a.weight_packed": mx.array(codes[:, ::2] | codes[:, 1::2] << 4),
        "a.weight_scale": mx.array(scales),
        "a.weight_global_scale": mx.array([divisor]),
    }
    packed = dict(read_checkpoint(saved(tmp_path, arrays, foreign.nvfp4_config())))[
        "a.weight"
    ]
    assert packed.global_scale.item() == 2688 / divisor
    words, back = unpack(packed)
    assert np.array_equal(np.array(back), scales)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    e2m1 = magnitudes[codes & 7] * np.where(codes & 8, -1, 1)
    exponent, mantissa = scales >> 3, scales & 7
    e4m3 = np.where(
        exponent == 0,
        mantissa / 8 * 2.0**-6,
        (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7),
    )
    expected = e2m1 * np.repeat(e4m3, 16, axis=1) / divisor
    got = mx.dequantize(
        words,
        back,
        None,
        16,
        4,
        "nvfp4",
        global_scale=packed.global_scale,
        dtype=mx.float32,
    )
    assert np.array_equal(np.array(got), expected)
