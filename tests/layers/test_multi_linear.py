"""mlx-lm's layers of several heads run on our kernels and come back unchanged."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import deepseek_v3
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

import mlx_marlin
from mlx_marlin import state
from mlx_marlin.backends import graph
from mlx_marlin.lm.known_layers import marlin_heads
from mlx_marlin.planning.plan import Plan
from support.models import TOKENS, arrays, types
from support.profiles import sampled

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


LAYOUTS = pytest.mark.parametrize("layout", ["mlx", "marlin"])


@sampled(2)
@pytest.mark.usefixtures("kernels")
@LAYOUTS
@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("shape", [(2, HEADS, 3), (5, HEADS, 1), (2, 1, 3), (HEADS, 2)])
def test_a_layer_answers_as_mlx_lms(
    mode: str, shape: tuple[int, ...], layout: str
) -> None:
    stock = heads(mode)
    model = nn.Sequential(stock)
    x, back = mx.random.normal((*shape, 64)), mx.random.normal((*shape, 40))

    mlx_marlin.optimize(model, layout=layout)

    (layer,) = model.layers
    assert type(layer).__name__ == "MarlinMultiLinear"
    assert isinstance(layer, QuantizedMultiLinear)
    assert mx.allclose(layer(x), stock(x), rtol=1e-4, atol=1e-4)
    actual, expected = layer(back, transpose=False), stock(back, transpose=False)
    assert mx.allclose(actual, expected, rtol=1e-4, atol=1e-4)
    # In MLX's layout these are MLX's own.
    assert mx.array_equal(actual, expected) or layout == "marlin"


@sampled(1)
@pytest.mark.usefixtures("kernels")
@LAYOUTS
def test_a_model_with_latent_attention_answers_the_same(layout: str) -> None:
    model = tiny_deepseek()
    before, names = arrays(model), types(model)

    def answers() -> list[mx.array]:
        cache = make_prompt_cache(model)
        found = [model(TOKENS, cache=cache)]
        found += [model(TOKENS[:, i : i + 1], cache=cache) for i in range(2)]
        return found

    expected = answers()
    mlx_marlin.optimize(model, layout=layout)
    state.reset()
    actual = answers()

    kinds = [each.__name__ for each in types(model).values()]
    assert kinds.count("MarlinMultiLinear") == 2 * 2
    for ours, theirs in zip(actual, expected, strict=True):
        assert mx.allclose(ours, theirs, rtol=1e-3, atol=1e-3)
    # A token of each of two prompts: two rows of every head.
    batches = {plan.problem.batch for plan in graph.plans_built()}
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

    mlx_marlin.optimize(model)
    layer = model.layers[0]

    assert all(layer[name] is each for name, each in before.items())
    assert (layer.trainable_parameters(), layer.training) == state
    layer(mx.ones((3, HEADS, 1, 64)))
    assert [(p.problem.m, p.problem.batch) for p in ran] == [(3, HEADS)]
    mlx_marlin.optimize(model)
    assert model.layers[0] is layer


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_packed_heads_hold_no_other_arrays_and_show_mlxs(mode: str) -> None:
    model = nn.Sequential(heads(mode))
    stock = model.layers[0]
    before = dict(stock)

    for layout in ("marlin", "marlin", "mlx", "marlin"):
        was = model.layers[0]
        mlx_marlin.optimize(model, layout=layout)
        layer = model.layers[0]
        assert (layer is was) == (getattr(was, "layout", None) == layout)
        assert (layer.packed is None) == (layout == "mlx")
        assert ({*layer} == {"words", "packed_scales"}) == (layout == "marlin")
        assert layer.trainable_parameters() == {}
        for name, each in before.items():
            assert mx.array_equal(getattr(layer, name), each)


@pytest.mark.usefixtures("kernels")
@LAYOUTS
def test_heads_can_be_divided_among_machines(layout: str) -> None:
    model = nn.Sequential(heads())
    x = mx.random.normal((2, HEADS, 3, 64))
    expected = model(x)
    mlx_marlin.optimize(model, layout=layout)

    # As mlx-lm's models do it.
    model.layers[0].apply(lambda w: w[1:3])

    assert mx.allclose(model(x[:, 1:3]), expected[:, 1:3], rtol=1e-4, atol=1e-4)


def test_packed_heads_are_divided_alike() -> None:
    model = mlx_marlin.optimize(nn.Sequential(heads()), layout="marlin")
    layer = model.layers[0]
    words, scales = layer["words"], layer["packed_scales"]

    with pytest.raises(ValueError, match="scales must be one of"):
        layer.update({"words": words[:2], "packed_scales": scales[:3]})
    with pytest.raises(ValueError, match="words of a packed MarlinMultiLinear must"):
        layer.update({"words": words[:2]})

    assert layer["words"] is words
    assert layer["packed_scales"] is scales


@sampled(1)
@pytest.mark.usefixtures("kernels")
@LAYOUTS
@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_a_row_of_invariant_heads_has_the_same_bits_in_any_batch(
    dtype: mx.Dtype, mode: str, layout: str
) -> None:
    model = nn.Sequential(heads(mode))
    stock = heads_in(dtype, model)
    mlx_marlin.optimize(model, layout=layout, invariant=True)
    (layer,) = model.layers
    x = mx.random.normal((2, HEADS, 16, 64), dtype, key=mx.random.key(1))

    state.reset()
    whole = layer(x)

    assert [plan.problem.invariant for plan in graph.plans_built()] == [True]

    assert mx.allclose(whole, stock(x.astype(mx.float32)), rtol=1e-2, atol=1e-2)
    for rows in (1, 2, 5, 15):
        for first in (0, 16 - rows):
            some = slice(first, first + rows)
            assert mx.array_equal(layer(x[:1, :, some]), whole[:1, :, some])
    assert mx.array_equal(layer(x[1:]), whole[1:])


def heads_in(dtype: mx.Dtype, model: nn.Module) -> QuantizedMultiLinear:
    """Returns the model's only layer, after its scales have been converted."""
    stock: QuantizedMultiLinear = model.layers[0]
    if stock.mode == "affine":
        stock.scales, stock.biases = (
            array.astype(dtype) for array in (stock.scales, stock.biases)
        )
    return stock


@pytest.mark.usefixtures("kernels")
@LAYOUTS
def test_products_that_are_not_transposed_stay_mlxs_in_an_invariant_model(
    layout: str,
) -> None:
    model = mlx_marlin.optimize(nn.Sequential(heads()), layout=layout)
    back = mx.random.normal((2, HEADS, 3, 40))
    expected = model.layers[0](back, transpose=False)

    mlx_marlin.optimize(model, layout=layout, invariant=True)

    assert model.layers[0].invariant
    assert mx.array_equal(model.layers[0](back, transpose=False), expected)


def test_a_weight_that_is_no_batch_of_heads_is_refused() -> None:
    packed = mlx_marlin.pack(*mx.quantize(mx.ones((32, 64))))
    with pytest.raises(ValueError, match=r"batch=\(\).*expected \(heads,\) without"):
        marlin_heads().from_packed(packed)
