"""mlx-lm's tools accept converted models."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers, remove_lora_layers
from mlx_lm.utils import compute_bits_per_weight, dequantize_model, get_total_parameters

import mlx_marlin
from mlx_marlin.layers.linear import MarlinLinear
from support.models import LAYOUTS, TOKENS, assert_same_model, tiny_llama, types

pytestmark = pytest.mark.usefixtures("stock")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mlx_lm_counts_the_same_parameters(layout: str) -> None:
    stock = tiny_llama()

    model = mlx_marlin.optimize(tiny_llama(), layout=layout)

    assert get_total_parameters(model) == get_total_parameters(stock)
    # Packed, a k of 160 is padded to 192, and an n of 160 to nothing.
    assert compute_bits_per_weight(model) == pytest.approx(
        compute_bits_per_weight(stock), rel=0.1
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mlx_lm_dequantizes_the_same_weights(layout: str) -> None:
    expected = dequantize_model(tiny_llama())

    model = dequantize_model(mlx_marlin.optimize(tiny_llama(), layout=layout))

    assert_same_model(model, expected)


LORA = {"rank": 4, "scale": 2.0, "dropout": 0.0}


def with_adapters(model: nn.Module, **config: Any) -> nn.Module:
    """Adds LoRA to both blocks, with adapters that are not zero."""
    mx.random.seed(1)
    linear_to_lora_layers(model, 2, LORA | config)
    for path, array in tree_flatten(model.parameters()):
        if path.endswith("lora_b"):
            fresh = mx.random.normal(array.shape) * 0.05
            model.update(tree_unflatten([(path, fresh)]))
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lora_wraps_our_layers_as_mlxs(layout: str) -> None:
    stock = with_adapters(tiny_llama())
    model = mlx_marlin.optimize(tiny_llama(), layout=layout)

    with_adapters(model)

    wrapped = [path for path in types(model) if path.endswith("q_proj.linear")]
    assert len(wrapped) == 2
    assert all(types(model)[path] is MarlinLinear for path in wrapped)
    assert mx.allclose(model(TOKENS), stock(TOKENS), atol=1e-4)
    assert_same_model(mlx_marlin.restore(model), stock)
    remove_lora_layers(model)
    assert_same_model(model, tiny_llama())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_inside_lora_are_converted_too(layout: str) -> None:
    stock = with_adapters(tiny_llama())

    model = mlx_marlin.optimize(with_adapters(tiny_llama()), layout=layout)

    assert types(model)["model.layers.0.self_attn.q_proj.linear"] is MarlinLinear
    assert mx.allclose(model(TOKENS), stock(TOKENS), atol=1e-4)


@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_adapters_are_those_of_mlxs_layers(layout: str, dequantize: bool) -> None:
    def fused(model: nn.Module) -> nn.Module:
        layers = [
            (path, module.fuse(dequantize=dequantize))
            for path, module in model.named_modules()
            if hasattr(module, "fuse")
        ]
        assert len(layers) == 14
        model.update_modules(tree_unflatten(layers))
        return model

    expected = fused(with_adapters(tiny_llama()))
    model = mlx_marlin.optimize(tiny_llama(), layout=layout)

    fused(with_adapters(model))

    assert_same_model(mlx_marlin.restore(model), expected)


def test_dora_reads_our_weights_as_mlxs() -> None:
    def adapted(model: nn.Module) -> mx.array:
        mx.random.seed(1)
        linear_to_lora_layers(model, 2, LORA, use_dora=True)
        return model(TOKENS)

    for layout in LAYOUTS:
        y = adapted(mlx_marlin.optimize(tiny_llama(), layout=layout))

        assert mx.allclose(y, adapted(tiny_llama()), atol=1e-4)
