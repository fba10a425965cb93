"""Packed weights that stock MLX serves, in functions compiled without shapes."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

import mlx_marlin
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.products.reference.weight import is_traced
from support.choose import Choose

N, K = 72, 256
Call = Callable[[mx.array], mx.array]


@pytest.fixture(autouse=True)
def _stock(backend: Choose) -> None:
    backend("stock")


def linear(mode: str, bits: int, bias: bool = False) -> nn.Module:
    stock = nn.QuantizedLinear(K, N, bias, None, bits, mode)
    return MarlinLinear.from_quantized(stock, layout="marlin")


def packed(mode: str, group_size: Any) -> nn.Module:
    w = mx.random.normal((N, K), key=mx.random.key(1))
    weight = mlx_marlin.quantize(w, mode=mode, group_size=group_size)
    return MarlinLinear.from_packed(weight)


def batch(stock: nn.Module) -> Any:
    return mlx_marlin.optimize(nn.Sequential(stock), layout="marlin").layers[0]


def experts() -> Call:
    """Returns a function of any number of rows of one expert."""
    layer = batch(SwitchLinear(K, 64, 3, bias=True).to_quantized(32, 4))
    chosen = mx.array([[1]], mx.uint32)
    return lambda x: layer(x[None, None], chosen)


def heads(transpose: bool) -> Call:
    sizes = (K, 64) if transpose else (64, K)
    layer = batch(MultiLinear(*sizes, 3).to_quantized(32, 4))
    return lambda x: layer(mx.stack([x] * 3), transpose=transpose)


@pytest.mark.parametrize(
    "make",
    [
        *(partial(linear, "affine", bits) for bits in (4, 6)),
        partial(linear, "affine", 3, bias=True),
        partial(linear, "mxfp4", 4),
        partial(linear, "nvfp4", 4, bias=True),
        *(partial(packed, "symmetric", size) for size in (128, 16)),
        *(partial(heads, transpose) for transpose in (True, False)),
        experts,
    ],
)
def test_a_function_is_compiled_once_for_all_shapes(make: Callable[[], Call]) -> None:
    layer, traces = make(), []

    def f(x: mx.array) -> mx.array:
        traces.append(x.shape)
        return layer(x)

    compiled = mx.compile(f, shapeless=True)
    for rows in (3, 5, 1, 40):
        x = mx.random.normal((rows, K), key=mx.random.key(rows))
        assert mx.allclose(compiled(x), layer(x), rtol=1e-4, atol=1e-4)

    assert len(traces) == 1


def test_weights_that_are_inputs_are_refused() -> None:
    layer = linear("affine", 4)
    compiled = mx.compile(lambda x: layer(x), inputs=layer.state, shapeless=True)

    with pytest.raises(ValueError, match="cannot be inputs of a function that is comp"):
        compiled(mx.ones((3, K)))


def test_only_a_trace_without_shapes_is_one() -> None:
    found: dict[str, bool] = {}

    def f(name: str, x: mx.array) -> mx.array:
        found[name] = is_traced()
        return (2 * x).sum()

    x = mx.ones(3)
    f("plain", x)
    mx.eval(mx.compile(lambda x: f("compile", x))(x))
    mx.eval(mx.grad(lambda x: f("grad", x))(x))
    mx.eval(mx.vmap(lambda x: f("vmap", x))(x))
    mx.eval(mx.compile(lambda x: f("shapeless", x), shapeless=True)(x))
    f("after", x)
    thread = threading.Thread(target=f, args=("thread", x))
    thread.start()
    thread.join()

    assert [name for name in found if found[name]] == ["shapeless"]
