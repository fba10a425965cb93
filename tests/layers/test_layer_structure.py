"""Other packages' layers of experts and heads are recognized by their structure."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_marlin
from mlx_marlin.layers.experts import MarlinMultiLinear, MarlinSwitchLinear
from support.models import Layers, arrays, assert_same_model
from support.profiles import sampled

EXPERTS, N, K = 4, 64, 128
FORMATS = [("affine", 4, 32), ("affine", 3, 64), ("mxfp4", 4, 32), ("nvfp4", 4, 16)]


class Quantized(nn.Module):
    """What the layers of mlx-vlm 0.7 hold: nothing but arrays and their format."""

    def __init__(
        self, mode: str = "affine", bits: int = 4, size: int = 32, bias: bool = False
    ) -> None:
        super().__init__()
        mx.random.seed(5)
        w = mx.random.normal((EXPERTS, N, K))
        self.weight, self.scales, *biases = mx.quantize(w, size, bits, mode)
        self.biases = biases[0] if biases else None
        if bias:
            self.bias = mx.random.normal((EXPERTS, N))
        self.group_size, self.bits, self.mode = size, bits, mode
        self.freeze()


class Experts(Quantized):
    def __call__(
        self, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        y = mx.gather_qmm(
            x,
            self["weight"],
            self["scales"],
            self.get("biases"),
            rhs_indices=indices,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=sorted_indices,
        )
        return y + self["bias"][indices][..., None, :] if "bias" in self else y


class Heads(Quantized):
    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        return mx.quantized_matmul(
            x,
            self["weight"],
            self["scales"],
            self.get("biases"),
            transpose=transpose,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )


X, CHOSEN = mx.ones((3, 1, 1, K)), mx.array([[0, 3], [2, 1], [1, 1]], mx.uint32)


def results(layer: nn.Module) -> list[mx.array]:
    if isinstance(layer, Experts | MarlinSwitchLinear):
        return [layer(X, CHOSEN), layer(X[:, 0], CHOSEN[:, 0], sorted_indices=False)]
    x, of_n = mx.ones((EXPERTS, 2, K)), mx.ones((EXPERTS, 2, N))
    return [layer(x), layer(of_n, transpose=False)]


@sampled(4)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("make", "cls"),
    [
        (Experts, MarlinSwitchLinear),
        (lambda *format: Experts(*format, bias=True), MarlinSwitchLinear),
        (Heads, MarlinMultiLinear),
    ],
    ids=["experts", "experts with a bias", "heads"],
)
@pytest.mark.usefixtures("kernels")
def test_they_are_converted_and_restored_to_their_own_class(
    make: Callable[..., nn.Module], cls: type, format: Any, layout: str
) -> None:
    model = Layers(make(*format))
    expected = results(model.layers[0])

    mlx_marlin.optimize(model, layout=layout)

    assert type(model.layers[0]) is cls
    assert model.layers[0].layout == layout
    for y, own in zip(results(model.layers[0]), expected, strict=True):
        assert mx.allclose(y, own, rtol=1e-3, atol=1e-3)
    other = {"mlx": "marlin", "marlin": "mlx"}[layout]
    mlx_marlin.optimize(model, layout=other, invariant=True)
    assert_same_model(mlx_marlin.restore(model), Layers(make(*format)))
    assert {*vars(model.layers[0])} == {*vars(make(*format))}


class Doubled(Experts):
    def __call__(self, *given: Any, **options: Any) -> mx.array:
        return 2 * super().__call__(*given, **options)


class Squared(Experts):
    def __call__(
        self, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        y: mx.array = mx.gather_qmm(
            x, self.weight, self.scales, self.biases, rhs_indices=indices, group_size=32
        )
        return y * y


class Upright(Heads):
    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        options: Any = {"group_size": 32, "transpose": True}
        return mx.quantized_matmul(x, self.weight, self.scales, self.biases, **options)


class Other(Experts):
    def __call__(self, indices: mx.array, x: mx.array) -> mx.array:
        return super().__call__(x, indices)


def with_attribute() -> nn.Module:
    layer = Experts()
    layer.factor = 2.0
    return layer


def with_array() -> nn.Module:
    layer = Experts(mode="nvfp4", size=16)
    layer.weight_scale_2 = mx.array(2.0)
    return layer


@pytest.mark.parametrize(
    "make", [Doubled, Squared, Upright, Other, with_attribute, with_array]
)
def test_what_computes_or_holds_something_else_stays(
    make: Callable[[], nn.Module],
) -> None:
    model = Layers(nn.QuantizedLinear(64, 64), make())
    layer, before = model.layers[1], arrays(model)

    told = mlx_marlin.optimize(model, dry_run=True)
    mlx_marlin.optimize(model, layout="marlin")

    assert model.layers[1] is layer
    cls = type(layer).__name__
    assert told.kept == {"layers.1": f"optimize does not convert a {cls}"}
    assert all(arrays(layer)[name] is before[f"layers.1.{name}"] for name in layer)
