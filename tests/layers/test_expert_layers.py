"""mlx-lm's layers of experts are converted, in either layout, and turned back."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.nn.layers.distributed import shard_inplace
from mlx.utils import tree_flatten
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

import mlx_marlin
from mlx_marlin.weights.packed_weight import PackedWeight
from support.models import Layers, arrays
from support.profiles import sampled

Make = Callable[[], Any]


def experts_model(**quantization: Any) -> SwitchGLU:
    model = SwitchGLU(64, 96, 6, bias=True)
    for layer in (model.gate_proj, model.up_proj, model.down_proj):
        layer.bias = mx.random.normal(layer.bias.shape)
    nn.quantize(model, **quantization)
    return model


LAYERS = ("gate_proj", "up_proj", "down_proj")
QUANTIZED = [
    {"group_size": 32, "bits": 4},
    {"group_size": 32, "bits": 3},
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
]


@sampled(2)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_mlx_lms_layers_of_experts_are_converted_and_turned_back(
    layout: str, quantization: dict[str, Any]
) -> None:
    model = experts_model(**quantization)
    x = mx.random.normal((2, 20, 64))
    chosen = mx.random.randint(0, 6, (2, 20, 2))  # 80 pairs: mlx-lm sorts them
    expected = model(x, chosen)
    before = dict(tree_flatten(model.parameters()))
    trained = [name for name, _ in tree_flatten(model.trainable_parameters())]

    mlx_marlin.optimize(model, layout=layout)
    y = model(x, chosen)

    layer = model.up_proj
    assert type(layer).__name__ == "MarlinSwitchLinear"
    assert isinstance(layer, QuantizedSwitchLinear)
    assert ("words" in layer) == (layout == "marlin") != ("weight" in layer)
    assert (layer.input_dims, layer.output_dims, layer.num_experts) == (64, 96, 6)
    still = [name for name, _ in tree_flatten(model.trainable_parameters())]
    assert still == trained == [f"{name}.bias" for name in LAYERS]
    assert mx.allclose(y, expected, rtol=1e-4, atol=1e-4)
    for name in ("weight", "scales"):
        assert mx.array_equal(getattr(layer, name), before[f"up_proj.{name}"])
    mlx_marlin.restore(model)
    assert type(model.up_proj) is QuantizedSwitchLinear
    assert mx.array_equal(model(x, chosen), expected)


SEVERAL = pytest.mark.parametrize(
    "make", [lambda: SwitchLinear(64, 96, 6), lambda: MultiLinear(64, 40, 4)]
)
"""Makes layers of experts and of heads."""


@SEVERAL
@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_layout_and_invariance_can_be_changed_and_changed_back(
    make: Make, mode: str
) -> None:
    stock = make().to_quantized(32, 4, mode)
    model = Layers(stock)
    before, attributes = arrays(model), dict(vars(stock))
    asked = (("marlin", True), ("mlx", False), ("marlin", False), ("marlin", True))
    for layout, invariant in (*asked, ("mlx", True)):
        mlx_marlin.optimize(model, layout=layout, invariant=invariant)
        (layer,) = model.layers
        assert (layer.layout, layer.invariant) == (layout, invariant)
        assert isinstance(layer.packed, PackedWeight) == (layout == "marlin")
        mlx_marlin.optimize(model, layout=layout, invariant=invariant)
        assert model.layers[0] is layer

    mlx_marlin.restore(model)

    assert type(model.layers[0]) is type(stock)
    assert vars(model.layers[0]) == attributes
    after = arrays(model)
    assert after.keys() == before.keys()
    assert all(mx.array_equal(after[name], before[name]) for name in before)


@SEVERAL
@pytest.mark.usefixtures("stock")
def test_a_failure_turns_packed_layers_back(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Layers(*(make().to_quantized(32, 4) for _ in range(2)))
    mlx_marlin.optimize(model, layout="marlin")
    first, last = model.layers
    words = first["words"]
    original = type(first).to_stock

    def failing(layer: Any) -> Any:
        if layer is last:
            raise MemoryError
        return original(layer)

    monkeypatch.setattr(type(first), "to_stock", failing)
    with pytest.raises(MemoryError):
        mlx_marlin.restore(model)

    assert [layer.layout for layer in model.layers] == ["marlin"] * 2
    assert mx.array_equal(model.layers[0]["words"], words)


@sampled(1, 2)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("layout", ["marlin", "mlx"])
def test_an_invariant_layer_gives_a_row_the_same_bits_in_any_batch(layout: str) -> None:
    model = experts_model(group_size=32, bits=4)
    mlx_marlin.optimize(model, layout=layout, invariant=True)
    x = mx.random.normal((70, 64)).astype(mx.float16)
    chosen = mx.random.randint(0, 6, (70, 2))

    whole = model(x, chosen)

    for first, last in ((0, 1), (3, 9), (20, 60)):  # sorted and not
        some = model(x[first:last], chosen[first:last])
        assert mx.array_equal(some, whole[first:last])


def test_experts_with_a_global_scale_stand_in_the_way_of_invariance() -> None:
    layer = SwitchLinear(64, 96, 6).to_quantized(16, 4, "nvfp4", global_scale=True)
    model = nn.Sequential(nn.Linear(64, 64), layer)
    nn.quantize(model, group_size=32, bits=4)

    with pytest.raises(ValueError, match=r"1 quantized layers .* would stay as"):
        mlx_marlin.optimize(model, invariant=True)

    assert type(model.layers[0]) is nn.QuantizedLinear
    mlx_marlin.optimize(model, layout="marlin")
    assert model.layers[1] is layer


class Rank:
    """What `shard_inplace` asks of a group of two machines."""

    def __init__(self, number: int) -> None:
        self.number = number

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return self.number


@pytest.mark.usefixtures("kernels")
def test_converted_experts_can_be_sharded_in_mlxs_layout() -> None:
    """As mlx-lm's models shard them: in place, after calls that are remembered."""
    x = mx.random.normal((2, 20, 64), key=mx.random.key(1))
    chosen = mx.random.randint(0, 6, (2, 20, 2), key=mx.random.key(2))
    whole, *parts = (SwitchGLU(64, 128, 6) for _ in range(3))
    nn.quantize(whole, group_size=32, bits=4)
    expected = whole(x, chosen)
    for rank, part in enumerate(parts):
        nn.quantize(part, group_size=32, bits=4)
        part.update(whole.parameters())
        mlx_marlin.optimize(part, layout="mlx", join=False)
        part(x, chosen)
        for name in LAYERS:
            how = "sharded-to-all" if name == "down_proj" else "all-to-sharded"
            shard_inplace(part[name], how, group=Rank(rank))
        assert part.up_proj["weight"].shape[1] == 64

    total = sum(part(x, chosen) for part in parts)

    assert mx.allclose(total, expected, rtol=1e-3, atol=1e-3)
