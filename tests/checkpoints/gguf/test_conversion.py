"""GGUF files are converted for our kernels, and for mlx-lm."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import utils

from mlx_marlin.checkpoints import gguf
from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import _narrowed, open_source
from mlx_marlin.products.reference.weight import dequantize
from mlx_marlin.weights.packed_weight import PackedWeight
from support.gguf_cases import CASES
from support.gguf_files import random_tensor, write_gguf
from support.gguf_models import random_model, written_model

FIELDS = ("n", "k", "group_size", "bits", "mode")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small llama; the files of its tokenizer have a test of their own."""
    monkeypatch.setattr(gguf, "tokenizer_files", lambda _: {"tokenizer.json": "{}"})
    case = CASES["llama"]
    path = tmp_path / "model.gguf"
    random = np.random.default_rng(0)
    tensors = []
    for tensor in written_model(case, random_model(case)):
        matrix = "norm" not in tensor.name and "blk" in tensor.name
        name = "Q8_0" if "attn" in tensor.name else "Q4_1"
        drawn = random_tensor(tensor.name, name, tensor.shape, random)
        tensors.append(drawn if matrix else tensor)
    write_gguf(path, case.metadata, tensors)
    return path


def test_weights_are_the_ones_of_the_file(source: Path, tmp_path: Path) -> None:
    rows = [*convert(open_source(source), tmp_path / "result")]

    assert all(row.error == 0 for row in rows)
    folder = Folder(tmp_path / "result")
    records = folder.config.get("mlx_marlin", {}).get("layers", {})
    quantized = 0
    for tensor in gguf.read(source):
        value = tensor.read()
        layer = tensor.name.removesuffix(".weight")
        if isinstance(value, StoredWeight):
            packed = PackedWeight(
                words=folder.read(f"{layer}.words"),
                scales=folder.read(f"{layer}.packed_scales"),
                **{name: records[layer][name] for name in FIELDS},
            )
            decoded = dequantize(packed, mx.float32)
            np.testing.assert_array_equal(np.array(decoded), np.array(value.decoded()))
            quantized += 1
        else:
            back = folder.read(tensor.name)
            assert mx.array_equal(back.astype(mx.float32), value.astype(mx.float32))
            assert "norm" not in layer or back.dtype == mx.float16  # as scales
    assert quantized == len(records) == 2 * 7
    assert (tmp_path / "result" / "tokenizer.json").exists()


def test_rows_of_the_table_are_in_the_order_of_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "tokenizer_files", lambda _: {})
    case = replace(CASES["llama"], layers=11)
    written = written_model(case, random_model(case))
    path = write_gguf(tmp_path / "model.gguf", case.metadata, written[::-1])

    rows = convert(open_source(path), tmp_path / "result", dry_run=True)
    layers = [row.name.split(".")[2] for row in rows if ".layers." in row.name]

    assert [*dict.fromkeys(layers)] == [str(layer) for layer in range(11)]


def test_a_norm_that_float16_would_round_stays_as_it_is() -> None:
    exact = mx.array([1.0, 1 + 2**-20])
    assert _narrowed(exact, mx.float16) is exact


def test_mlx_lm_reads_what_is_written_in_its_layout(
    source: Path, tmp_path: Path
) -> None:
    [*convert(open_source(source), tmp_path / "result", layout="mlx")]
    model, _ = utils.load_model(tmp_path / "result")
    for tensor in gguf.read(source):
        if "mlp" in tensor.name:
            value = tensor.read()
            layer: Any = model
            for part in tensor.name.split(".")[:-1]:
                layer = layer[int(part)] if part.isdecimal() else layer[part]
            assert mx.array_equal(layer.weight, value.codes)
            assert mx.array_equal(layer.scales, value.scales)
            assert mx.array_equal(layer.biases, value.biases)
