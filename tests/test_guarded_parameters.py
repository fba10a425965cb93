"""Parameters that stock MLX does not have are not saved, sharded or overwritten."""

import copy
import pickle
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear
from models import arrays

import mlx_marlin
from mlx_marlin.nn import MarlinLinear

pytestmark = pytest.mark.usefixtures("_stock")

N, K, EXPERTS = 40, 128, 3
FORMATS = [("affine", 4), ("affine", 3), ("mxfp4", 4), ("mxfp8", 8), ("nvfp4", 4)]
CONVERTED = pytest.mark.parametrize(
    "options",
    [{"layout": "marlin"}, {"layout": "marlin", "join": True}, {"join": True}],
    ids=["packed", "packed and joined", "joined"],
)


@pytest.fixture
def _stock(backend: Callable[[str], None]) -> None:
    backend("stock")


def linear(mode: str = "affine", bits: int = 4) -> nn.Module:
    stock = nn.QuantizedLinear(K, N, True, None, bits, mode)
    return MarlinLinear.from_quantized(stock, layout="marlin")


def experts() -> nn.Module:
    stock = SwitchLinear(K, N, EXPERTS, bias=True).to_quantized(32, 4)
    return converted(stock)


def heads() -> nn.Module:
    return converted(MultiLinear(K, N, EXPERTS).to_quantized(32, 4))


def converted(stock: nn.Module) -> nn.Module:
    model = nn.Sequential(stock)
    return mlx_marlin.optimize(model, layout="marlin").layers[0]


LAYERS = pytest.mark.parametrize("make", [linear, experts, heads])


def assign(layer: nn.Module, name: str, array: mx.array) -> None:
    setattr(layer, name, array)


def set_item(layer: nn.Module, name: str, array: mx.array) -> None:
    layer[name] = array


def update(layer: nn.Module, name: str, array: mx.array) -> None:
    nn.Sequential(layer).update(tree_unflatten([(f"layers.0.{name}", array)]))


def load(layer: nn.Module, name: str, array: mx.array) -> None:
    nn.Sequential(layer).load_weights([(f"layers.0.{name}", array)], strict=False)


def apply(layer: nn.Module, name: str, array: mx.array) -> None:
    old = layer[name]
    nn.Sequential(layer).apply(lambda each: array if each is old else each)


NAMES = {linear: ("words", "quantizers", "bias"), heads: ("words", "quantizers")}
NAMES[experts] = NAMES[linear]


@pytest.mark.parametrize("replace", [assign, set_item, update, load, apply])
@pytest.mark.parametrize("wrong", ["shape", "dtype"])
@pytest.mark.parametrize(
    ("make", "name"), [(make, name) for make in NAMES for name in NAMES[make]]
)
def test_a_packed_parameter_keeps_its_shape_and_dtype(
    make: Callable[[], nn.Module],
    wrong: str,
    name: str,
    replace: Callable[[nn.Module, str, mx.array], None],
) -> None:
    layer = make()
    old = layer[name]
    new = old[..., :-1] if wrong == "shape" else old.astype(mx.int32)

    with pytest.raises(ValueError, match=f"{name} of a packed Marlin") as raised:
        replace(layer, name, new)

    assert str(old.shape) in str(raised.value)
    assert str(new.shape) in str(raised.value)
    assert layer[name] is old


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


def test_a_bias_that_a_packed_layer_gets_later_fits_its_rows() -> None:
    stock = nn.QuantizedLinear(K, N, False)
    layer = MarlinLinear.from_quantized(stock, layout="marlin")

    with pytest.raises(ValueError, match=r"bias of .* shape \(40,\), got .*\(39,\)"):
        layer.bias = mx.zeros((N - 1,))
    with pytest.raises(ValueError, match=r"bias of .* got list"):
        layer.bias = [0.0] * N

    layer.bias = mx.zeros((N,))
    assert layer(mx.zeros((2, K))).shape == (2, N)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: _pickled(m)])
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


def _pickled(layer: nn.Module) -> nn.Module:
    twin: nn.Module = pickle.loads(pickle.dumps(layer))
    return twin
