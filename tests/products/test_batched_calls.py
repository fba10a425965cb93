"""Calls with several weights: broadcast as MLX does, each weight read where it lies."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_marlin
from mlx_marlin import state
from mlx_marlin.backends import devices, planner, selection
from mlx_marlin.backends.metal import device
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from support import oracles
from support.arguments import K, N, activations, weight
from support.choose import Choose
from support.format_cases import OF_MLX, Weight, any_weight
from support.profiles import drawn, sampled
from support.strategies import broadcast

Shape = tuple[int, ...]


def weights(*batch: int, n: int = N, k: int = K, **options: Any) -> list[mx.array]:
    """Quantizes as many weights as a batch has, all different."""
    each = weight(math.prod(batch) * n, k, **options)
    return [array.reshape(*batch, n, -1) for array in each]


@pytest.fixture(scope="module")
def _kernels() -> Any:
    """Serves every call that is ours by the kernels."""
    here = selection.backend()
    if here == "stock":
        pytest.skip("nothing here runs Metal kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(selection.ENVIRONMENT, here)
        state.reset()
        yield
    state.reset()


@pytest.mark.usefixtures("_kernels")
@drawn(
    9,
    45,
    shapes=broadcast(),
    mode=st.sampled_from(["affine", "affine", "mxfp4"]),
    n=st.sampled_from([1, 31, 40]),
)
def test_any_shapes_are_broadcast_as_a_plain_product_would(
    shapes: tuple[Shape, Shape], mode: str, n: int
) -> None:
    of_x, of_w = shapes
    native, x = weights(*of_w, n=n, mode=mode), activations(*of_x, K)

    assert mlx_marlin.why_not(x, *native, mode=mode) is None
    y = mlx_marlin.quantized_matmul(x, *native, mode=mode)

    decoded = oracles.exact(mx.dequantize(*native, mode=mode, dtype=mx.float32))
    expected = oracles.exact(x) @ decoded.swapaxes(-1, -2)
    assert y.shape == expected.shape
    assert y.dtype == mx.float32
    assert np.all(np.abs(oracles.exact(y) - expected) < 2e-4)


@pytest.mark.usefixtures("_kernels")
@given(shapes=broadcast())
@settings(max_examples=30)
def test_shapes_are_those_of_mlx_where_it_broadcasts(
    shapes: tuple[Shape, Shape],
) -> None:
    of_x, of_w = shapes
    native = weights(*of_w)
    x = activations(*(1,) * (1 + len(of_w) - len(of_x)), *of_x, K)

    y = mlx_marlin.quantized_matmul(x, *native)

    stock = mx.quantized_matmul(x, *native)
    assert (y.shape, y.dtype) == (stock.shape, stock.dtype)
    assert mx.allclose(y, stock, rtol=1e-4, atol=1e-4)


# x, w before n, and what is asked: m, n, batch.
ASKED: dict[str, tuple[Shape, Shape, tuple[int, int, int]]] = {
    "heads": ((2, 4, 3), (4,), (6, N, 4)),
    "heads of one row": ((7, 4, 1), (4,), (7, N, 4)),
    "a weight of a batch of one": ((5, 3), (1,), (15, N, 1)),
    "rows that all weights share": ((3,), (4,), (3, 4 * N, 1)),
    "rows of a batch that all weights share": ((5, 1, 3), (4,), (15, 4 * N, 1)),
    "a vector": ((), (2, 2), (1, 4 * N, 1)),
    "one weight for some": ((2, 4, 3), (2, 1), (12, N, 2)),
    "rows that some weights share": ((4, 1, 3), (4, 2), (3, N, 8)),
}


@pytest.mark.parametrize("kind", ASKED)
def test_rows_that_share_a_weight_share_its_reading(ran: list[Plan], kind: str) -> None:
    of_x, of_w, sizes = ASKED[kind]
    x, native = activations(*of_x, K), weights(*of_w)

    y = mlx_marlin.quantized_matmul(x, *native)

    (problem,) = [plan.problem for plan in ran]
    assert (problem.m, problem.n, problem.batch) == sizes
    expected = oracles.exact(x) @ np.swapaxes(
        oracles.decoded(*native, group_size=64), -1, -2
    )
    assert y.shape == expected.shape
    assert oracles.error(y, expected) < 1e-6


@sampled(3, 12)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("mode", "bits", "group_size"), OF_MLX)
def test_every_format_of_mlx_comes_in_batches(
    mode: str, bits: int, group_size: int
) -> None:
    made = any_weight(mode, bits, group_size, 3 * N, 2 * K, dtype="float16", seed=1)
    native = [each.reshape(3, N, -1) for each in made.native]
    x = activations(2, 3, 3, 2 * K, dtype=mx.float16)

    y = mlx_marlin.quantized_matmul(x, *native, **made.options)

    decoded = Weight(mode, bits, group_size, made.native).decoded.reshape(3, N, -1)
    assert oracles.error(y, oracles.exact(x) @ decoded.swapaxes(-1, -2)) < 1e-3


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("of_w", [(3,), (2, 1), (1, 1), (2, 3)])
def test_linear_finishes_a_batch(of_w: Shape) -> None:
    native, x = weights(*of_w), activations(2, 3, 4, K)
    bias, multiply, residual = (
        mx.random.normal(shape, key=mx.random.key(i))
        for i, shape in enumerate([(N,), (2, 3, 4, N), (2, 3, 4, N)])
    )

    y = mlx_marlin.linear(
        x, *native, bias=bias, activation="silu", multiply=multiply, residual=residual
    )

    product = mx.quantized_matmul(x, *native)
    expected = nn.silu(product + bias) * multiply + residual
    assert mx.allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("kernels")
def test_an_epilogues_arrays_have_the_shape_of_the_result() -> None:
    native, x = weights(2), activations(5, 1, 3, K)

    y = mlx_marlin.linear(x, *native, residual=mx.ones((5, 2, 3, N)))

    assert mx.allclose(y, mx.quantized_matmul(x, *native) + 1, atol=1e-3)
    with pytest.raises(ValueError, match=r"residual has shape .* expected \(5, 2, 3"):
        mlx_marlin.linear(x, *native, residual=mx.ones((5, 1, 3, N)))


@pytest.mark.usefixtures("kernels")
def test_an_invariant_row_is_what_it_is_alone() -> None:
    # So many tiles that k would be cut otherwise if the three were one weight.
    native = weights(3, k=1024, dtype=mx.float32)
    x = activations(4, 3, 3, 1024)

    together = mlx_marlin.linear(x, *native, invariant=True)

    for i, j in ((0, 0), (3, 2), (2, 1)):
        alone = mlx_marlin.linear(x[i : i + 1, :, j : j + 1], *native, invariant=True)
        assert mx.array_equal(alone[0, :, 0], together[i, :, j])
    shared = mlx_marlin.linear(x[0, 0], *native, invariant=True)
    assert mx.array_equal(shared[0], together[0, 0])


@pytest.mark.parametrize("fixture", ["ran", "kernels"])
@pytest.mark.parametrize(
    ("of_x", "of_w"),
    [((2, 3, 4), (3,)), ((4,), (3,)), ((1, 4), (3, 2)), ((3, 2), (1,))],
)
def test_gradients_are_mlxs(
    request: pytest.FixtureRequest, fixture: str, of_x: Shape, of_w: Shape
) -> None:
    request.getfixturevalue(fixture)
    w, scales, biases = weights(*of_w)
    x = activations(*of_x, K)

    def gradients(product: Callable[..., mx.array]) -> tuple[mx.array, ...]:
        def loss(x: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
            return (product(x, w, scales, biases) ** 2).sum()

        value, found = mx.value_and_grad(loss, argnums=(0, 1, 2))(x, scales, biases)
        return value, *found

    def plain(x: mx.array, w: mx.array, s: mx.array, b: mx.array) -> mx.array:
        return x @ mx.dequantize(w, s, b).swapaxes(-1, -2)

    for ours, theirs in zip(
        gradients(mlx_marlin.quantized_matmul), gradients(plain), strict=True
    ):
        assert ours.shape == theirs.shape
        assert mx.abs(theirs).max() > 0
        assert mx.abs(ours - theirs).max() <= 1e-4 * mx.abs(theirs).max()


@pytest.mark.usefixtures("kernels")
def test_views_of_weights_and_rows_are_read_as_they_are() -> None:
    w, scales, biases = weights(3, 2)
    native = [each.swapaxes(0, 1)[:, 1:] for each in (w, scales, biases)]
    x = activations(4, 2, 2, K).swapaxes(0, 2)

    y = mlx_marlin.quantized_matmul(x, *native)

    assert mx.allclose(y, mx.quantized_matmul(x, *native), rtol=1e-4, atol=1e-4)


def test_shapes_that_do_not_broadcast_raise_as_in_mlx(ran: list[Plan]) -> None:
    native = weights(2)

    for call in (mlx_marlin.quantized_matmul, mx.quantized_matmul):
        with pytest.raises(ValueError, match="cannot be broadcast"):
            call(activations(4, 3, K), *native)
    assert ran == []


@pytest.fixture
def _on_a_mac(backend: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    backend(None)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    here = device.Device.named("Apple M3 Max")
    monkeypatch.setattr(devices, "current", lambda *_: here)


@pytest.mark.usefixtures("_on_a_mac")
def test_on_a_mac_a_batch_is_handed_over_as_any_product_is() -> None:
    half = {"dtype": mx.float16}
    native = weights(128, n=128, k=512, **half)

    def reason(*shape: int) -> str | None:
        return mlx_marlin.why_not(activations(*shape, 512, **half), *native)

    # One row each reads every weight once, in any kernel; eight share the reading.
    assert "1 row is bound by reading the weight" in str(reason(1, 128, 1))
    assert reason(8, 128, 1) is None
    assert "leaving it takes 1.30" in str(reason(128, 128))


def test_a_batch_is_never_decoded_into_plain_numbers() -> None:
    here = device.Device.named("Apple M5")
    problem = Problem(m=512, n=4096, k=4096, layout="marlin")

    assert planner.choose_dequantize(problem, here)
    several = Problem(m=512, n=4096, k=4096, layout="marlin", batch=2)
    assert planner.choose_dequantize(several, here) is None
