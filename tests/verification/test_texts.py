"""Activations and perplexities of a text."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import qwen2_moe
from mlx_lm.models.mla import QuantizedMultiLinear

import mlx_marlin
from mlx_marlin.backends import selection
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from mlx_marlin.lm.verification import gate, inputs
from mlx_marlin.lm.verification.inputs import Capture, perplexity
from mlx_marlin.lm.verification.layers import checked_layers
from support.gguf_cases import CASES, arguments
from support.gguf_models import random_model
from support.models import Layers, tiny_llama

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
pytestmark = pytest.mark.usefixtures("kernels")


def captured(model: nn.Module, x: mx.array, rows: int) -> dict[tuple[str, str], Any]:
    layers = [*checked_layers(model)]
    capture = Capture(layers, rows)
    capture.run(model, x)
    return {(each.name, each.operation): capture.of(each) for each in layers}


def test_the_inputs_of_layers_are_kept_and_the_model_is_left_as_it_was() -> None:
    model = mlx_marlin.optimize(tiny_llama(), layout="marlin")
    classes = [type(module) for module in model.modules()]
    tokens = mx.array([[5, 3, 8, 1, 9]])

    found = captured(model, tokens, 3)

    assert [type(module) for module in model.modules()] == classes
    lookup = found["model.embed_tokens", "lookup"]
    assert lookup.x.tolist() == [5, 3, 8]
    block = model.model.layers[0]
    x = block.input_layernorm(model.model.embed_tokens(tokens))[0, :3]
    for name in ("q_proj", "k_proj", "v_proj"):
        own = found[f"model.layers.0.self_attn.{name}", "linear"]
        assert mx.array_equal(own.x, x)
        assert own.source == "captured"
    assert found["model.embed_tokens", "head"].x.shape == (3, 64)


@pytest.mark.parametrize("length", [3, 40])  # mlx-lm sorts 64 pairs and more
def test_experts_see_the_rows_that_chose_them(length: int) -> None:
    case = CASES["qwen2moe"]
    config = arguments(case)
    assert config["model_type"] == "qwen2_moe"
    model = random_model(case)
    assert isinstance(model, qwen2_moe.Model)
    nn.quantize(model.model.layers[0].mlp.switch_mlp, 32, 4)
    tokens = mx.arange(length)[None] % 40
    layer = model.model.layers[0].mlp.switch_mlp.gate_proj
    inputs: list[tuple[mx.array, mx.array]] = []

    class Spy(type(layer)):  # type: ignore[misc]
        def __call__(
            self, x: mx.array, indices: mx.array, *args: Any, **opts: Any
        ) -> Any:
            inputs.append((x, indices))
            return super().__call__(x, indices, *args, **opts)

    layer.__class__ = Spy
    model(tokens)
    layer.__class__ = Spy.__base__
    found = captured(model, tokens, 1000)

    own = found["model.layers.0.mlp.switch_mlp.gate_proj", "experts"]
    ((x, indices),) = inputs
    assert own.rows == indices.size == 2 * length
    pairs = np.broadcast_to(np.array(x)[..., 0, :], (*indices.shape, 64))
    assert np.array_equal(np.array(own.x), pairs.reshape(-1, 64))
    assert np.array_equal(np.array(own.matrices), np.array(indices).reshape(-1))
    y = layer(own.x[:, None, None], own.matrices[:, None])
    assert mx.allclose(y.reshape(-1), layer(x, indices).reshape(-1), 1e-5, 1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_heads_are_kept_together(shared: bool) -> None:
    layer = QuantizedMultiLinear(64, 48, 3, 32, 4, "affine")
    x = mx.random.normal((1, 1 if shared else 3, 5, 64))

    own = captured(Layers(layer), x, 4)["layers.0", "heads"]

    assert (own.rows, own.step, own.x.shape) == (4, 3, (12, 64))
    (checked,) = checked_layers(Layers(layer))
    y = checked.product(own.x, own.matrices).reshape(4, 3, 48)
    assert mx.allclose(y.swapaxes(0, 1), layer(x)[0, :, :4], 1e-5, 1e-5)


def test_a_model_passes_on_a_text_and_both_perplexities_are_right(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlx_marlin.optimize(tiny_llama(), layout="marlin")
    backends = []

    def observed(*args: Any) -> float:
        backends.append(selection.backend())
        return perplexity(*args) * (2 if backends[-1] == "stock" else 1)

    monkeypatch.setattr(gate, "perplexity", observed)
    report = mlx_marlin.verify(model, text=TEXT, tokenizer=tokenizer, rows=(1, 8))

    assert report.passed, str(report)
    layers = [each.name for each in checked_layers(model) if each.is_quantized]
    assert [each.name for each in report.layers] == layers
    kinds = {p.activations for each in report.layers for p in each.products}
    assert kinds == {"random", "captured"}
    assert report.perplexity is not None
    tokens = mx.array([tokenizer.encode(TEXT)[:129]])
    assert report.perplexity.tokens == 128
    logits = model(tokens[:, :-1]).astype(mx.float32)
    losses = nn.losses.cross_entropy(logits, tokens[:, 1:])
    expected = float(mx.exp(losses.mean()).item())
    assert np.isclose(report.perplexity.after, expected, rtol=1e-4)
    assert np.isclose(report.perplexity.before, 2 * expected, rtol=1e-4)
    assert "perplexity" in str(report)
    assert backends == [report.backend, "stock"]
    assert selection.backend() == report.backend


@pytest.mark.slow
def test_the_perplexity_before_is_the_sources(plain: Path, tokenizer: Any) -> None:
    model = load_model(open_source(plain))
    nn.quantize(model, 64, 2)

    report = mlx_marlin.verify(model, plain, text=TEXT, tokenizer=tokenizer, rows=(1,))

    assert report.perplexity is not None
    tokens = inputs.windows(TEXT, tokenizer)
    source = perplexity(load_model(open_source(plain)), tokens)
    assert np.isclose(report.perplexity.before, source, rtol=1e-3)
    assert report.perplexity.after != report.perplexity.before


@pytest.mark.parametrize(
    ("length", "shape"),
    [(2, (1, 2)), (128, (1, 128)), (129, (1, 129)), (300, (2, 129)), (9999, (16, 129))],
)
def test_a_text_is_cut_into_windows(
    tokenizer: Any, length: int, shape: tuple[int, int]
) -> None:
    assert inputs.windows("a" * length, tokenizer).shape == shape


def test_a_text_needs_two_tokens(tokenizer: Any) -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match="text has 1 tokens, expected at least 2"):
        mlx_marlin.verify(model, text="a", tokenizer=tokenizer)
