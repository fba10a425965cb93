"""mlx-lm's layers of several heads run on our kernels and come back unchanged."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import deepseek_v3
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from models import TOKENS, arrays, types

import mlx_marlin
from mlx_marlin import launch
from mlx_marlin.plan import Plan

HEADS = 4


def tiny_deepseek() -> nn.Module:
    args = deepseek_v3.ModelArgs(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        n_routed_experts=None,
        kv_lora_rank=64,
        q_lora_rank=64,
        qk_rope_head_dim=32,
        v_head_dim=32,
        qk_nope_head_dim=32,
        max_position_embeddings=64,
    )
    mx.random.seed(0)
    model = deepseek_v3.Model(args)
    nn.quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    return model


def heads(mode: str = "affine") -> QuantizedMultiLinear:
    return MultiLinear(64, 40, HEADS).to_quantized(
        32, 8 if mode == "mxfp8" else 4, mode
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("shape", [(2, HEADS, 3), (5, HEADS, 1), (2, 1, 3), (HEADS, 2)])
def test_a_layer_answers_as_mlx_lms(mode: str, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(heads(mode))
    x = mx.random.normal((*shape, 64))
    expected = model(x)

    mlx_marlin.optimize(model)

    (layer,) = model.layers
    assert type(layer).__name__ == "MarlinMultiLinear"
    assert isinstance(layer, QuantizedMultiLinear)
    assert mx.allclose(layer(x), expected, rtol=1e-4, atol=1e-4)
    back = mx.random.normal((*shape, 40))
    stock = heads(mode)
    stock.update(layer.parameters())
    assert mx.array_equal(layer(back, transpose=False), stock(back, transpose=False))


@pytest.mark.usefixtures("kernels")
def test_a_model_with_latent_attention_answers_the_same() -> None:
    model = tiny_deepseek()
    before, names = arrays(model), types(model)

    def answers() -> list[mx.array]:
        cache = make_prompt_cache(model)
        found = [model(TOKENS, cache=cache)]
        found += [model(TOKENS[:, i : i + 1], cache=cache) for i in range(2)]
        return found

    expected = answers()
    mlx_marlin.optimize(model)
    launch.forget()
    actual = answers()

    kinds = [each.__name__ for each in types(model).values()]
    assert kinds.count("MarlinMultiLinear") == 2 * 2
    for ours, theirs in zip(actual, expected, strict=True):
        assert mx.allclose(ours, theirs, rtol=1e-3, atol=1e-3)
    # A token of each of two prompts: two rows of every head.
    batches = {plan.problem.batch for plan in launch.plans_built()}
    assert batches == {1, HEADS}
    mlx_marlin.restore(model)
    assert types(model) == names
    assert all(
        mx.array_equal(each, before[path]) for path, each in arrays(model).items()
    )
    again = answers()
    assert all(mx.array_equal(a, b) for a, b in zip(again, expected, strict=True))


def test_heads_share_their_arrays_with_mlx_lms_layer(ran: list[Plan]) -> None:
    model = nn.Sequential(heads())
    before = dict(model.layers[0])
    state = model.layers[0].trainable_parameters(), model.layers[0].training

    mlx_marlin.optimize(model, layout="marlin")
    layer = model.layers[0]

    assert all(layer[name] is each for name, each in before.items())
    assert (layer.trainable_parameters(), layer.training) == state
    layer(mx.ones((3, HEADS, 1, 64)))
    assert [(p.problem.m, p.problem.batch) for p in ran] == [(3, HEADS)]
    mlx_marlin.optimize(model)
    assert model.layers[0] is layer


def test_heads_stand_in_the_way_of_invariance() -> None:
    model = nn.Sequential(nn.QuantizedLinear(64, 64), heads())

    with pytest.raises(ValueError, match=r"1 quantized layers .* would stay MLX's"):
        mlx_marlin.optimize(model, invariant=True)

    assert type(model.layers[0]) is nn.QuantizedLinear
