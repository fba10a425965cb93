"""optimize and restore on models of mlx-lm and with its tools."""

import weakref
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers, remove_lora_layers
from mlx_lm.utils import compute_bits_per_weight, dequantize_model, get_total_parameters

import mlx_marlin
from mlx_marlin.layers.embedding import MarlinEmbedding
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.planning.plan import Plan
from support.models import (
    LAYOUTS,
    TOKENS,
    Layers,
    arrays,
    assert_same_model,
    tiny_llama,
    types,
)
from support.recorder import Terminal

pytestmark = pytest.mark.usefixtures("stock")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_answers_the_same_through_our_layers(
    ran: list[Plan], layout: str, tied: bool
) -> None:
    model = tiny_llama(tied=tied)
    expected = model(TOKENS)

    converted = mlx_marlin.optimize(model, layout=layout)

    assert converted is model
    assert ran == []
    assert mx.allclose(model(TOKENS), expected, atol=1e-4)
    # Seven products a block, and the head; a tied head is the embedding's.
    assert len(ran) == 2 * 7 + 1
    problems = [plan.problem for plan in ran]
    assert {each.m for each in problems} == {10}
    head = "mlx" if tied else layout
    assert [each.layout for each in problems] == [layout] * 14 + [head]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_restore_gives_back_every_layer_and_array(layout: str, tied: bool) -> None:
    model = tiny_llama(tied=tied)

    mlx_marlin.optimize(model, layout=layout)
    found = [*types(model).values()]
    assert found.count(MarlinLinear) == (14 if tied else 15)
    assert found.count(MarlinEmbedding) == 1
    assert nn.QuantizedLinear not in found
    before = dict(model.named_modules())
    mlx_marlin.optimize(model, layout=layout)
    assert all(module is before[path] for path, module in model.named_modules())
    restored = mlx_marlin.restore(model)

    assert restored is model
    assert_same_model(model, tiny_llama(tied=tied))


@pytest.mark.parametrize(("first", "second"), [LAYOUTS, LAYOUTS[::-1]])
def test_the_layout_can_be_changed(first: str, second: str) -> None:
    model = mlx_marlin.optimize(tiny_llama(), layout=first)

    mlx_marlin.optimize(model, layout=second)

    layers = [each for each in model.modules() if isinstance(each, MarlinLinear)]
    assert {each.layout for each in layers} == {second}
    assert_same_model(mlx_marlin.restore(model), tiny_llama())


def test_mlxs_layout_shares_every_array() -> None:
    model = tiny_llama()
    before = arrays(model)

    mlx_marlin.optimize(model)

    assert [*arrays(model)] == [*before]
    assert all(array is before[path] for path, array in arrays(model).items())


class Crowded(nn.Module):
    """A model whose layers hang in every kind of container that MLX knows."""

    def __init__(self) -> None:
        super().__init__()

        def layer() -> nn.QuantizedLinear:
            return nn.QuantizedLinear(64, 64)

        self.here = layer()
        self.by_number = {"0": layer(), "1": layer()}
        self.by_name = {"a": layer(), "b.c": layer()}
        self.with_gaps = [None, layer(), mx.zeros(3), layer()]
        self.nested = [[layer()], {"x": [layer()]}]
        self._hidden = layer()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_are_found_wherever_mlx_finds_them(layout: str) -> None:
    model = Crowded()
    paths = [*types(model)]

    mlx_marlin.optimize(model, layout=layout)

    assert [*types(model)] == paths
    leaves = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    assert {type(leaf) for _, leaf in leaves if leaf is not None} == {MarlinLinear}
    mlx_marlin.restore(model)
    assert set(types(model).values()) == {Crowded, nn.QuantizedLinear}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shared_layer_stays_one_layer(layout: str) -> None:
    layer = nn.QuantizedLinear(64, 64)
    model = Layers(layer, nn.QuantizedLinear(64, 64), layer)

    mlx_marlin.optimize(model, layout=layout)

    assert model.layers[0] is model.layers[2]
    assert model.layers[0] is not model.layers[1]
    mlx_marlin.restore(model)
    assert model.layers[0] is model.layers[2]


def test_packing_keeps_one_layer_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers(*(nn.QuantizedLinear(64, 64) for _ in range(4)))
    old = [weakref.ref(layer) for layer in model.layers]
    alive: list[int] = []
    take = MarlinLinear.from_quantized.__func__

    def counting(cls: type[MarlinLinear], layer: Any, **options: Any) -> MarlinLinear:
        alive.append(sum(each() is not None for each in old))
        return take(cls, layer, **options)

    monkeypatch.setattr(MarlinLinear, "from_quantized", classmethod(counting))
    mlx_marlin.optimize(model, layout="marlin")

    assert alive == [4, 3, 2, 1]


def test_linear_layers_are_quantized_on_request_where_they_can_be() -> None:
    model = Layers(nn.Linear(128, 64), nn.Linear(96, 64, bias=False), nn.Linear(64, 96))
    stock = nn.QuantizedLinear.from_linear(model.layers[0], 64, 4)
    kept = model.layers[1]

    mlx_marlin.optimize(model, quantize=True)

    assert model.layers[1] is kept
    assert arrays(model.layers[0]).keys() == arrays(stock).keys()
    assert mx.array_equal(model.layers[0].weight, stock.weight)
    assert type(model.layers[2]) is MarlinLinear
    mlx_marlin.restore(model)
    assert type(model.layers[0]) is nn.QuantizedLinear


FLOATS, QUANTIZED = Layers(nn.Linear(64, 64)), Layers(nn.QuantizedLinear(64, 64))
NOTHING = "no layer to convert"
UNKNOWN_FUSION = r"fuse=.*expected some of \('residual'"


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (FLOATS, {}, NOTHING),
        (Layers(nn.Linear(65, 64)), {"quantize": True}, NOTHING),
        (Layers(nn.QuantizedLinear(80, 64, mode="nvfp4")), {}, NOTHING),
        (Layers(), {}, NOTHING),
        (nn.QuantizedLinear(64, 64), {}, NOTHING),
        (QUANTIZED, {"layout": "rows"}, "layout='rows'"),
        (FLOATS, {"quantize": True, "bits": 7}, "bits=7"),
        (FLOATS, {"quantize": True, "group_size": 0}, "group_size=0"),
        (FLOATS, {"quantize": True, "group_size": 16}, "group_size"),
        (QUANTIZED, {"compute": "half"}, "compute='half': expected None or one of"),
        (QUANTIZED, {"fuse": ("gate",)}, "fuse=.*expected trace=True"),
        (QUANTIZED, {"trace": True, "fuse": "gate"}, UNKNOWN_FUSION),
        (QUANTIZED, {"trace": True, "fuse": ("gates",)}, UNKNOWN_FUSION),
        (QUANTIZED, {"trace": True, "fuse": ("gate", 3)}, UNKNOWN_FUSION),
    ],
)
def test_what_cannot_be_converted_is_said(
    model: nn.Module, options: dict[str, Any], message: str
) -> None:
    before = types(model)

    with pytest.raises(ValueError, match=message):
        mlx_marlin.optimize(model, **options)

    assert types(model) == before


def test_restoring_a_model_that_is_not_ours_changes_nothing() -> None:
    model = tiny_llama()
    before = dict(model.named_modules())

    mlx_marlin.restore(model)

    assert all(module is before[path] for path, module in model.named_modules())


def test_progress_is_shown_at_a_terminal_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = mlx_marlin.optimize(tiny_llama(), progress=True)
    assert capsys.readouterr().err == ""

    for change in (mlx_marlin.restore, mlx_marlin.optimize):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", terminal := Terminal())
            change(model, progress=True)
        assert "15/15" in terminal.getvalue()

    mlx_marlin.optimize(model)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantizing_again_leaves_our_layers_alone(layout: str) -> None:
    model = mlx_marlin.optimize(
        Layers(nn.QuantizedLinear(64, 64), nn.Linear(64, 64)), layout=layout
    )
    ours = model.layers[0]

    nn.quantize(model, bits=8)

    assert model.layers[0] is ours
    assert type(model.layers[1]) is nn.QuantizedLinear


def sharded_layers(mode: str = "affine") -> Layers:
    mx.random.seed(7)
    size, bits = {"mxfp8": (32, 8), "mxfp4": (32, 4), "nvfp4": (16, 4)}.get(
        mode, (64, 4)
    )
    whole = nn.QuantizedLinear(64, 64, True, size, bits, mode)
    return Layers(
        nn.QuantizedLinear(64, 64),
        nn.QuantizedAllToShardedLinear.from_quantized_linear(whole),
        nn.QuantizedShardedToAllLinear.from_quantized_linear(whole),
    )


@pytest.mark.parametrize("index", [1, 2])
def test_sharded_layers_are_not_invariant(index: int) -> None:
    model = Layers(nn.QuantizedLinear(64, 64), sharded_layers().layers[index])
    before = [*model.layers]

    for converted in (False, True):
        if converted:
            before = [*mlx_marlin.optimize(model).layers]
        with pytest.raises(ValueError, match=r"invariant=True: 1 quantized layers"):
            mlx_marlin.optimize(model, invariant=True)
        assert all(a is b for a, b in zip(model.layers, before, strict=True))


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_layers_are_converted_and_restored(layout: str, mode: str) -> None:
    model, x = sharded_layers(mode), mx.random.normal((3, 64), key=mx.random.key(3))
    expected = [layer(x) for layer in model.layers]

    mlx_marlin.optimize(model, layout=layout)

    assert [type(layer).__name__ for layer in model.layers] == [
        "MarlinLinear",
        "MarlinAllToShardedLinear",
        "MarlinShardedToAllLinear",
    ]
    for layer, y in zip(model.layers, expected, strict=True):
        assert mx.allclose(layer(x), y, atol=1e-4)
    mlx_marlin.optimize(model, layout="mlx")
    assert {layer.layout for layer in model.layers} == {"mlx"}
    assert_same_model(mlx_marlin.restore(model), sharded_layers(mode))


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
