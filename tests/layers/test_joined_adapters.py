"""mlx-lm's adapters and tools work on joined layers as on MLX's own."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import qwen2
from mlx_lm.tuner.utils import linear_to_lora_layers, remove_lora_layers
from mlx_lm.utils import compute_bits_per_weight, dequantize_model, get_total_parameters

import mlx_marlin
from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.layers.linear import MarlinLinear
from support.models import LAYOUTS, TOKENS, arrays, assert_same_model, tiny_llama, types
from support.profiles import sampled

pytestmark = [
    pytest.mark.usefixtures("stock"),
    pytest.mark.parametrize("layout", LAYOUTS),
]
LORA = {"rank": 4, "scale": 2.0, "dropout": 0.0}
SOME = ["self_attn.q_proj", "self_attn.v_proj"]
JOINED = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}


def tiny_qwen2() -> nn.Module:
    """Returns a model whose q, k and v have biases that are not zero."""
    args = qwen2.ModelArgs(
        model_type="qwen2",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=160,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=100,
    )
    mx.random.seed(0)
    model = qwen2.Model(args)
    for path, array in tree_flatten(model.parameters()):
        if path.endswith("_proj.bias"):
            model.update(tree_unflatten([(path, mx.random.normal(array.shape))]))
    nn.quantize(model, group_size=32, bits=4)
    return model


MODELS = pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2])
Make = Callable[[], nn.Module]


def joined(make: Make, layout: str, **options: Any) -> nn.Module:
    model = mlx_marlin.optimize(make(), layout=layout, join=True, **options)
    assert any(isinstance(each, MarlinPart) for each in model.modules())
    return model


def adapted(model: nn.Module, *, dora: bool = False, **config: Any) -> nn.Module:
    mx.random.seed(1)
    model.freeze()
    linear_to_lora_layers(model, 2, LORA | config, use_dora=dora)
    return model


def loss(model: nn.Module, tokens: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def trained(model: nn.Module, *, compiled: bool = False) -> nn.Module:
    """Trains what is not frozen by two steps, as mlx-lm does."""
    optimizer = mlx.optimizers.SGD(learning_rate=0.5)
    loss_and_grad = nn.value_and_grad(model, loss)

    def step(tokens: mx.array) -> mx.array:
        value, gradients = loss_and_grad(model, tokens)
        optimizer.update(model, gradients)
        return value

    if compiled:
        state = [model.state, optimizer.state]
        step = partial(mx.compile, inputs=state, outputs=state)(step)
    model.train()
    for _ in range(2):
        mx.eval(step(TOKENS), model.state, optimizer.state)
    return model


@sampled(3)
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("config", [{}, {"keys": SOME}], ids=["all", "some"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@MODELS
def test_adapters_train_as_on_mlxs_layers(
    request: pytest.FixtureRequest,
    make: Make,
    dora: bool,
    config: dict[str, Any],
    compiled: bool,
    layout: str,
) -> None:
    if not compiled:
        request.getfixturevalue("unfused")
    stock = adapted(make(), dora=dora, **config)
    model = adapted(joined(make, layout), dora=dora, **config)
    wrapped = [path for path in types(model) if path.endswith("_proj.linear")]
    assert len(wrapped) == (4 if config else 14)
    base = model.model.layers[1].self_attn.q_proj.linear
    assert type(base) is MarlinPart
    before = model(TOKENS)
    assert mx.allclose(before, stock(TOKENS), atol=1e-4)

    trained(model, compiled=compiled)
    trained(stock, compiled=compiled)

    assert not mx.allclose(model(TOKENS), before, atol=1e-2)
    assert mx.allclose(model(TOKENS), stock(TOKENS), atol=1e-3)
    names = {path.split(".")[-1] for path in flat(model.trainable_parameters())}
    assert names == ({"lora_a", "lora_b", "m"} if dora else {"lora_a", "lora_b"})
    restored = mlx_marlin.restore(model)
    assert types(restored) == types(stock)
    if not dora:
        remove_lora_layers(stock)
        assert_same_model(remove_lora_layers(restored), stock)


def flat(tree: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(tree))


@MODELS
def test_adapters_are_removed_from_joined_layers(make: Make, layout: str) -> None:
    model = adapted(joined(make, layout))

    remove_lora_layers(model)

    assert type(model.model.layers[0].mlp.up_proj) is MarlinPart
    expected = remove_lora_layers(adapted(make()))
    assert mx.allclose(model(TOKENS), expected(TOKENS), atol=1e-4)
    assert_same_model(mlx_marlin.restore(model), expected)


@sampled(5, 16)
@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize("config", [{}, {"keys": SOME}], ids=["all", "some"])
@MODELS
def test_fused_adapters_are_those_of_mlxs_layers(
    make: Make, config: dict[str, Any], dequantize: bool, layout: str
) -> None:
    def fused(model: nn.Module) -> nn.Module:
        adapted(model, **config)
        for path, array in tree_flatten(model.parameters()):
            if path.endswith("lora_b"):
                fresh = mx.random.normal(array.shape) * 0.05
                model.update(tree_unflatten([(path, fresh)]))
        layers = [
            (path, module.fuse(dequantize=dequantize))
            for path, module in model.named_modules()
            if hasattr(module, "fuse")
        ]
        model.update_modules(tree_unflatten(layers))
        return model

    expected = fused(make())
    model = fused(joined(make, layout))

    assert mx.allclose(model(TOKENS), expected(TOKENS), atol=1e-4)
    assert_same_model(mlx_marlin.restore(model), expected)


@MODELS
def test_mlx_lm_counts_and_dequantizes_joined_layers(make: Make, layout: str) -> None:
    stock, model = make(), joined(make, layout)
    bits = compute_bits_per_weight(stock)

    assert get_total_parameters(model) == get_total_parameters(stock)
    assert compute_bits_per_weight(model) == pytest.approx(bits, rel=0.1)
    expected = dequantize_model(stock)
    dequantized = dequantize_model(model)
    assert_same_model(dequantized, expected)
    assert mx.allclose(dequantized(TOKENS), expected(TOKENS), atol=1e-4)


def test_tools_find_the_parts_and_not_the_joined_layer(layout: str) -> None:
    model = joined(tiny_llama, layout)

    names = {path.split(".")[-1] for path in types(model)}

    assert names >= JOINED
    assert "joined" not in names
    leaves = dict(tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module))
    assert {path.split(".")[-1] for path in leaves} >= JOINED
    # mx.eval and optimizers do find its arrays.
    assert any(".q_proj.joined." in path for path in arrays(model))


def test_each_part_shows_its_own_parameters(layout: str) -> None:
    stock, model = tiny_qwen2(), joined(tiny_qwen2, layout)

    for ours, theirs in zip(model.layers, stock.layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj"):
            part, layer = ours.self_attn[name], theirs.self_attn[name]
            assert isinstance(part, nn.QuantizedLinear)
            assert "bias" in part
            for parameter in ("weight", "scales", "biases", "bias"):
                found, expected = getattr(part, parameter), layer[parameter]
                assert mx.array_equal(found, expected)
            assert (part.group_size, part.bits, part.mode) == (32, 4, "affine")
        assert "bias" not in ours.mlp.up_proj
        assert not hasattr(ours.mlp.up_proj, "bias")


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_a_parameter_of_a_part_cannot_be_set(name: str, layout: str) -> None:
    model = joined(tiny_qwen2, layout)
    part = model.layers[0].self_attn[name]
    before, expected = arrays(model), model(TOKENS)

    with pytest.raises(ValueError, match=r"'bias' cannot be set: .* call mlx_marlin\."):
        part.bias = part.bias + 1
    with pytest.raises(ValueError, match="'bias' cannot be set"):
        model.load_weights(
            [(f"model.layers.0.self_attn.{name}.bias", part.bias)], False
        )
    with pytest.raises(ValueError, match="'joined' cannot be set"):
        part["joined"] = nn.Linear(64, 128)
    with pytest.raises(AttributeError):
        part.weight = part.weight

    assert all(arrays(model)[path] is array for path, array in before.items())
    assert mx.array_equal(model(TOKENS), expected)


@pytest.mark.parametrize("first", [True, False])
def test_joined_biases_are_frozen_and_trained_together(
    first: bool, layout: str
) -> None:
    model = joined(tiny_qwen2, layout)
    bias = "model.layers.0.self_attn.q_proj.joined.bias"

    model.freeze()
    assert not flat(model.trainable_parameters())
    model.unfreeze(keys=["bias"])
    assert bias in flat(model.trainable_parameters())
    assert len(flat(model.trainable_parameters())) == 2
    model.freeze(keys="bias", strict=True)
    assert not flat(model.trainable_parameters())
    model.layers[0].self_attn["q_proj" if first else "v_proj"].unfreeze(keys="bias")
    assert [*flat(model.trainable_parameters())] == [bias]

    before = model(TOKENS)
    trained(model)

    assert not mx.allclose(model(TOKENS), before, atol=1e-3)


def test_the_mode_reaches_the_joined_layer(layout: str) -> None:
    model = joined(tiny_llama, layout)

    for mode in (False, True):
        model.train(mode)

        separated = mlx_marlin.optimize(copy.deepcopy(model), layout=layout)
        assert all(each.training is mode for each in separated.modules())


def test_a_joined_model_has_no_gradient_of_its_codes(layout: str) -> None:
    """As a quantized model of MLX's, it is not trained in full."""
    for model in (tiny_llama(), joined(tiny_llama, layout)):
        model.unfreeze()

        with pytest.raises(RuntimeError, match="no gradient wrt the quantized weights"):
            trained(model)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
@MODELS
def test_a_copy_of_a_joined_model_is_independent(
    copied: Callable[[nn.Module], nn.Module], make: Make, layout: str
) -> None:
    model = joined(make, layout)
    expected = model(TOKENS)

    twin = copied(model)

    assert mx.array_equal(twin(TOKENS), expected)
    assert_same_model(mlx_marlin.restore(model), make())
    adapted(twin)
    twin.model.layers[0].self_attn.q_proj.linear.shared.layer.set_dtype(mx.float16)
    assert type(mlx_marlin.restore(twin).layers[0].self_attn.q_proj.linear) is (
        nn.QuantizedLinear
    )


def test_a_block_with_one_adapter_runs_its_own_code(layout: str) -> None:
    model = joined(tiny_llama, layout, trace=True)
    cache = model.make_cache() if hasattr(model, "make_cache") else [None] * 2

    adapted(model, keys=SOME)

    y = model(TOKENS[:1, :1], cache=cache)
    assert mx.allclose(y, tiny_llama()(TOKENS[:1, :1]), atol=1e-4)


def test_optimizing_again_finds_parts_in_adapters(layout: str) -> None:
    model = adapted(joined(tiny_llama, layout), keys=SOME)

    mlx_marlin.optimize(model, layout=layout)

    found = types(model)
    assert MarlinPart not in found.values()
    assert found["model.layers.0.self_attn.q_proj.linear"] is MarlinLinear
    assert found["model.layers.0.self_attn.k_proj"] is MarlinLinear
    assert mx.allclose(model(TOKENS), tiny_llama()(TOKENS), atol=1e-4)
