"""What the package does, in a few seconds: run this first.

Quantize, pack, multiply and optimize a two-layer model, against float64. It needs
nothing of the other tests, so it also runs against an installed wheel.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_marlin

N, K, GROUP = 96, 256, 64
TOLERANCES = {mx.float16: 1e-3, mx.bfloat16: 6e-3, mx.float32: 1e-3}


def off(actual: mx.array, expected: np.ndarray) -> float:
    """Returns the relative Frobenius error of a result."""
    difference = np.array(actual.astype(mx.float32), np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def rows(m: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal((m, K), key=mx.random.key(m)).astype(dtype)


def affine(dtype: mx.Dtype, bits: int) -> tuple[tuple[mx.array, ...], np.ndarray]:
    """Returns a quantized weight, and its values by the definition of the format."""
    w = mx.random.normal((N, K), key=mx.random.key(0)).astype(dtype)
    parts = mx.quantize(w, group_size=GROUP, bits=bits)
    words = np.array(parts[0]).astype(np.uint64)
    stream = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
    digits = stream.reshape(N, K, bits).astype(np.uint64)
    codes = (digits << np.arange(bits, dtype=np.uint64)).sum(-1).astype(np.float64)
    scales, biases = (np.repeat(wide(each), GROUP, -1) for each in parts[1:])
    return parts, codes * scales + biases


def cases() -> Iterator[Any]:
    """Yields a width, a dtype, a layout and numbers of rows.

    Two of three are for the full profile only; the others have every pair of values.
    """
    rows = (1, 19), (5, 8)
    for i, (bits, dtype) in enumerate(product((2, 3, 4, 6, 8), TOLERANCES)):
        layouts = ("mlx", "marlin") if i % 2 else ("marlin", "mlx")
        yield bits, dtype, layouts[0], rows[i // 2 % 2]
        others = rows[1 - i // 2 % 2]
        for more in ((layouts[0], others), (layouts[1], (*rows[0], *rows[1]))):
            yield pytest.param(bits, dtype, *more, marks=pytest.mark.slow)


@pytest.mark.parametrize(("bits", "dtype", "layout", "counts"), [*cases()])
def test_products(
    bits: int, dtype: mx.Dtype, layout: str, counts: tuple[int, ...]
) -> None:
    parts, values = affine(dtype, bits)
    form = {"group_size": GROUP, "bits": bits}
    for m in counts:
        x = rows(m, dtype)
        if layout == "mlx":
            y = mlx_marlin.quantized_matmul(x, *parts, **form)
        else:
            y = mlx_marlin.quantized_matmul(x, mlx_marlin.pack(*parts, **form))
        assert y.dtype == dtype
        assert off(y, wide(x) @ values.T) < TOLERANCES[dtype]


def test_no_rows_and_one_dimension() -> None:
    parts, values = affine(mx.float16, 4)
    x = rows(1, mx.float16)

    assert mlx_marlin.quantized_matmul(x[:0], *parts).shape == (0, N)
    y = mlx_marlin.quantized_matmul(x[0], *parts)
    assert y.shape == (N,)
    assert off(y[None], wide(x) @ values.T) < TOLERANCES[mx.float16]


def test_packing_loses_nothing() -> None:
    parts, _ = affine(mx.float16, 4)

    again = mlx_marlin.unpack(mlx_marlin.pack(*parts, group_size=GROUP, bits=4))

    assert all(mx.array_equal(a, b).item() for a, b in zip(again, parts, strict=True))


class Two(nn.Module):
    """Two quantized layers with a gate between them."""

    def __init__(self) -> None:
        super().__init__()
        mx.random.seed(1)
        self.up = nn.Linear(K, N, bias=True)
        self.down = nn.Linear(N, K, bias=False)
        self.set_dtype(mx.float16)
        nn.quantize(self, group_size=32, bits=4)
        mx.eval(self.parameters())

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.down(nn.silu(self.up(x)))
        return y

    def exact(self, x: mx.array) -> np.ndarray:
        """Returns the result in float64."""
        y = wide(x) @ _weight(self.up).T + wide(self.up.bias)
        return y / (1 + np.exp(-y)) @ _weight(self.down).T


def _weight(layer: Any) -> np.ndarray:
    parts = (layer.weight, layer.scales, layer.biases)
    return wide(mx.dequantize(*parts, group_size=32, bits=4))


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_a_model_is_converted_and_restored(layout: str) -> None:
    model, x = Two(), rows(6, mx.float16)
    expected, plain = model.exact(x), model(x)

    assert mlx_marlin.optimize(model, layout=layout) is model

    assert off(model(x), expected) < TOLERANCES[mx.float16]
    assert "2 of 2 quantized products" in mlx_marlin.report(model).summary()
    mlx_marlin.restore(model)
    assert {type(model.up), type(model.down)} == {nn.QuantizedLinear}
    assert mx.array_equal(model(x), plain).item()


def test_a_plan_says_what_will_run() -> None:
    choice = mlx_marlin.plan(8, 4096, 4096, chip="Apple M3 Max")

    assert "gemm_register" in choice.explain()
    assert "model, not measured" in choice.explain()


def test_bad_arguments_are_named() -> None:
    parts, _ = affine(mx.float16, 4)
    with pytest.raises(ValueError, match="layout='tiles'"):
        mlx_marlin.optimize(Two(), layout="tiles")
    with pytest.raises(ValueError, match="chip"):
        mlx_marlin.plan(8, 4096, 4096, chip="no chip")
    with pytest.raises(ValueError, match="k="):
        mlx_marlin.pack(parts[0][:, :-1], *parts[1:], group_size=GROUP, bits=4)
