"""GPTQ, AWQ and compressed-tensors against the packages that define them."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin.checkpoints.reading import read_checkpoint

pytestmark = pytest.mark.peer

SCRIPT = Path(__file__).with_name("write_checkpoints.py")
PYTHON = Path(sys.prefix) / "peers" / "bin" / "python"
WEIGHT = "model.layers.0.mlp.up_proj.weight"
COUNTS = {
    "auto_gptq": 48,
    "gptqmodel": 96,
    "autoawq": 8,
    "pack-quantized": 126,
    "nvfp4-pack-quantized": 4,
}
"""Checkpoints of each package or format."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `write_checkpoints` filled."""
    if not PYTHON.exists():
        pytest.skip(
            f"{PYTHON} is missing: `make test-peers` installs PyTorch, GPTQModel, "
            f"AutoGPTQ, AutoAWQ and compressed-tensors there"
        )
    folder = tmp_path_factory.mktemp("written")
    done = subprocess.run(
        (PYTHON, SCRIPT, folder), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def decoded(path: Path, dtype: mx.Dtype) -> np.ndarray:
    """The weight as we read it, columns in the order of x."""
    values = dict(read_checkpoint(path))
    packed = values[WEIGHT]
    assert not isinstance(packed, mx.array)
    weight = mlx_marlin.dequantize(packed, dtype=dtype)
    order = values.get(WEIGHT.replace("weight", "input_order"))
    if order is not None:
        weight = mx.take(weight, mx.argsort(order), axis=1)
    return np.array(weight.astype(mx.float32))


def expected(path: Path) -> mx.array:
    """The weight as the package decodes it."""
    arrays = mx.load(str(path / "expected"), format="safetensors")
    assert isinstance(arrays, dict)
    return arrays["weight"]


def is_refused(path: Path) -> bool:
    """Whether a zero point of 0 is not known to be one: 3 bits in version 1."""
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    version = settings.get("checkpoint_format")
    return version == "gptq" and settings["bits"] == 3 and not settings["sym"]


@pytest.mark.parametrize("package", COUNTS)
def test_weights_are_those_of_the_package(written: Path, package: str) -> None:
    paths = sorted((written / package).iterdir())
    assert len(paths) == COUNTS[package]
    for path in paths:
        if is_refused(path):
            with pytest.raises(ValueError, match="a zero point is 8, expected at most"):
                decoded(path, mx.float16)
            continue
        weight = expected(path)
        ours, theirs = decoded(path, weight.dtype), np.array(weight.astype(mx.float32))
        divisor = float(path.name) if package == "nvfp4-pack-quantized" else 2688
        if np.log2(2688 / divisor) % 1:
            # 2688 / divisor was rounded to float32, and so were the products.
            np.testing.assert_allclose(ours, theirs, rtol=2**-22, err_msg=str(path))
        else:
            np.testing.assert_array_equal(ours, theirs, err_msg=str(path))


def test_tools_disagree_on_the_zero_points_that_we_refuse(written: Path) -> None:
    """docs/import.md has this table."""
    read = json.loads((written / "zero_points.json").read_text())
    for bits in (2, 3, 4, 8):
        whole = 2**bits
        no_word_ends = bits != 3
        first = {
            name: zeros[str(bits)][:4] for name, zeros in read.items()
        }  # the third is stored as 2^bits - 1, the others as 0
        assert first == {
            "cuda": [1, 1, whole, 1],
            "cuda_old": [1, 1, 0 if no_word_ends else whole, 1],
            "TorchLinear": [1, 1, 0, 2 if no_word_ends else 1],
            "model_dequant": [1, 1, 0, 1],
        }
