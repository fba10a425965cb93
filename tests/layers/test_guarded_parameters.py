"""Parameters that stock MLX does not have are not saved, sharded or overwritten."""

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.nn.layers.distributed
import mlx_lm.utils
import pytest
from mlx.nn.layers.distributed import FullyShardedModule, shard_inplace, shard_linear
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.quant.dwq import dwq_quantize

import mlx_marlin
from mlx_marlin.layers.embedding import PackedEmbedding
from mlx_marlin.layers.joined import join
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.weights.packed_weight import PackedWeight
from support.models import TOKENS, Layers, arrays, assert_same_model, tiny_llama
from support.profiles import sampled

pytestmark = pytest.mark.usefixtures("stock")

N, K, EXPERTS = 40, 128, 3
FORMATS = [("affine", 4), ("affine", 3), ("mxfp4", 4), ("mxfp8", 8), ("nvfp4", 4)]
CONVERTED = pytest.mark.parametrize(
    "options",
    [{"layout": "marlin"}, {"layout": "marlin", "join": True}, {"join": True}],
    ids=["packed", "packed and joined", "joined"],
)


def linear(mode: str = "affine", bits: int = 4) -> nn.Module:
    stock = nn.QuantizedLinear(K, N, True, None, bits, mode)
    return MarlinLinear.from_quantized(stock, layout="marlin")


def packed_of(mode: str) -> PackedWeight:
    w = mx.random.normal((N, K))
    if mode == "symmetric":
        return mlx_marlin.quantize(w, mode=mode)
    codes, scales, _ = mx.quantize(w)
    points = mx.full(scales.shape, 8.0)
    return mlx_marlin.pack(codes, scales, points, group_size=64, bits=4, mode=mode)


def experts() -> nn.Module:
    stock = SwitchLinear(K, N, EXPERTS, bias=True).to_quantized(32, 4)
    return converted(stock)


def heads() -> nn.Module:
    return converted(MultiLinear(K, N, EXPERTS).to_quantized(32, 4))


def part() -> nn.Module:
    _, second = join([linear(), linear()])
    return second


def zero_points() -> nn.Module:
    return MarlinLinear.from_packed(packed_of("zero_point"))


def symmetric_part() -> nn.Module:
    layers = [MarlinLinear.from_packed(packed_of("symmetric")) for _ in range(2)]
    first, _ = join(layers)
    return first


def embedding() -> nn.Module:
    return PackedEmbedding.from_packed(packed_of("symmetric"), mx.float16)


def converted(stock: nn.Module) -> nn.Module:
    model = nn.Sequential(stock)
    return mlx_marlin.optimize(model, layout="marlin").layers[0]


LAYERS = pytest.mark.parametrize("make", [linear, experts, heads])


def apply(layer: nn.Module, name: str, array: mx.array) -> None:
    old = layer[name]
    nn.Sequential(layer).apply(lambda each: array if each is old else each)


def within(name: str, array: mx.array) -> list[tuple[str, mx.array]]:
    """Returns a parameter as one of the first layer of an `nn.Sequential`."""
    return [(f"layers.0.{name}", array)]


REPLACE: dict[str, Callable[[nn.Module, str, mx.array], object]] = {
    "attribute": setattr,
    "item": lambda layer, *item: layer.__setitem__(*item),
    "update": lambda layer, *item: nn.Sequential(layer).update(
        tree_unflatten(within(*item))
    ),
    "load": lambda layer, *item: nn.Sequential(layer).load_weights(
        within(*item), strict=False
    ),
    "apply": apply,
}
NAMES = {linear: ("words", "packed_scales", "bias"), heads: ("words", "packed_scales")}
NAMES[experts], NAMES[embedding] = NAMES[linear], NAMES[heads]


@pytest.mark.parametrize("way", REPLACE)
@pytest.mark.parametrize("wrong", ["shape", "dtype"])
@pytest.mark.parametrize(
    ("make", "name"), [(make, name) for make in NAMES for name in NAMES[make]]
)
def test_a_packed_parameter_keeps_its_shape_and_dtype(
    make: Callable[[], nn.Module], wrong: str, name: str, way: str
) -> None:
    layer = make()
    old = layer[name]
    new = old[..., :-1] if wrong == "shape" else old.astype(mx.int32)

    with pytest.raises(ValueError, match=f"{name} of a packed ") as raised:
        REPLACE[way](layer, name, new)

    assert str(old.shape) in str(raised.value)
    assert str(new.shape) in str(raised.value)
    assert layer[name] is old


@pytest.mark.parametrize("make", [linear, experts, heads, embedding, part])
def test_the_format_of_a_packed_or_joined_layer_cannot_be_set(
    make: Callable[[], nn.Module],
) -> None:
    layer = make()
    free = {"invariant", "dtype", "_no_grad", "_training", "global_scale"}
    format = {name: value for name, value in vars(layer).items() if name not in free}

    for name, value in format.items():
        with pytest.raises(TypeError, match=f"{name} of a .* cannot be set, because"):
            setattr(layer, name, value)

    assert {"bits", "group_size", "mode"} < set(format)
    assert {name: vars(layer)[name] for name in format} == format
    layer.invariant = True  # what says nothing of the parameters can be set


@pytest.mark.parametrize(("mode", "bits"), FORMATS)
def test_a_packed_parameter_takes_what_fits(mode: str, bits: int) -> None:
    layer, other = linear(mode, bits), linear(mode, bits)
    x = mx.random.normal((3, K))

    layer.load_weights([*arrays(other).items()])

    assert mx.array_equal(layer(x), other(x))
    layer.set_dtype(mx.float16)
    assert layer.bias.dtype == mx.float16
    with pytest.raises(ValueError, match=r"words of .* got float16"):
        layer.set_dtype(mx.float16, predicate=None)


def test_a_layer_does_not_take_the_old_name_of_packed_scales() -> None:
    layer = linear()

    with pytest.raises(ValueError, match="quantizers"):
        layer.load_weights([("words", layer.words), ("quantizers", layer.words)])


def test_a_bias_that_a_packed_layer_gets_later_fits_its_rows() -> None:
    stock = nn.QuantizedLinear(K, N, False)
    layer = MarlinLinear.from_quantized(stock, layout="marlin")

    with pytest.raises(ValueError, match=r"bias of .* shape \(40,\), got .*\(39,\)"):
        layer.bias = mx.zeros((N - 1,))
    with pytest.raises(ValueError, match=r"bias of .* got list"):
        layer.bias = [0.0] * N

    layer.bias = mx.zeros((N,))
    assert layer(mx.zeros((2, K))).shape == (2, N)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))]
)
@LAYERS
def test_a_copy_of_a_packed_layer_is_guarded_too(
    make: Callable[[], nn.Module], copied: Callable[[nn.Module], nn.Module]
) -> None:
    layer = make()

    twin = copied(layer)

    assert [*arrays(twin)] == [*arrays(layer)]
    assert mx.array_equal(twin["words"], layer["words"])
    with pytest.raises(ValueError, match="words of a packed"):
        twin.words = twin.words[:-1]


SAVE: dict[str, Callable[[nn.Module, Path], object]] = {
    "safetensors": lambda model, folder: model.save_weights(
        str(folder / "model.safetensors")
    ),
    "npz": lambda model, folder: model.save_weights(str(folder / "model.npz")),
    "mlx-lm": lambda model, folder: mlx_lm.utils.save_model(folder, model),
    "donated": lambda model, folder: mlx_lm.utils.save_model(
        folder, model, donate_model=True
    ),
}


@sampled(4, 12)
@CONVERTED
@pytest.mark.parametrize("how", SAVE)
def test_a_converted_model_is_saved_only_after_restore(
    how: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = mlx_marlin.optimize(tiny_llama(), **options)

    with pytest.raises(ValueError, match=r"call mlx_marlin\.restore\(model\) before"):
        SAVE[how](model, tmp_path)

    assert [*tmp_path.iterdir()] == []
    assert mx.allclose(model(TOKENS), tiny_llama()(TOKENS), atol=1e-4)
    SAVE[how](mlx_marlin.restore(model), tmp_path)
    assert_saved_in(tmp_path)


def assert_saved_in(folder: Path) -> None:
    """Checks the file of arrays, beside which there may be an index of them."""
    (file,) = (path for path in folder.iterdir() if path.suffix != ".json")
    fresh = tiny_llama()
    fresh.apply(mx.zeros_like)
    fresh.load_weights(str(file))
    assert_same_model(fresh, tiny_llama())


@pytest.mark.parametrize("make", [linear, experts, heads, embedding])
def test_a_packed_layer_anywhere_in_a_model_refuses_to_be_saved(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(make()))

    with pytest.raises(ValueError, match=r"is packed \(layout='marlin'\): stock MLX"):
        SAVE["safetensors"](model, tmp_path)

    assert [*tmp_path.iterdir()] == []
    assert len(tree_flatten(model.parameters())) > 2  # and evaluating is no saving
    mx.eval(model.parameters())


def test_in_mlxs_layout_a_model_is_saved_as_ever(tmp_path: Path) -> None:
    model = mlx_marlin.optimize(tiny_llama(), layout="mlx")

    SAVE["mlx-lm"](model, tmp_path)

    assert_saved_in(tmp_path)


@CONVERTED
def test_a_converted_model_is_sharded_only_after_restore(
    options: dict[str, Any],
) -> None:
    model = mlx_marlin.optimize(tiny_llama(), **options)
    before = [*model.modules()]

    with pytest.raises(ValueError, match=r"shard the model before mlx_marlin\.opti"):
        model.shard()

    assert all(a is b for a, b in zip(model.modules(), before, strict=True))
    mlx_marlin.restore(model).shard()
    sharded = model.model.layers[0].self_attn.q_proj
    assert type(sharded).__name__ == "QuantizedAllToShardedLinear"
    assert mx.allclose(model(TOKENS), tiny_llama()(TOKENS), atol=1e-4)


SHARDS: dict[str, Callable[[nn.Module], Any]] = {
    "rows": lambda layer: shard_linear(layer, "all-to-sharded"),
    "columns": lambda layer: shard_linear(layer, sharding="sharded-to-all"),
    "in place": lambda layer: shard_inplace(module=layer, sharding="all-to-sharded"),
    "fully": FullyShardedModule,
}
OF_ALL = ("in place", "fully")
"""What takes any layer, and a model."""


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (make, how)
        for make in (linear, experts, heads, zero_points, part, symmetric_part)
        for how in SHARDS
        if how in OF_ALL or make not in (experts, heads)
    ],
)
def test_a_packed_or_joined_layer_is_not_sharded_alone(
    make: Callable[[], nn.Module], how: str
) -> None:
    layer = make()
    before = dict(arrays(layer))

    for module in (layer, Layers(layer)) if how in OF_ALL else (layer,):
        with pytest.raises(ValueError, match="it cannot be sharded; shard the model"):
            SHARDS[how](module)

    assert all(arrays(layer)[name] is array for name, array in before.items())


@pytest.mark.parametrize("how", SHARDS)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("restored", [False, True])
def test_columns_in_another_order_are_not_sharded(
    layout: str, restored: bool, how: str
) -> None:
    model = Layers(ReorderedLinear(linear(), mx.arange(K - 1, -1, -1)))
    mlx_marlin.optimize(model, layout=layout)
    if restored:
        mlx_marlin.restore(model)
    (layer,) = model.layers
    expected = layer(mx.ones((1, K)))

    with pytest.raises(ValueError, match="checkpoint without act-order, or one mach"):
        SHARDS[how](layer)

    assert not hasattr(layer, "weight")
    assert mx.array_equal(layer(mx.ones((1, K))), expected)


def test_functions_are_wrapped_once_also_where_they_were_imported() -> None:
    linear()
    before = nn.Module.save_weights, shard_linear, mlx_lm.utils.save_model

    linear()

    assert before == (nn.Module.save_weights, shard_linear, mlx_lm.utils.save_model)
    assert shard_linear is mlx.nn.layers.distributed.shard_linear
    assert not hasattr(inspect.unwrap(shard_linear), "__wrapped__")
    assert inspect.unwrap(shard_linear) is shard_linear.__wrapped__


@pytest.mark.parametrize("keys", ["scales", ["scales", "biases"], ["bias", "weight"]])
@LAYERS
def test_mlxs_parameters_of_a_packed_layer_cannot_be_trained(
    make: Callable[[], nn.Module], keys: str | list[str]
) -> None:
    layer = make()
    frozen = set(layer._no_grad)

    for model in (layer, Layers(layer)):
        with pytest.raises(ValueError, match=r"has no .* call mlx_marlin\.restore"):
            model.unfreeze(keys=keys)

    assert layer._no_grad == frozen
    layer.unfreeze(keys="bias")
    layer.freeze()
    assert not layer.trainable_parameters()


@CONVERTED
def test_dwq_refuses_a_converted_model(options: dict[str, Any]) -> None:
    model = mlx_marlin.optimize(tiny_llama(), **options)
    before = arrays(model)

    with pytest.raises(ValueError, match=r"call mlx_marlin\.restore\(model\) first"):
        dwq_quantize(model, None, None, [], [], 1, 8, 0)

    assert all(arrays(model)[path] is array for path, array in before.items())


def test_dwq_trains_a_model_in_mlxs_layout() -> None:
    model = mlx_marlin.optimize(tiny_llama(), layout="mlx")

    model.apply_to_modules(_as_dwq_does)

    trained = {path for path, _ in tree_flatten(model.trainable_parameters())}
    assert len([path for path in trained if path.endswith(".scales")]) == 15


def _as_dwq_does(_: str, module: nn.Module) -> None:
    if hasattr(module, "bits") and hasattr(module, "group_size"):
        module.unfreeze(keys=["scales", "biases"], recurse=False)
