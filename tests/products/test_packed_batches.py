"""Calls with a batch of packed weights, each in whole tiles, read where they lie."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import strategies as st

import mlx_marlin
from metal_emulator import trace
from mlx_marlin import state
from mlx_marlin.backends import launcher, selection
from mlx_marlin.planning.dequantize_plan import DequantizePlan, dequantize_plan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products.packing import pack
from mlx_marlin.weights.packed_weight import PackedWeight
from support import format_cases, oracles
from support.arguments import K, N, activations
from support.oracles import Floats
from support.profiles import drawn, sampled
from support.strategies import ANY_FORMAT, Grouped, Shape, broadcast
from support.trace_mode import emulator_only

BOTH_WAYS = pytest.mark.parametrize("transpose", [True, False])


def packed_weights(
    *batch: int, n: int = N, k: int = K, grouped: Grouped = ("affine", 4, 64)
) -> tuple[PackedWeight, Floats]:
    """Makes different weights, and what they stand for in float64."""
    weight = format_cases.any_weight(
        *grouped, math.prod(batch) * n, k, dtype="float32", seed=n
    )
    native = [each.reshape(*batch, n, -1) for each in weight.native]
    return pack(*native, **weight.options), weight.decoded.reshape(*batch, n, k)


def plain(x: mx.array, decoded: Floats, transpose: bool) -> Floats:
    return oracles.exact(x) @ (decoded.swapaxes(-1, -2) if transpose else decoded)


@pytest.fixture(scope="module", params=["kernels", "stock"])
def _served_by(request: pytest.FixtureRequest) -> Any:
    """Serves every call by the kernels, then by stock MLX."""
    here = selection.backend() if request.param == "kernels" else "stock"
    if request.param == "kernels" and here == "stock":
        pytest.skip("nothing here runs Metal kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(selection.ENVIRONMENT, here)
        state.reset()
        yield
    state.reset()


@pytest.mark.usefixtures("_served_by")
@BOTH_WAYS
@drawn(
    4,
    20,
    shapes=broadcast(),
    grouped=ANY_FORMAT,
    n=st.sampled_from([1, 31, 32, 40, 64]),
    times=st.integers(1, 3),
)
def test_any_shapes_are_broadcast_as_a_plain_product_would(
    transpose: bool, shapes: tuple[Shape, Shape], grouped: Grouped, n: int, times: int
) -> None:
    of_x, of_w = shapes
    k = times * format_cases.step_of(*grouped)
    packed, decoded = packed_weights(*of_w, n=n, k=k, grouped=grouped)
    x = activations(*of_x, k if transpose else n)

    y = mlx_marlin.quantized_matmul(x, packed, transpose=transpose)

    expected = plain(x, decoded, transpose)
    assert y.dtype == mx.float32
    assert y.shape == expected.shape
    terms = np.abs(oracles.exact(x)) @ np.abs(
        decoded.swapaxes(-1, -2) if transpose else decoded
    )
    # An offset and a group's own sum of x make the terms of a sum larger than these.
    assert np.linalg.norm(oracles.exact(y) - expected) <= 2e-6 * np.linalg.norm(terms)


@sampled(1)
@pytest.mark.usefixtures("kernels")
@BOTH_WAYS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("of_x", "of_w"), [((2, 3, 9), (3,)), ((9,), (2, 2))])
def test_halves_are_within_what_halves_allow(
    of_x: Shape, of_w: Shape, dtype: str, transpose: bool
) -> None:
    w = mx.random.normal((*of_w, 64, 256)).astype(getattr(mx, dtype))
    native = mx.quantize(w)
    x = activations(*of_x, 256 if transpose else 64, dtype=w.dtype)

    y = mlx_marlin.quantized_matmul(x, pack(*native), transpose=transpose)

    expected = plain(x, oracles.decoded(*native, group_size=64), transpose)
    rows = x.reshape((1,) * (w.ndim - x.ndim) + x.shape)
    stock = mx.quantized_matmul(rows, *native, transpose=transpose)
    assert oracles.error(y, expected) < oracles.TOLERANCES[dtype]
    assert oracles.error(y, expected) <= 2 * oracles.error(stock, expected)
    assert (y.shape, y.dtype) == (stock.shape, stock.dtype)


@sampled(2)
@pytest.mark.usefixtures("kernels")
@BOTH_WAYS
@pytest.mark.parametrize("n", [40, 64])
@pytest.mark.parametrize(("of_x", "of_w"), [((2, 3, 9), (3,)), ((9,), (2, 2))])
def test_integers_come_out_exactly(
    of_x: Shape, of_w: Shape, n: int, transpose: bool
) -> None:
    draw = np.random.default_rng(n)
    words = mx.array(draw.integers(0, 2**32, (*of_w, n, K // 8), np.uint32))
    scales, biases = (
        mx.array(draw.integers(-4, 5, (*of_w, n, K // 64)), mx.float32)
        for _ in range(2)
    )
    x = mx.array(draw.integers(-8, 9, (*of_x, K if transpose else n)), mx.float32)

    y = mlx_marlin.quantized_matmul(x, pack(words, scales, biases), transpose=transpose)

    decoded = oracles.decoded(words, scales, biases, group_size=64)
    assert np.array_equal(oracles.exact(y), plain(x, decoded, transpose))


# x, w before n, n, and what is asked: m, n, batch.
ASKED: dict[str, tuple[Shape, Shape, int, tuple[int, int, int]]] = {
    "heads": ((2, 4, 3), (4,), 40, (6, 40, 4)),
    "a weight of a batch of one": ((5, 3), (1,), 40, (15, 40, 1)),
    "whole tiles of rows that all share": ((5, 1, 3), (4,), 64, (15, 4 * 64, 1)),
    "padded tiles of rows that all share": ((3,), (4,), 40, (3, 40, 4)),
    "a vector": ((), (2, 2), 32, (1, 4 * 32, 1)),
    "one weight for some": ((2, 4, 3), (2, 1), 32, (12, 32, 2)),
}


@pytest.mark.parametrize("kind", ASKED)
def test_only_weights_of_whole_tiles_are_one_below_each_other(
    ran: list[Plan], kind: str
) -> None:
    of_x, of_w, n, sizes = ASKED[kind]
    packed, decoded = packed_weights(*of_w, n=n)
    x = activations(*of_x, K)

    y = mlx_marlin.quantized_matmul(x, packed)

    (problem,) = [plan.problem for plan in ran]
    assert problem.layout == "marlin"
    assert (problem.m, problem.n, problem.batch) == sizes
    assert oracles.error(y, plain(x, decoded, True)) < 1e-6


@sampled(2)
@emulator_only
@pytest.mark.usefixtures("kernels")
@BOTH_WAYS
@pytest.mark.parametrize(("of_x", "n"), [((2, 3, 4), 40), ((4,), 40), ((4,), 64)])
def test_all_that_is_read_was_given(of_x: Shape, n: int, transpose: bool) -> None:
    packed, decoded = packed_weights(3, n=n)
    x = activations(*of_x, K if transpose else n)

    def product(x: mx.array, words: mx.array, scales: mx.array) -> mx.array:
        w = PackedWeight(words=words, scales=scales, n=n, k=K)
        results.append(mlx_marlin.quantized_matmul(x, w, transpose=transpose))
        return results[0]

    results: list[mx.array] = []
    counters = trace(product, x, packed.words, packed.scales)

    assert oracles.error(results[0], plain(x, decoded, transpose)) < 1e-6
    # Padding is read too, but no word twice.
    read = counters[0].of("w")
    assert (read.read_bytes, read.repeated_read_bytes) == (packed.words.nbytes, 0)


@sampled(2)
@pytest.mark.usefixtures("_served_by")
@pytest.mark.parametrize("of_w", [(3,), (2, 1), (1, 1), (2, 3)])
@pytest.mark.parametrize("n", [40, 64])
def test_linear_finishes_a_batch(of_w: Shape, n: int) -> None:
    packed, decoded = packed_weights(*of_w, n=n)
    x = activations(2, 3, 4, K)
    bias, multiply, residual = (
        mx.random.normal(shape, key=mx.random.key(i))
        for i, shape in enumerate([(n,), (2, 3, 4, n), (2, 3, 4, n)])
    )

    y = mlx_marlin.linear(
        x, packed, bias=bias, activation="silu", multiply=multiply, residual=residual
    )

    product = mx.array(plain(x, decoded, True), mx.float32)
    expected = nn.silu(product + bias) * multiply + residual
    assert mx.allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("kernels")
def test_an_epilogues_arrays_have_the_shape_of_the_result() -> None:
    packed, decoded = packed_weights(2)
    x = activations(5, 1, 3, K)

    y = mlx_marlin.linear(x, packed, residual=mx.ones((5, 2, 3, N)))

    assert oracles.error(y, plain(x, decoded, True) + 1) < 1e-6
    with pytest.raises(ValueError, match=r"residual has shape .* expected \(5, 2, 3"):
        mlx_marlin.linear(x, packed, residual=mx.ones((5, 1, 3, N)))


@pytest.mark.usefixtures("kernels")
def test_an_invariant_row_is_what_it_is_alone() -> None:
    packed, _ = packed_weights(3, n=64, k=1024)
    x = activations(4, 3, 3, 1024)

    together = mlx_marlin.linear(x, packed, invariant=True)

    for i, j in ((0, 0), (3, 2), (2, 1)):
        alone = mlx_marlin.linear(x[i : i + 1, :, j : j + 1], packed, invariant=True)
        assert mx.array_equal(alone[0, :, 0], together[i, :, j])
    shared = mlx_marlin.linear(x[0, 0], packed, invariant=True)
    assert mx.array_equal(shared[0], together[0, 0])


@sampled(3)
@BOTH_WAYS
@pytest.mark.usefixtures("_served_by")
@pytest.mark.parametrize("n", [40, 64])
@pytest.mark.parametrize(
    ("of_x", "of_w"),
    [((2, 3, 4), (3,)), ((4,), (3,)), ((1, 4), (3, 2)), ((3, 2), (1,)), ((), (2,))],
)
def test_gradients_are_those_of_a_plain_product(
    of_x: Shape, of_w: Shape, n: int, transpose: bool
) -> None:
    w, scales, biases = mx.quantize(mx.random.normal((*of_w, n, K)))
    x = activations(*of_x, K if transpose else n)

    def gradients(product: Callable[..., mx.array]) -> tuple[mx.array, ...]:
        def loss(x: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
            return (product(x, scales, biases) ** 2).sum()

        value, found = mx.value_and_grad(loss, argnums=(0, 1, 2))(x, scales, biases)
        return value, *found

    def ours(x: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        packed = pack(w, scales, biases)
        return mlx_marlin.quantized_matmul(x, packed, transpose=transpose)

    def theirs(x: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        decoded = mx.dequantize(w, scales, biases)
        return x @ (decoded.swapaxes(-1, -2) if transpose else decoded)

    for found, expected in zip(gradients(ours), gradients(theirs), strict=True):
        assert found.shape == expected.shape
        assert mx.abs(expected).max() > 0
        assert mx.abs(found - expected).max() <= 1e-4 * mx.abs(expected).max()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("chunk", [64, 128, 256])
def test_weights_are_decoded_in_chunks_of_all(chunk: int) -> None:
    packed, decoded = packed_weights(2, 3, n=40, k=192)
    x = activations(4, 1, 3, 5, 40)
    problem = Problem(
        m=20,
        n=40,
        k=192,
        batch=6,
        layout="marlin",
        dtype="float32",
        scale_dtype="float32",
    )
    plan = DequantizePlan(problem=problem, transposed=False, chunk=chunk)

    y = launcher.dequantized_product(plan)(
        x, packed.words, packed.scales, packed.scales
    )

    assert len(plan.chunks) == -(-192 // chunk)
    # 24 rows of padding of each weight are decoded with it.
    assert plan.chunks[0] == (0, 6 * 64, 0, min(chunk, 192))
    assert plan.temporary_bytes == 6 * 64 * min(chunk, 192) * 4
    assert oracles.error(y, plain(x, decoded, False)) < 1e-6


@pytest.mark.usefixtures("kernels")
def test_rows_that_all_weights_share_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed, decoded = packed_weights(2, 3)
    x = activations(4, 1, 1, 5, N)
    original, multiplied = launcher.dequantized_product, []

    def watched(plan: DequantizePlan) -> launcher.Product:
        product = original(plan)

        def run(x: mx.array, *weight: mx.array) -> mx.array:
            multiplied.append(x)
            return product(x, *weight)

        return run

    monkeypatch.setattr(launcher, "dequantized_product", watched)
    y = mlx_marlin.quantized_matmul(x, packed, transpose=False)

    assert [each.shape for each in multiplied] == [x.shape]
    assert oracles.error(y, plain(x, decoded, False)) < 1e-6


def test_a_batch_takes_as_many_chunks_as_its_memory_asks_for() -> None:
    one = Problem(m=8, n=4096, k=4096, layout="marlin")
    several = Problem(m=8, n=4096, k=4096, layout="marlin", batch=16)

    assert len(dequantize_plan(one, transposed=False).chunks) == 1
    assert len(dequantize_plan(several, transposed=False).chunks) == 2
    for problem, transposed in (
        (several, True),
        (Problem(m=8, n=4096, k=4096, batch=16), False),
    ):
        with pytest.raises(ValueError, match="batch=16, expected one weight, or"):
            dequantize_plan(problem, transposed=transposed)


@pytest.mark.usefixtures("_served_by")
def test_what_a_batch_cannot_do_is_refused() -> None:
    packed, _ = packed_weights(3)
    x = activations(2, 3, 4, K)
    scale = mx.array([2.0])
    w = mx.random.normal((3, N, K))
    scaled = mlx_marlin.quantize(w, mode="nvfp4", global_scale=scale)

    for ask in (mlx_marlin.quantized_matmul, mlx_marlin.linear, mlx_marlin.why_not):
        with pytest.raises(ValueError, match=r"w is a batch \(3,\) .* global_scale"):
            ask(x, scaled)
        with pytest.raises(ValueError, match=r"x has \(2,\) before .* w \(3,\)"):
            ask(activations(2, 4, K), packed)
        with pytest.raises(ValueError, match=rf"expected \[..., {K}\] .* \(3, {N}, "):
            ask(x[..., :64], packed)
    with pytest.raises(ValueError, match=r"w is a batch \(3,\) of packed weights, exp"):
        mlx_marlin.linears(x, packed, parts=(8, N - 8))


@pytest.mark.usefixtures("stock")
def test_no_kernel_of_ours_means_stock_mlx_and_says_so() -> None:
    packed, decoded = packed_weights(2, 2)
    vector = activations(K)

    assert mlx_marlin.why_not(vector, packed)
    y = mlx_marlin.quantized_matmul(vector, packed)
    assert oracles.error(y, plain(vector, decoded, True)) < 1e-6
    with pytest.raises(ValueError, match="invariant=True cannot be kept"):
        mlx_marlin.linear(vector, packed, invariant=True)
