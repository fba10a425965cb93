"""mlx-lm's tools accept converted models."""

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
def test_mlx_lm_counts_and_dequantizes_the_same_weights(layout: str) -> None:
    stock, model = tiny_llama(), mlx_marlin.optimize(tiny_llama(), layout=layout)

    assert get_total_parameters(model) == get_total_parameters(stock)
    # Packed, a k of 160 is padded to 192, and an n of 160 to nothing.
    bits = compute_bits_per_weight(model), compute_bits_per_weight(stock)
    assert bits[0] == pytest.approx(bits[1], rel=0.1)
    assert_same_model(dequantize_model(model), dequantize_model(stock))


LORA = {"rank": 4, "scale": 2.0, "dropout": 0.0}


def with_adapters(model: nn.Module) -> nn.Module:
    """Adds LoRA to both blocks, with adapters that are not zero."""
    mx.random.seed(1)
    linear_to_lora_layers(model, 2, LORA)
    for path, array in tree_flatten(model.parameters()):
        if path.endswith("lora_b"):
            fresh = mx.random.normal(array.shape) * 0.05
            model.update(tree_unflatten([(path, fresh)]))
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first", [False, True])
def test_lora_wraps_our_layers_as_mlxs(layout: str, first: bool) -> None:
    stock = with_adapters(tiny_llama())
    model = with_adapters(tiny_llama()) if first else tiny_llama()

    mlx_marlin.optimize(model, layout=layout)
    if not first:
        with_adapters(model)

    wrapped = [path for path in types(model) if path.endswith("q_proj.linear")]
    assert len(wrapped) == 2
    assert all(types(model)[path] is MarlinLinear for path in wrapped)
    assert mx.allclose(model(TOKENS), stock(TOKENS), atol=1e-4)
    assert_same_model(mlx_marlin.restore(model), stock)
    remove_lora_layers(model)
    assert_same_model(model, tiny_llama())


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
