"""Layers above a limit stay on stock MLX, in a model, in its folder and if loaded."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_marlin
from mlx_marlin import MarlinLinear
from mlx_marlin.checkpoints.quantization import Quantization
from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.lm import layer_conversion
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from mlx_marlin.lm.verification import gate
from mlx_marlin.products.packing import pack
from support.format_cases import any_weight
from support.models import TOKENS, Layers, tiny_llama
from support.profiles import sampled

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture
def wrong_wide_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes our products wrong where k is 160 or 256: those of down_proj."""
    own = MarlinLinear.__call__

    def call(layer: MarlinLinear, x: mx.array) -> mx.array:
        return own(layer, x) * (1.01 if x.shape[-1] in (160, 256) else 1)

    monkeypatch.setattr(MarlinLinear, "__call__", call)


DOWN = tuple(f"model.layers.{i}.mlp.down_proj" for i in range(2))


@sampled(1)
@pytest.mark.usefixtures("wrong_wide_products")
@pytest.mark.parametrize("join", [True, False])
def test_layers_of_a_model_are_converted_and_stay_so(join: bool) -> None:
    expected = tiny_llama()(TOKENS)
    model = mlx_marlin.optimize(tiny_llama(), layout="marlin", join=join)
    assert not mx.allclose(model(TOKENS), expected, 1e-4, 1e-4)

    report = mlx_marlin.verify(model, rows=(1, 8), apply=True)

    assert report.failed == report.moved == DOWN
    assert f"{DOWN[0]}: stays on stock MLX from now on" in str(report)
    assert mx.allclose(model(TOKENS), expected, 1e-4, 1e-4)
    query = model.model.layers[0].self_attn.q_proj
    assert type(query) is (MarlinPart if join else MarlinLinear)
    mlx_marlin.optimize(model, layout="marlin", join=join)
    assert mx.allclose(model(TOKENS), expected, 1e-4, 1e-4)
    layers = model.model.layers
    assert [type(each.mlp.down_proj) for each in layers] == [nn.QuantizedLinear] * 2
    assert isinstance(layers[0].mlp.up_proj, MarlinLinear) is not join
    again = mlx_marlin.verify(model, rows=(1, 8), apply=True)
    assert again.passed
    assert again.moved == ()


def test_traced_blocks_run_the_layers_of_stock_mlx() -> None:
    model = mlx_marlin.optimize(tiny_llama(), layout="marlin", trace=True)
    tokens = TOKENS[:1, :1]
    model(tokens, cache=make_prompt_cache(model))

    with pytest.raises(ValueError, match=r"'model\.norm' is not a quantized"):
        layer_conversion.keep_on_stock(model, [DOWN[0], "model.norm"])
    assert type(model.model.layers[0].mlp.down_proj) is MarlinLinear
    assert layer_conversion.stock_layers(model) == []
    layer_conversion.keep_on_stock(model, DOWN)

    stock = tiny_llama()
    for each in (model, stock):  # which only the new layer has
        layer = each.model.layers[0].mlp.down_proj
        layer.scales = 2 * layer.scales
    y = model(tokens, cache=make_prompt_cache(model))
    assert mx.allclose(y, stock(tokens), 1e-4, 1e-4)
    assert not mx.allclose(y, tiny_llama()(tokens), 1e-4, 1e-4)


HOW = Quantization(bits=4)


@pytest.fixture
def mlx(plain: Path) -> Path:
    """The folder with float16 weights in a format of MLX's."""
    [*convert(open_source(plain), plain.parent / "mlx", layout="mlx", quantization=HOW)]
    return plain.parent / "mlx"


@pytest.mark.usefixtures("wrong_wide_products", "tokenizer")
@pytest.mark.parametrize("name", ["packed", "gptq", "mlx"])
def test_a_folder_records_the_layers_and_loading_honours_them(
    request: pytest.FixtureRequest, name: str
) -> None:
    folder: Path = request.getfixturevalue(name)
    before = json.loads((folder / "config.json").read_text())

    report = mlx_marlin.verify(folder, rows=(1, 8), apply=True)

    assert report.failed == report.moved == DOWN
    after = json.loads((folder / "config.json").read_text())
    ours = after.pop("mlx_marlin")
    assert [*ours["stock_layers"]] == [*DOWN]
    layers = before.pop("mlx_marlin", {"layers": {}})["layers"]
    assert ours == {"version": 1, "layers": layers, "stock_layers": [*DOWN]}
    assert after == before
    assert not [*folder.glob(".config*")]
    model, _ = mlx_marlin.load(folder)
    down = model.model.layers[0].mlp.down_proj
    inner = down.linear if isinstance(down, ReorderedLinear) else down
    assert type(inner) is nn.QuantizedLinear
    assert mlx_marlin.verify(folder, rows=(1, 8)).passed


def test_saving_keeps_the_decision(plain: Path, tmp_path: Path, tokenizer: Any) -> None:
    [*convert(open_source(plain), tmp_path / "small", quantization=HOW)]
    model = load_model(open_source(tmp_path / "small"))
    layer_conversion.keep_on_stock(model, DOWN)
    expected = model(TOKENS)

    mlx_marlin.save(tmp_path / "saved", model, tokenizer)

    again = load_model(open_source(tmp_path / "saved"))
    assert layer_conversion.stock_layers(again) == layer_conversion.stock_layers(model)
    assert {*layer_conversion.stock_layers(again)} == {*DOWN}
    assert mx.array_equal(again(TOKENS), expected)


def test_a_layer_in_another_order_than_x_cannot_be_saved_on_stock(
    packed: Path, tmp_path: Path, tokenizer: Any
) -> None:
    model = load_model(open_source(packed))
    # The order of `down_proj` is folded into `gate_proj` and `up_proj`.
    layer_conversion.keep_on_stock(model, ["model.layers.0.self_attn.o_proj"])
    with pytest.raises(ValueError, match=r"o_proj\.linear is a layer of MLX with col"):
        mlx_marlin.save(tmp_path / "saved", model, tokenizer)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model.norm"], "'model.norm' is not a quantized layer of the model"),
        (["none"], "'none' is not a quantized layer of the model"),
        ("none", "stock_layers='none', expected a list of names"),
        ([3], r"stock_layers=\[3\], expected a list of names"),
    ],
)
def test_wrong_metadata_are_refused(packed: Path, names: Any, message: str) -> None:
    config = json.loads((packed / "config.json").read_text())
    config["mlx_marlin"]["stock_layers"] = names
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as caught:
        load_model(open_source(packed))
    assert str(packed) in str(caught.value)


def test_a_failed_write_leaves_the_folder_as_it_was(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (packed / "config.json").read_text()

    def fail(*_: Any) -> None:
        raise OSError("full")

    monkeypatch.setattr(gate.os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        gate.record_stock_layers(packed, DOWN)
    assert (packed / "config.json").read_text() == before
    assert not [*packed.glob(".config*")]


def test_experts_that_mlx_lacks_stay_on_our_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = any_weight("symmetric", 6, 16, 8, 64, dtype="float32", seed=1)
    batch = [mx.stack([array] * 3) for array in weight.native]
    layer = MarlinSwitchLinear.from_packed(pack(*batch, **weight.options))
    own = MarlinSwitchLinear.__call__
    monkeypatch.setattr(
        MarlinSwitchLinear, "__call__", lambda *args: own(*args) + mx.array(1.0)
    )
    model = Layers(layer)

    report = mlx_marlin.verify(model, rows=(4,), apply=True)

    assert report.failed == ("layers.0",)
    assert report.moved == ()
    reason = "layers.0: MLX has no experts in groups of 16"
    assert report.not_moved == (reason,)
    assert f"{reason}, so it stays on our kernels" in str(report)
    assert model.layers[0] is layer
