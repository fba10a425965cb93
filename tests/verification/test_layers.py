"""Correct layers of every kind and format pass; wrong results are found and named."""

import re
from collections.abc import Callable
from itertools import cycle
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import SwitchGLU

import mlx_marlin
from mlx_marlin import MarlinLinear
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.lm.verification.report import LayerReport, Report
from mlx_marlin.products.packing import pack
from support import format_cases, oracles
from support.format_cases import any_weight
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
