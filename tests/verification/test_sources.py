"""Layers are compared with the weights of the checkpoint that they were made from."""

import copy
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize

import mlx_marlin
from mlx_marlin import MarlinLinear
from mlx_marlin.checkpoints import gguf
from mlx_marlin.checkpoints.quantization import Quantization
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from mlx_marlin.lm.verification import gate
from mlx_marlin.lm.verification.inputs import random_activations
from mlx_marlin.products.packing import pack, unpack
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.packed_weight import PackedWeight
from support.foreign_models import CONFIG, LINEAR
from support.format_cases import read_codes, write_codes
from support.gguf_cases import CASES
from support.gguf_files import Written, write_gguf
from support.gguf_models import random_model, written_model
from support.profiles import sampled

NAME = "model.layers.1.mlp.up_proj"
pytestmark = pytest.mark.usefixtures("kernels")

Change = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


def one_code(codes: np.ndarray, *_: np.ndarray) -> None:
    codes[17, 45] ^= 1


def one_scale(_: np.ndarray, scales: np.ndarray, __: np.ndarray) -> None:
    scales[3, 1] *= np.float16(1.01)


def one_zero_point(_: np.ndarray, __: np.ndarray, zeros: np.ndarray) -> None:
    zeros[255, 0] = (zeros[255, 0] + 1) % 16


def two_rows(*arrays: np.ndarray) -> None:
    for array in arrays:
        array[[8, 9]] = array[[9, 8]]


def changed(packed: PackedWeight, change: Change) -> MarlinLinear:
    """Returns a layer with a packed weight whose numbers are changed."""
    words, scales, biases = unpack(packed)
    codes, arrays = read_codes(words, 4), [np.array(scales), np.array(biases)]
    change(codes, *arrays)
    native = write_codes(codes, 4), *map(mx.array, arrays)
    return MarlinLinear.from_packed(
        pack(*native, group_size=64, bits=4, mode=packed.mode)
    )


def small_model(plain: Path, **how: Any) -> nn.Module:
    """Returns a folder's model, quantized by our conversion."""
    quantization = Quantization(**({"bits": 4} | how))
    [*convert(open_source(plain), plain.parent / "small", quantization=quantization)]
    return load_model(open_source(plain.parent / "small"))


def test_a_conversion_of_gptq_is_exact(packed: Path, gptq: Path) -> None:
    model = load_model(open_source(packed))

    report = mlx_marlin.verify(model, gptq, rows=(1, 8))

    assert report.passed, str(report)
    assert [each.name for each in report.layers] == [
        f"model.layers.{i}.{name}" for i in range(2) for name in sorted(LINEAR)
    ]
    for layer in report.layers:
        assert layer.weights is not None
        assert (layer.weights.relative, layer.weights.limit) == (0, 0)
        errors = {each.reference: each.errors for each in layer.products[2:]}
        assert errors["weights"] == errors["source"]
    assert "of 14 layers passed, 0 failed, 0 without a source" in str(report)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (one_code, "1 codes or scales are not the source's, first at matrix 0, row 17"),
        (one_scale, "codes or scales are not the source's, first at matrix 0, row 3"),
        (one_zero_point, "64 codes or scales are not the source's, first at matrix 0"),
        (two_rows, "codes or scales are not the source's, first at matrix 0, row 8"),
    ],
)
def test_a_change_of_one_layer_is_found_and_named(
    packed: Path, gptq: Path, change: Change, where: str
) -> None:
    model = load_model(open_source(packed))
    layer = model.model.layers[1].mlp.up_proj  # with columns in another order than x
    layer.linear = changed(layer.linear.packed, change)

    report = mlx_marlin.verify(model, gptq, rows=(1, 8))

    assert report.failed == (NAME,)
    assert where in str(report)
    # Its kernels are right, and nothing is wrong without the source.
    assert mlx_marlin.verify(model, rows=(1,)).passed


@sampled(3, 8)
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("mean", [0, 3])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (8, 128)])
def test_biases_that_mlxs_layout_rounds_pass(
    plain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bits: int,
    group_size: int,
    mean: float,
    dtype: mx.Dtype,
) -> None:
    def drawn(*args: Any) -> Any:
        usual = random_activations(*args)
        return replace(usual, x=usual.x + mean) if usual.x.ndim == 2 else usual

    monkeypatch.setattr(gate, "random_activations", drawn)
    zero_point = Quantization(mode="zero_point", bits=bits, group_size=group_size)
    paths = tmp_path / "ours", tmp_path / "mlx"
    [*convert(open_source(plain), paths[0], quantization=zero_point)]
    rows = [*convert(open_source(paths[0]), paths[1], layout="mlx")]
    assert any(row.error for row in rows)

    model = load_model(open_source(paths[1]))
    for _, module in model.named_modules():
        if isinstance(module, nn.RMSNorm):  # which tells the dtype of activations
            module.set_dtype(dtype)

    report = mlx_marlin.verify(model, paths[0], rows=(1, 8))

    assert report.passed, str(report)
    dtypes = {each.dtype for layer in report.layers for each in layer.products}
    assert dtype_name(dtype) in dtypes
    relative = [each.weights.relative for each in report.layers if each.weights]
    assert 0 < max(relative) < 1e-3


@sampled(1)
@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [("affine", 4, 64), ("symmetric", 3, 32), ("mxfp4", 4, 32), ("affine", 8, 128)],
)
def test_quantized_weights_are_within_the_limit_of_their_format(
    plain: Path, mode: str, bits: int, group_size: int
) -> None:
    model = small_model(plain, mode=mode, bits=bits, group_size=group_size)

    report = mlx_marlin.verify(model, plain, rows=(1, 8))

    assert report.passed, str(report)
    assert len(report.layers) == 16  # and lm_head, and the embedding
    assert "kernels" in str(report)
    for layer in report.layers:
        assert layer.weights is not None
        assert 0 < layer.weights.relative < layer.weights.limit
        (error,) = (
            each.errors.relative
            for each in layer.products
            if (each.reference, each.rows) == ("source", 8)
        )
        # Rows of independent normal numbers show what the weights differ by.
        assert error == pytest.approx(layer.weights.relative, rel=0.3)


def test_a_wrong_layer_is_found_next_to_quantization_errors(plain: Path) -> None:
    model = small_model(plain)
    block = model.model.layers[1].mlp
    block.up_proj = changed(block.up_proj.packed, lambda codes, *_: two_rows(codes))

    report = mlx_marlin.verify(model, plain, rows=(1, 8))

    assert report.failed == (NAME,)
    assert "2 rows are too far from the source's, first at matrix 0, row 8" in str(
        report
    )


def in_blocks(tensor: Written) -> Written:
    """Quantizes experts to Q5_0 and other weights of blocks to Q4_1."""
    if "norm" in tensor.name or "blk" not in tensor.name or "_inp" in tensor.name:
        return tensor
    kind = "Q5_0" if "exps" in tensor.name else "Q4_1"
    values = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
    data = quantize(values, GGMLQuantizationType[kind]).tobytes()
    return tensor._replace(type=kind, data=data)


@pytest.mark.usefixtures("tokenizer")
@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_a_gguf_file_is_verified_and_is_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(gguf, "tokenizer_files", lambda _: {})
    case = CASES[name]
    tensors = [in_blocks(each) for each in written_model(case, random_model(case))]
    path = tmp_path / "model.gguf"
    write_gguf(path, case.metadata, tensors)

    report = mlx_marlin.verify(path, path, rows=(1, 8))

    assert report.passed, str(report)
    operations = {each.operation for each in report.layers}
    assert operations == ({"linear", "experts"} if "moe" in name else {"linear"})
    formats = {each.format for each in report.layers}
    assert "affine 4-bit, group 32" in formats
    assert ("symmetric 5-bit, group 32" in formats) is ("moe" in name)


def test_layers_without_a_source_are_named(plain: Path) -> None:
    model = small_model(plain)
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))

    report = mlx_marlin.verify(model, plain, rows=(1,))

    assert not report.failed
    assert not report.passed
    assert [*report.without_source] == [
        f"model.layers.2.{name}" for name in sorted(LINEAR)
    ]
    assert "16 of 23 layers passed, 0 failed, 7 without a source" in str(report)


def test_a_source_of_another_model_is_refused(packed: Path, plain: Path) -> None:
    model = load_model(open_source(packed))
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"vocab_size": 65}))
    with pytest.raises(ValueError, match=r"'lm_head.weight' of shape \(64, 128\)"):
        mlx_marlin.verify(model, plain)
    model.model.layers[0].mlp.up_proj = model.model.layers[0].mlp.down_proj
    (plain / "config.json").write_text(json.dumps(CONFIG))
    message = r"up_proj.weight': shape \(1, 256, 128\) .*, expected \(1, 128, 256\)"
    with pytest.raises(ValueError, match=message):
        mlx_marlin.verify(model, plain)


def test_a_weight_of_the_source_is_dropped_before_the_next_is_read(
    packed: Path, gptq: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(open_source(packed))
    mx.eval(model.parameters())
    own, read, active = StoredWeight.checked, [], mx.get_active_memory()

    def watched(weight: StoredWeight) -> StoredWeight:
        assert all(array() is None for array in read)
        mx.synchronize()  # a stream holds its inputs until it has run
        assert mx.get_active_memory() < active + 2 * weight.codes.nbytes
        checked = own(weight)
        read.append(weakref.ref(checked.codes))
        return checked

    monkeypatch.setattr(StoredWeight, "checked", watched)
    assert mlx_marlin.verify(model, gptq, rows=(1,)).passed
    assert len(read) == 14
