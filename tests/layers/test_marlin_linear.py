"""`MarlinLinear` behaves as MLX's layer, and multiplies by our kernels."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_marlin.backends import selection
from mlx_marlin.layers import fused_products
from mlx_marlin.layers import linear as linear_module
from mlx_marlin.layers.linear import SHARDED, MarlinLinear, class_for
from mlx_marlin.planning.epilogue import Epilogue, Rotation
from mlx_marlin.planning.plan import Plan
from mlx_marlin.weights.packed_weight import PackedWeight
from support import oracles

LAYOUTS = ["mlx", "marlin"]
K, N = 192, 40


def stock_layer(*, bias: bool = True, **format: Any) -> nn.QuantizedLinear:
    mx.random.seed(0)
    layer = nn.QuantizedLinear(K, N, bias, **format)
    if bias:
        layer.bias = mx.random.normal((N,))
    return layer


def parameters(layer: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(layer.parameters()))


def assert_same_arrays(
    actual: dict[str, mx.array], expected: dict[str, mx.array]
) -> None:
    assert [*actual] == [*expected]
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        assert mx.array_equal(actual[name], array)


def native(layer: nn.Module) -> tuple[mx.array, ...]:
    return layer.weight, layer.scales, layer.biases


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layer_computes_what_mlxs_does(
    ran: list[Plan], layout: str, group_size: int
) -> None:
    stock = stock_layer(bias=False, group_size=group_size)
    ours = MarlinLinear.from_quantized(stock, layout=layout)
    x = mx.random.normal((2, 3, K))

    y = ours(x)

    oracles.assert_close(y, stock(x), x, native(stock), group_size=group_size)
    assert [plan.problem.layout for plan in ran] == [layout]


def test_with_mlxs_layout_the_parameters_are_mlxs_own_arrays() -> None:
    stock = stock_layer()

    ours = MarlinLinear.from_quantized(stock)

    assert [*parameters(ours)] == ["weight", "scales", "biases", "bias"]
    for name, array in parameters(stock).items():
        assert ours[name] is array
    assert ours.packed is None


def test_with_our_layout_the_native_arrays_are_unpacked_when_asked_for() -> None:
    stock = stock_layer()

    ours = MarlinLinear.from_quantized(stock, layout="marlin")

    assert sorted(parameters(ours)) == ["bias", "packed_scales", "words"]
    assert isinstance(ours.packed, PackedWeight)
    assert ours.packed.words is ours["words"]
    for name in ("weight", "scales", "biases"):
        assert name not in ours
        assert mx.array_equal(getattr(ours, name), stock[name])
    decoded = mx.dequantize(ours.weight, ours.scales, ours.biases, 64, 4)
    assert mx.array_equal(
        decoded, mx.dequantize(stock.weight, stock.scales, stock.biases, 64, 4)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layer_is_mlxs_to_whoever_asks(layout: str) -> None:
    stock = stock_layer()

    ours = MarlinLinear.from_quantized(stock, layout=layout)

    assert isinstance(ours, nn.QuantizedLinear)
    assert (ours.group_size, ours.bits, ours.mode) == (64, 4, "affine")
    inside = repr(stock).removeprefix("QuantizedLinear(").removesuffix(")")
    assert repr(ours) == f"MarlinLinear({inside}, layout={layout})"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_frozen_and_the_mode_survive_the_way_there_and_back(
    layout: str,
) -> None:
    stock = stock_layer()
    stock.unfreeze(keys=["bias"])
    stock.eval()

    ours = MarlinLinear.from_quantized(stock, layout=layout)

    assert [*ours.trainable_parameters()] == ["bias"]
    assert not ours.training
    back = ours.to_stock()
    assert [*back.trainable_parameters()] == ["bias"]
    assert not back.training
    ours.freeze()
    assert [*stock.trainable_parameters()] == ["bias"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stock", [cls.stock for cls in SHARDED])
def test_the_part_of_one_machine_is_the_whole_layer(
    stock: type[nn.Module], layout: str
) -> None:
    theirs = stock(K, N, True, 32)
    theirs.bias = mx.arange(float(N))
    cls = class_for(theirs)
    assert cls.stock is stock

    ours = cls.from_quantized(theirs, layout=layout, invariant=True)

    x = mx.random.normal((3, K))
    assert mx.allclose(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
    assert (type(ours), ours.layout, ours.invariant) == (class_for(ours), layout, True)
    assert repr(ours).endswith(f"layout={layout}, invariant, one part of 1)")
    back = ours.to_stock()
    assert (type(back), back.group) == (stock, theirs.group)
    assert_same_arrays(parameters(back), parameters(theirs))
    assert not cls.from_quantized(theirs).invariant


def test_codes_cannot_be_assigned_over_a_packed_weight() -> None:
    stock = stock_layer()
    ours = MarlinLinear.from_quantized(stock, layout="marlin")

    with pytest.raises(TypeError, match="weight of a layer"):
        ours.weight = mx.zeros_like(stock.weight)

    assert mx.array_equal(ours.weight, stock.weight)


def test_new_native_parameters_are_used_at_once(ran: list[Plan]) -> None:
    ours = MarlinLinear.from_quantized(stock_layer())
    x = mx.random.normal((3, K))
    before = ours(x)
    ours.scales = 2 * ours.scales
    ours.biases = 2 * ours.biases
    ours.bias = 2 * ours.bias

    assert mx.allclose(ours(x), 2 * before, atol=1e-5)
    assert len(ran) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_change_of_dtype_reaches_the_scales(ran: list[Plan], layout: str) -> None:
    ours = MarlinLinear.from_quantized(stock_layer(), layout=layout)

    ours.set_dtype(mx.float16)

    assert ours.scales.dtype == mx.float16
    assert ours(mx.zeros((2, K), mx.float16)).dtype == mx.float16
    assert ran[0].problem.scale_dtype == "float16"


def test_packed_weights_are_loaded_by_their_like_and_mlxs_are_refused() -> None:
    stock = stock_layer()
    packed = parameters(MarlinLinear.from_quantized(stock, layout="marlin"))

    ours = MarlinLinear(K, N, layout="marlin")
    ours.load_weights([*packed.items()])

    assert_same_arrays(parameters(ours.to_stock()), parameters(stock))
    with pytest.raises(ValueError, match="parameters not in model"):
        nn.QuantizedLinear(K, N).load_weights([*packed.items()])
    with pytest.raises(ValueError, match="parameters not in model"):
        ours.load_weights([*parameters(stock).items()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 7}, "'affine' with bits=7 is not one"),
        ({"bits": 4, "mode": "mxfp5"}, "mode='mxfp5' is not one"),
        ({"layout": "rows"}, r"layout='rows' is not one of .*marlin"),
    ],
)
def test_formats_and_layouts_that_are_not_ours_are_refused(
    options: dict[str, Any], message: str
) -> None:
    makers = [partial(MarlinLinear, K, N)]
    makers.append(partial(MarlinLinear.from_linear, nn.Linear(K, N)))
    if "layout" in options:
        makers.append(partial(MarlinLinear.from_quantized, stock_layer()))
    for make in makers:
        with pytest.raises(ValueError, match=message):
            make(**options)


SIZES = (24, 16)
ROTATION = Rotation(features=8, columns=16)


class Asking:
    """A layer, what it asks of products, and names for the arrays that it gives."""

    def __init__(
        self, patch: pytest.MonkeyPatch, layer: MarlinLinear, answers: bool
    ) -> None:
        self.layer, self.answers = layer, answers
        x = mx.ones((2, K), mx.float16)
        self.arrays = {"x": x, "bias": layer.get("bias")}
        self.arrays |= {name: mx.zeros((2, N), mx.float16) for name in ("y", "other")}
        self.arrays["wide"] = mx.zeros((2, N))
        self.arrays |= {name: mx.zeros(2) for name in ("positions", "freqs")}
        self.arrays |= {name: mx.ones(8, mx.float16) for name in "qk"}
        self.norm = nn.RMSNorm(K, eps=0.25)
        self.norm.weight = self.arrays["norm"] = mx.ones(K, mx.float16)
        self.asked: list[Any] = []
        for module in (fused_products, linear_module):
            patch.setattr(module, "layer_product", self.product)
        patch.setattr(fused_products, "layer_parts", self.parts)
        patch.setattr(fused_products, "fused_linear", self.fused)
        patch.setattr(fused_products, "stock_serves", self.stock_serves)
        patch.setattr(fused_products, "check_rotation", self.check_rotation)

    def names(self, *arrays: mx.array | None) -> list[str]:
        """Returns the names of arrays; a new one is the normalized x."""
        known = {id(array): name for name, array in self.arrays.items()}
        return [known.get(id(array), "new") for array in arrays if array is not None]

    def note(self, x: mx.array, weight: Any, *asked: Any) -> None:
        assert isinstance(weight, PackedWeight) == (self.layer.layout == "marlin")
        self.asked.append((*self.names(x), *asked))

    def product(
        self, x: Any, w: Any, bias: Any = None, y: Any = None, *, invariant: bool
    ) -> mx.array:
        assert invariant == self.layer.invariant
        self.note(x, w, self.names(bias), self.names(y))
        return mx.zeros((2, N), mx.float16)

    def parts(
        self, x: Any, w: Any, sizes: Any, bias: Any, *, invariant: bool
    ) -> list[mx.array]:
        assert invariant == self.layer.invariant
        self.note(x, w, sizes, self.names(bias))
        return [mx.zeros((2, size), mx.float16) for size in sizes]

    def fused(
        self, x: Any, w: Any, epilogue: Any, operands: Any, epsilon: Any = None
    ) -> str | None:
        self.note(x, w, epilogue, self.names(*operands), epsilon)
        return "fused" if self.answers else None

    def stock_serves(self, x: mx.array, weight: Any, **given: Any) -> bool:
        bias = self.layer.get("bias")
        keeps = bias is not None and bias.dtype in (mx.float16, x.dtype)
        assert given["bias"] == keeps
        assert given["invariant"] == self.layer.invariant
        assert given["parts"] in ((), SIZES, (N // 2, N // 2))
        return False

    def check_rotation(self, rows: int, rotation: Rotation, *arrays: Any) -> None:
        assert (rows, rotation) == (2, ROTATION)
        assert self.names(*arrays[:2], *arrays[2]) == ["positions", "freqs", "q", "k"]

    def of(self, method: str, *given: Any, **more: Any) -> tuple[Any, list[Any]]:
        self.asked.clear()
        found = getattr(self.layer, method)(self.arrays["x"], *given, **more)
        return found, [*self.asked]


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("bias", ["", "kept", "wide"])
@pytest.mark.parametrize(
    ("layout", "default"), [("marlin", "mlx"), ("mlx", "mlx"), ("mlx", "marlin")]
)
def test_a_layer_asks_for_its_product_with_all_that_a_kernel_may_fuse(
    layout: str,
    default: str,
    bias: str,
    invariant: bool,
    answers: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wider bias is added afterwards; a norm has the dtype and the length of x."""
    stock = stock_layer(bias=bool(bias))
    stock.set_dtype(mx.float16)
    if bias == "wide":
        stock.bias = mx.arange(float(N))
    own = MarlinLinear.from_quantized(stock, layout=layout, invariant=invariant)
    traits = SimpleNamespace(default_layout=default)
    monkeypatch.setattr(selection, "traits", lambda: traits)
    asking = Asking(monkeypatch, own, answers)
    of, arrays, norm = asking.of, asking.arrays, asking.norm

    has, wide = bool(bias), bias == "wide"
    kept = ["bias"] if bias == "kept" else []
    fuses = (layout == "marlin" or default == "mlx") and not invariant
    fuses = fuses and not wide
    alone = [("x", kept, [])]
    afterwards = arrays["bias"] if wide else mx.zeros(N)
    y, asked = of("__call__")
    assert asked == alone
    assert mx.array_equal(y[1], afterwards)
    assert of("added", arrays["y"])[1] == (alone if wide else [("x", kept, ["y"])])
    assert of("added", arrays["wide"])[1] == alone

    found, asked = of("parts", SIZES)
    assert asked == [("x", SIZES, kept)]
    assert mx.array_equal(mx.concatenate(found, axis=-1)[1], afterwards)

    gate = Epilogue(activation="silu", gated=True)
    halves = (N // 2, N // 2)

    def gated(x: str) -> list[Any]:
        asked = [(x, gate, [], None)] if fuses and not has else []
        return asked if asked and answers else [*asked, (x, halves, kept)]

    assert of("gated")[1] == gated("x")

    def normed(epilogue: Epilogue, otherwise: list[Any]) -> list[Any]:
        asked = [("x", epilogue, [*kept, "norm"], 0.25)]
        asked = asked if fuses and not (has and epilogue.gated) else []
        return asked if asked and answers else [*asked, *otherwise]

    assert of("normed", norm)[1] == normed(Epilogue(bias=has), [("new", kept, [])])
    assert of("normed", norm, SIZES)[1] == normed(
        Epilogue(bias=has, parts=SIZES), [("new", SIZES, kept)]
    )
    assert of("normed", norm, gated=True)[1] == normed(gate, gated("new"))

    heads = arrays["positions"], arrays["freqs"], (arrays["q"], arrays["k"])
    epilogue = Epilogue(bias=has, parts=SIZES, rotation=ROTATION)
    operands = [*kept, "positions", "freqs", "q", "k"]
    second = ("new", epilogue, operands, None)
    found, asked = of("rotated", norm, ROTATION, SIZES, *heads)
    first = ("x", epilogue, [*operands, "norm"], 0.25)
    every = [first] if answers else [first, second]
    assert asked == (every if fuses else [])
    assert found == ("fused" if fuses and answers else None)

    class Scaled(nn.RMSNorm):
        """Another norm."""

    scaled = Scaled(K)
    scaled.weight = arrays["norm"]
    for other in (scaled, nn.RMSNorm(K)):  # the second one widens its result
        added = kept if other is scaled else ["bias"] * has
        assert of("normed", other)[1] == [("new", added, [])]
        asked = of("rotated", other, ROTATION, SIZES, *heads)[1]
        assert asked == ([second] if fuses else [])
    norm.weight = mx.ones(1, mx.float16)
    with pytest.raises(ValueError, match="must have the same size"):  # MLX's
        of("normed", norm)
    assert asking.asked == []
    arrays["k"] = mx.ones(8)
    heads = arrays["positions"], arrays["freqs"], (arrays["q"], arrays["k"])
    assert of("rotated", norm, ROTATION, SIZES, *heads) == (None, [])
