"""Calls with several weights: broadcast as MLX does, each weight read where it lies."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import strategies as st

import mlx_marlin
from metal_emulator import trace
from mlx_marlin.backends import devices, graph, planner
from mlx_marlin.backends.metal import device
from mlx_marlin.planning.dequantize_plan import DequantizePlan, dequantize_plan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products.packing import pack, unpack
from mlx_marlin.weights.formats import CHANNEL
from mlx_marlin.weights.packed_weight import PackedWeight
from support import format_cases, oracles
from support.arguments import K, N, activations, weight
from support.choose import Choose
from support.oracles import Floats
from support.packed_codes import packed_weights
from support.profiles import drawn, sampled
from support.strategies import Grouped, Shape, broadcast
from support.trace_mode import emulator_only

FOUR_BITS = ("affine", 4, 64)
FORMATS: list[Grouped] = [
    FOUR_BITS,
    *(("affine", 3, 64), ("affine", 4, CHANNEL), ("symmetric", 6, 128)),
    *(("zero_point", 2, 16), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)),
    *(("codebook", 4, 256), ("k_codebook", 4, 32), ("k_quant", 5, 32)),
]
"""Every scheme and every group size."""
BOTH_WAYS = pytest.mark.parametrize("transpose", [True, False])
LAYOUTS = pytest.mark.parametrize("layout", ["mlx", "marlin"])
WAYS = [("mlx", True), ("marlin", True), ("marlin", False)]
"""Layouts, and whether the weight is transposed; MLX's is, in our kernels."""


def weights(
    layout: str, *batch: int, n: int = N, k: int = K, grouped: Grouped = FOUR_BITS
) -> tuple[tuple[Any, ...], dict[str, Any], Floats]:
    """Makes a call's weights, all different, its options, and what they stand for."""
    packed, decoded = packed_weights(grouped, *batch, n=n, k=k)
    if layout == "marlin":
        return (packed,), {}, decoded
    mode, bits, group_size = grouped
    options = {"mode": mode, "bits": bits, "group_size": group_size}
    return unpack(packed), options, decoded


def plain(x: mx.array, decoded: Floats, transpose: bool = True) -> Floats:
    return oracles.exact(x) @ (decoded.swapaxes(-1, -2) if transpose else decoded)


@BOTH_WAYS
@drawn(
    8,
    shapes=broadcast(),
    grouped=st.sampled_from(FORMATS),
    n=st.sampled_from([1, 31, 32, 40, 64]),
    times=st.integers(1, 3),
)
def test_any_shapes_are_broadcast_as_a_plain_product_would(
    served: str,
    transpose: bool,
    shapes: tuple[Shape, Shape],
    grouped: Grouped,
    n: int,
    times: int,
) -> None:
    of_x, of_w = shapes
    of_x = of_x or (1,) * bool(of_w)  # a vector meets one weight
    k = times * format_cases.step_of(*grouped)
    # Stock MLX itself broadcasts what is not ours, and not everything.
    ours = served == "kernels" and transpose
    layout = format_cases.layouts_of(*grouped)[0] if ours else "marlin"
    stored, options, decoded = weights(layout, *of_w, n=n, k=k, grouped=grouped)
    x = activations(*of_x, k if transpose else n)

    y = mlx_marlin.quantized_matmul(x, *stored, transpose=transpose, **options)

    reason = mlx_marlin.why_not(x, *stored, transpose=transpose, **options)
    assert (reason is None) == (served == "kernels")
    expected = plain(x, decoded, transpose)
    assert (y.shape, y.dtype) == (expected.shape, mx.float32)
    terms = plain(mx.abs(x), np.abs(decoded), transpose)
    # An offset and a group's own sum of x make the terms of a sum larger than these.
    assert np.linalg.norm(oracles.exact(y) - expected) <= 2e-6 * np.linalg.norm(terms)


@sampled(2)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("layout", "transpose"), WAYS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("of_x", "of_w"), [((2, 3, 9), (3,)), ((9,), (2, 2))])
def test_halves_are_within_what_halves_allow(
    of_x: Shape, of_w: Shape, dtype: str, layout: str, transpose: bool
) -> None:
    native = mx.quantize(mx.random.normal((*of_w, 64, 256)).astype(getattr(mx, dtype)))
    x = activations(*of_x, 256 if transpose else 64, dtype=native[1].dtype)

    stored = (pack(*native),) if layout == "marlin" else native
    y = mlx_marlin.quantized_matmul(x, *stored, transpose=transpose)

    expected = plain(x, oracles.decoded(*native, group_size=64), transpose)
    rows = x.reshape((1,) * (len(of_w) + 2 - x.ndim) + x.shape)
    stock = mx.quantized_matmul(rows, *native, transpose=transpose)
    assert oracles.error(y, expected) < oracles.TOLERANCES[dtype]
    assert oracles.error(y, expected) <= 2 * oracles.error(stock, expected)
    assert (y.shape, y.dtype) == (stock.shape, stock.dtype)


# x, w before n, n, and what is asked: m, n, batch.
ASKED: dict[str, tuple[Shape, Shape, int, tuple[int, int, int]]] = {
    "heads": ((2, 4, 3), (4,), 40, (6, 40, 4)),
    "heads of one row": ((7, 4, 1), (4,), 40, (7, 40, 4)),
    "a weight of a batch of one": ((5, 3), (1,), 40, (15, 40, 1)),
    "rows that all weights share": ((5, 1, 3), (4,), 64, (15, 4 * 64, 1)),
    "one weight for some": ((2, 4, 3), (2, 1), 32, (12, 32, 2)),
    "rows that some weights share": ((4, 1, 3), (4, 2), 40, (3, 40, 8)),
    "shared rows, padded tiles": ((3,), (4,), 40, (3, 40, 4)),
}


@LAYOUTS
@pytest.mark.parametrize("kind", ASKED)
def test_rows_that_share_a_weight_share_its_reading(
    ran: list[Plan], kind: str, layout: str
) -> None:
    of_x, of_w, n, sizes = ASKED[kind]
    stored, _, decoded = weights(layout, *of_w, n=n)
    x = activations(*of_x, K)

    y = mlx_marlin.quantized_matmul(x, *stored)

    (problem,) = [plan.problem for plan in ran]
    if kind == "shared rows, padded tiles" and layout == "mlx":
        sizes = (3, 4 * 40, 1)  # without padding weights are one below each other
    assert (problem.m, problem.n, problem.batch) == sizes
    assert problem.layout == layout
    assert y.shape == plain(x, decoded).shape
    assert oracles.error(y, plain(x, decoded)) < 1e-6


@sampled(2)
@emulator_only
@pytest.mark.usefixtures("kernels")
@BOTH_WAYS
@pytest.mark.parametrize(("of_x", "n"), [((2, 3, 4), 40), ((4,), 40), ((4,), 64)])
def test_all_that_is_read_was_given(of_x: Shape, n: int, transpose: bool) -> None:
    packed, decoded = packed_weights(FOUR_BITS, 3, n=n, k=K)
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


@sampled(4)
@LAYOUTS
@pytest.mark.parametrize(
    ("of_x", "of_w", "n"),
    [
        ((2, 3, 4), (3,), 40),
        ((2, 3, 4), (2, 1), 64),
        ((2, 3, 4), (1, 1), 40),
        ((5, 1, 3), (2,), 40),
    ],
)
def test_linear_finishes_a_batch(
    served: str, of_x: Shape, of_w: Shape, n: int, layout: str
) -> None:
    stored, _, decoded = weights(layout, *of_w, n=n)
    x = activations(*of_x, K)
    product = mx.array(plain(x, decoded), mx.float32)
    finish = {
        name: mx.random.normal(shape, key=mx.random.key(i))
        for i, (name, shape) in enumerate(
            {"bias": (n,), "multiply": product.shape, "residual": product.shape}.items()
        )
    }

    y = mlx_marlin.linear(x, *stored, activation="silu", **finish)

    expected = nn.silu(product + finish["bias"])
    expected = expected * finish["multiply"] + finish["residual"]
    assert mx.allclose(y, expected, rtol=1e-4, atol=1e-4)
    short = finish | {"residual": finish["residual"][:1]}
    said = rf"residual has shape .* expected \({str(y.shape)[1:-1]}"
    with pytest.raises(ValueError, match=said):
        mlx_marlin.linear(x, *stored, **short)


@LAYOUTS
@pytest.mark.usefixtures("kernels")
def test_an_invariant_row_is_what_it_is_alone(layout: str) -> None:
    # So many tiles that k would be cut otherwise if the three were one weight.
    stored, _, _ = weights(layout, 3, n=64, k=1024)
    x = activations(4, 3, 3, 1024)

    together = mlx_marlin.linear(x, *stored, invariant=True)

    for i, j in ((0, 0), (3, 2), (2, 1)):
        alone = mlx_marlin.linear(x[i : i + 1, :, j : j + 1], *stored, invariant=True)
        assert mx.array_equal(alone[0, :, 0], together[i, :, j])
    shared = mlx_marlin.linear(x[0, 0], *stored, invariant=True)
    assert mx.array_equal(shared[0], together[0, 0])


@sampled(5)
@pytest.mark.parametrize("n", [40, 64])
@pytest.mark.parametrize(("layout", "transpose"), WAYS)
@pytest.mark.parametrize(
    ("of_x", "of_w"),
    [((2, 3, 4), (3,)), ((4,), (3,)), ((1, 4), (3, 2)), ((3, 2), (1,))],
)
def test_gradients_are_those_of_a_plain_product(
    served: str, of_x: Shape, of_w: Shape, n: int, layout: str, transpose: bool
) -> None:
    w, scales, biases = mx.quantize(mx.random.normal((*of_w, n, K)))
    x = activations(*of_x, K if transpose else n)

    def gradients(product: Callable[..., mx.array]) -> tuple[mx.array, ...]:
        def loss(x: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
            return (product(x, scales, biases) ** 2).sum()

        value, found = mx.value_and_grad(loss, argnums=(0, 1, 2))(x, scales, biases)
        return value, *found

    def ours(x: mx.array, *floats: mx.array) -> mx.array:
        stored = (pack(w, *floats),) if layout == "marlin" else (w, *floats)
        return mlx_marlin.quantized_matmul(x, *stored, transpose=transpose)

    def theirs(x: mx.array, *floats: mx.array) -> mx.array:
        decoded = mx.dequantize(w, *floats)
        return x @ (decoded.swapaxes(-1, -2) if transpose else decoded)

    for found, expected in zip(gradients(ours), gradients(theirs), strict=True):
        assert found.shape == expected.shape
        assert mx.abs(expected).max() > 0
        assert mx.abs(found - expected).max() <= 1e-4 * mx.abs(expected).max()


@pytest.mark.usefixtures("kernels")
def test_views_of_weights_and_rows_are_read_as_they_are() -> None:
    stored, _, decoded = weights("mlx", 3, 2)
    native = [each.swapaxes(0, 1)[:, 1:] for each in stored]
    x = activations(4, 2, 2, K).swapaxes(0, 2)

    y = mlx_marlin.quantized_matmul(x, *native)

    assert oracles.error(y, plain(x, decoded.swapaxes(0, 1)[:, 1:])) < 1e-6


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("chunk", [64, 128, 256])
def test_weights_are_decoded_in_chunks_of_all(chunk: int) -> None:
    packed, decoded = packed_weights(FOUR_BITS, 2, 3, n=40, k=192)
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

    y = graph.dequantized_product(plan)(x, packed.words, packed.scales, packed.scales)

    assert len(plan.chunks) == -(-192 // chunk)
    # 24 rows of padding of each weight are decoded with it.
    assert plan.chunks[0] == (0, 6 * 64, 0, min(chunk, 192))
    assert plan.temporary_bytes == 6 * 64 * min(chunk, 192) * 4
    assert oracles.error(y, plain(x, decoded, False)) < 1e-6


@pytest.mark.usefixtures("kernels")
def test_rows_that_all_weights_share_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed, decoded = packed_weights(FOUR_BITS, 2, 3, n=N, k=K)
    x = activations(4, 1, 1, 5, N)
    original, multiplied = graph.dequantized_product, []

    def watched(plan: DequantizePlan) -> graph.Product:
        product = original(plan)

        def run(x: mx.array, *weight: mx.array) -> mx.array:
            multiplied.append(x)
            return product(x, *weight)

        return run

    monkeypatch.setattr(graph, "dequantized_product", watched)
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


@pytest.mark.usefixtures("served")
def test_what_a_batch_cannot_do_is_refused() -> None:
    (packed,), _, _ = weights("marlin", 3)
    native, _, _ = weights("mlx", 2)
    x = activations(2, 3, 4, K)
    w = mx.random.normal((3, N, K))
    scaled = mlx_marlin.quantize(w, mode="nvfp4", global_scale=mx.array([2.0]))

    for ask in (mlx_marlin.quantized_matmul, mlx_marlin.linear, mlx_marlin.why_not):
        with pytest.raises(ValueError, match=r"w is a batch \(3,\) .* global_scale"):
            ask(x, scaled)
        with pytest.raises(ValueError, match=r"x has \(2,\) before .* w \(3,\)"):
            ask(activations(2, 4, K), packed)
        with pytest.raises(ValueError, match=rf"expected \[..., {K}\] .* \(3, {N}, "):
            ask(x[..., :64], packed)
        with pytest.raises(ValueError, match=rf"\[..., m, {K}\] for a batch \(3,\)"):
            ask(x[0, 0, 0], packed)
        with pytest.raises(ValueError, match=rf"\[..., m, {K}\] for a batch \(2,\)"):
            ask(x[0, 0, 0], *native)
    with pytest.raises(ValueError, match=r"w is a batch \(3,\) of packed weights, exp"):
        mlx_marlin.linears(x, packed, parts=(8, N - 8))
    for call in (mlx_marlin.quantized_matmul, mx.quantized_matmul):
        with pytest.raises(ValueError, match="cannot be broadcast"):
            call(activations(4, 3, K), *native)


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
    native = weight(128, 512, batch=128, **half)

    def reason(*shape: int) -> str | None:
        return mlx_marlin.why_not(activations(*shape, 512, **half), *native)

    # One row each reads every weight once, in any kernel; few columns stay with stock.
    assert "by the table of Apple M3 Max" in str(reason(1, 128, 1))
    assert "no number of rows" in str(reason(8, 128, 1))


def test_a_batch_is_never_decoded_into_plain_numbers() -> None:
    here = device.Device.named("Apple M5")
    problem = Problem(m=512, n=4096, k=4096, layout="marlin")

    assert planner.choose_dequantize(problem, here)
    several = Problem(m=512, n=4096, k=4096, layout="marlin", batch=2)
    assert planner.choose_dequantize(several, here) is None
