"""Layers are verified by what they compute, and weights by what they stand for."""

import re
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import SwitchGLU

import mlx_marlin
from mlx_marlin import MarlinLinear
from mlx_marlin.checkpoints import gguf
from mlx_marlin.checkpoints.stored_weight import PackedLayer, StoredWeight
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.lm.verification import layers
from mlx_marlin.lm.verification.layers import ExactWeight
from mlx_marlin.lm.verification.report import LayerReport, Report
from mlx_marlin.products.packing import pack
from support import format_cases, oracles
from support.format_cases import Weight, any_weight
from support.gguf_cases import CASES
from support.gguf_files import random_tensor, write_gguf
from support.models import LAYOUTS, Layers, tiny_llama
from support.profiles import sampled

ROWS = (1, 8)


def report_of(report: Report, name: str) -> LayerReport:
    (found,) = [e for e in report.layers if (e.name, e.operation) == (name, "linear")]
    return found


def linear(
    mode: str, bits: int, group_size: int, dtype: str, *, n: int = 40
) -> tuple[MarlinLinear, format_cases.Weight]:
    k = 2 * format_cases.step_of(mode, bits, group_size)
    weight = any_weight(mode, bits, group_size, n, k, dtype=dtype, seed=bits)
    packed = pack(*weight.native, **weight.options)
    return MarlinLinear.from_packed(packed), weight


def model_of(layer: nn.Module, k: int, dtype: str) -> nn.Module:
    model = Layers(nn.RMSNorm(k), layer)
    model.layers[0].weight = mx.ones(k, getattr(mx, dtype))
    return model


DTYPES = ("float16", "bfloat16", "float32")


@sampled(4)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("mode", "bits", "group_size", "dtype"),
    # Every format in one dtype: tests/weights has the products in all of them.
    [
        (*form, dtype)
        for form, dtype in zip(format_cases.GROUPED, cycle(DTYPES), strict=False)
    ],
)
def test_a_packed_layer_passes_in_every_format(
    mode: str, bits: int, group_size: int, dtype: str
) -> None:
    layer, _ = linear(mode, bits, group_size, dtype)
    model = model_of(layer, layer.input_dims, dtype)

    report = mlx_marlin.verify(model, rows=ROWS)

    assert report.passed, str(report)
    one, eight = report_of(report, "layers.1").products
    assert [one.rows, eight.rows] == [1, 8]
    assert eight.dtype == dtype
    assert eight.limit < 4 * max(oracles.TOLERANCES[dtype], 2e-6)


@pytest.mark.usefixtures("stock")
@sampled(7)
@pytest.mark.parametrize(("mode", "bits", "group_size"), format_cases.OF_MLX)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_layer_of_mlx_passes_on_stock_mlx(
    mode: str, bits: int, group_size: int, dtype: str
) -> None:
    layer, _ = linear(mode, bits, group_size, dtype)
    model = model_of(layer.to_stock(), layer.input_dims, dtype)

    report = mlx_marlin.verify(model, rows=ROWS)

    assert report.passed, str(report)
    assert report.backend == "stock"
    assert not report_of(report, "layers.1").is_ours


def test_the_errors_are_those_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, weight = linear("affine", 4, 64, "float16", n=33)
    k, seen = layer.input_dims, []

    def call(_: Any, x: mx.array) -> mx.array:
        y = oracles.exact(x) @ weight.decoded.T + 0.01
        seen.append((oracles.exact(x), y))
        return mx.array(y.astype(np.float32))

    monkeypatch.setattr(MarlinLinear, "__call__", call)
    report = mlx_marlin.verify(model_of(layer, k, "float32"), rows=(4,), seed=3)

    (product,) = report_of(report, "layers.1").products
    ((x, y),) = seen
    assert x.shape == (4, k)
    exact = x @ weight.decoded.T
    relative = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    errors = product.errors
    assert np.isclose(errors.relative, relative, rtol=1e-4)
    assert np.isclose(errors.nmse, relative**2, rtol=1e-4)
    assert np.isclose(errors.max_error, 0.01, rtol=1e-3)
    assert np.isclose(errors.rms_error, 0.01, rtol=1e-3)
    (line,) = re.findall(r"^layers\.1 .*", str(report), re.MULTILINE)
    assert line.split()[6:8] == ["1.0e-02", "1.0e-02"]
    assert report.failed == ("layers.1",)


def experts() -> nn.Module:
    model = SwitchGLU(64, 96, 6, bias=True)
    for layer in (model.gate_proj, model.up_proj, model.down_proj):
        layer.bias = mx.random.normal(layer.bias.shape)
    nn.quantize(model, group_size=32, bits=4)
    return model


def heads() -> nn.Module:
    return Layers(QuantizedMultiLinear(64, 48, 3, 32, 4, "affine"))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("make", "operations"), [(experts, ["experts"] * 3), (heads, ["heads"])]
)
def test_experts_with_biases_and_heads_pass(
    make: Callable[[], nn.Module], operations: list[str], layout: str
) -> None:
    report = mlx_marlin.verify(mlx_marlin.optimize(make(), layout=layout), rows=(1, 7))

    assert report.passed, str(report)
    assert [each.operation for each in report.layers] == operations
    assert all(each.is_ours for each in report.layers)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_are_looked_up_and_are_heads_if_tied(tied: bool) -> None:
    model = mlx_marlin.optimize(tiny_llama(tied=tied))

    report = mlx_marlin.verify(model, rows=ROWS)

    assert report.passed, str(report)
    found = [e.operation for e in report.layers if e.name == "model.embed_tokens"]
    assert found == (["lookup", "head"] if tied else ["lookup"])
    assert len({each.name for each in report.layers}) == 15 + (not tied)


@pytest.mark.usefixtures("kernels")
def test_joined_and_reordered_layers_pass() -> None:
    layer, _ = linear("zero_point", 4, 64, "float32", n=64)
    order = mx.array(np.random.default_rng(1).permutation(128).astype(np.int32))
    joined = mlx_marlin.optimize(tiny_llama(), layout="marlin", join=True)
    reordered = model_of(ReorderedLinear(layer, order), 128, "float32")

    for model, name in (
        (joined, "model.layers.0.self_attn.k_proj"),
        (reordered, "layers.1"),
    ):
        report = mlx_marlin.verify(model, rows=ROWS)
        assert report.passed, str(report)
        assert report_of(report, name).is_ours


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("wrong_features", "change", "said"),
    [
        (mx.arange(160) == 97, 1e-5, "1 output features are wrong, the first is 97"),
        (True, mx.nan, "160 output features are wrong, the first is 0"),
    ],
)
def test_wrong_features_are_found_and_named(
    monkeypatch: pytest.MonkeyPatch, wrong_features: Any, change: float, said: str
) -> None:
    model = mlx_marlin.optimize(tiny_llama(), layout="marlin")
    wrong = model.model.layers[1].mlp.up_proj
    own = MarlinLinear.__call__

    def call(layer: MarlinLinear, x: mx.array) -> mx.array:
        y = own(layer, x)
        return mx.where(wrong_features, y * (1 + change), y) if layer is wrong else y

    monkeypatch.setattr(MarlinLinear, "__call__", call)
    report = mlx_marlin.verify(model, rows=ROWS)

    assert report.failed == ("model.layers.1.mlp.up_proj",)
    assert not report.passed
    assert said in str(report)
    assert "14 of 15 layers passed, 1 failed" in str(report)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": 3}, TypeError, "model must be a path or an nn.Module, got int"),
        ({"text": b"a"}, TypeError, "text must be a str, got bytes"),
        ({"rows": ()}, ValueError, r"rows=\(\), expected integers from 1"),
        ({"rows": (0,)}, ValueError, r"rows=\(0,\), expected integers from 1"),
        ({"rows": "18"}, ValueError, "rows='18', expected integers from 1"),
        ({"seed": -1}, ValueError, "seed=-1, expected an integer from 0"),
        ({"text": "a b"}, ValueError, "tokenizer=None, expected one"),
        ({"model": "a.gguf", "apply": True}, ValueError, "a.gguf is a GGUF file"),
        ({"model": "none"}, OSError, "none: no such folder"),
        ({"against": "none"}, OSError, "none: no such folder"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mlx_marlin.verify(**{"model": Layers(nn.Linear(64, 64)), **arguments})


def test_a_model_without_quantized_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="model=Layers has no quantized layer"):
        mlx_marlin.verify(Layers(nn.Linear(64, 64)))


def stored(weight: Weight, order: np.ndarray | None = None) -> StoredWeight:
    codes, scales, *biases = weight.native
    return StoredWeight(
        codes=codes,
        scales=scales,
        biases=biases[0] if biases else None,
        **weight.options,
        global_scale=weight.global_scale,
        input_order=None if order is None else mx.array(order.astype(np.int32)),
    )


def whole(weight: ExactWeight) -> tuple[np.ndarray, np.ndarray]:
    values, terms = np.full((2, *weight.shape), np.nan)
    for chunk in weight.chunks():
        values[chunk.matrix, chunk.rows] = chunk.values
        terms[chunk.matrix, chunk.rows] = chunk.terms
    return values, terms


@sampled(24)
@pytest.mark.parametrize(("mode", "bits", "group_size"), format_cases.GROUPED)
@pytest.mark.parametrize("packed", [False, True])
def test_every_format_is_decoded_exactly(
    monkeypatch: pytest.MonkeyPatch, mode: str, bits: int, group_size: int, packed: bool
) -> None:
    monkeypatch.setattr(layers, "MOST_WEIGHTS", 3000)  # 7 rows or so at a time
    k = 2 * format_cases.step_of(mode, bits, group_size)
    weight = any_weight(mode, bits, group_size, 37, k, dtype="bfloat16", seed=bits)
    order = np.random.default_rng(0).permutation(k)

    native = stored(weight, order)
    exact = ExactWeight(PackedLayer(native.packed(), native.input_order))
    values, terms = whole(exact if packed else ExactWeight(native))

    assert values.shape == (1, 37, k)
    assert np.array_equal(values[0][:, order], weight.decoded)
    scale, code, bias = weight.parts
    is_signed = mode == "k_quant" and bits in format_cases.SIGNED_K_QUANTS
    if mode == "symmetric" or is_signed:
        code, bias = code + 2 ** (bits - 1), -scale * 2 ** (bits - 1)
    assert np.array_equal(terms[0][:, order], (scale * code) ** 2 + bias**2)


def test_matrices_of_a_batch_are_decoded_as_asked() -> None:
    weights = [
        any_weight("affine", 4, 64, 8, 128, dtype="float16", seed=i) for i in range(3)
    ]
    batch = StoredWeight(
        codes=mx.stack([each.native[0] for each in weights]),
        scales=mx.stack([each.native[1] for each in weights]),
        biases=mx.stack([each.native[2] for each in weights]),
        **weights[0].options,
    )
    exact = ExactWeight(batch)
    chunks = [*exact.chunks({0, 2})]
    assert [chunk.matrix for chunk in chunks] == [0, 2]
    for chunk in chunks:
        assert np.array_equal(chunk.values, weights[chunk.matrix].decoded)


def test_global_scales_are_applied_in_float64() -> None:
    weight = any_weight("nvfp4", 4, 16, 8, 128, dtype="float16", seed=1)
    scales = mx.array([3.7, 0.01])
    batch = StoredWeight(
        codes=mx.stack([weight.native[0]] * 2),
        scales=mx.stack([weight.native[1]] * 2),
        **weight.options,
        global_scale=scales,
    )
    values, _ = whole(ExactWeight(batch))
    for matrix, scale in enumerate(np.array(scales).astype(np.float64)):
        assert np.allclose(values[matrix], weight.decoded * scale / 2688, 1e-15, 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_plain_weights_are_what_they_are(dtype: str) -> None:
    w = mx.random.normal((5, 64)).astype(getattr(mx, dtype))
    values, terms = whole(ExactWeight(w))
    assert np.array_equal(values[0], np.array(w.astype(mx.float32)).astype(float))
    assert np.array_equal(terms, values**2)
    assert not ExactWeight(w).is_quantized


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q5_1"])
def test_weights_of_gguf_are_those_of_its_own_package(
    tmp_path: Path, kind: str
) -> None:
    random = np.random.default_rng(1)
    tensor = random_tensor("blk.0.attn_v.weight", kind, (24, 512), random)
    write_gguf(tmp_path / "a.gguf", CASES["llama"].metadata, [tensor])
    ((_, read),) = [(each.name, each.read()) for each in gguf.read(tmp_path / "a.gguf")]
    assert not isinstance(read, mx.array)
    expected = dequantize(
        np.frombuffer(tensor.data, np.uint8).reshape(24, -1), GGMLQuantizationType[kind]
    )

    for weight in (read, PackedLayer(read.packed())):
        values, terms = whole(ExactWeight(weight))
        error = np.abs(values[0] - expected)
        assert np.all(error <= 2.0**-23 * np.sqrt(terms[0]))
