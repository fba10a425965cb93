"""Products with an epilogue, and several that share x."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import strategies as st

import mlx_marlin
from metal_emulator import emulated
from mlx_marlin.backends import graph, selection
from mlx_marlin.planning.epilogue import ACTIVATIONS, MOST_PARTS, Epilogue
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import Reduction
from mlx_marlin.products import this_machine
from mlx_marlin.products.linear import fused_linear
from mlx_marlin.products.packing import pack
from support import drawn_arrays, epilogues, oracles, strategies
from support.arguments import K, N, activations, weight
from support.choose import Choose
from support.profiles import drawn, sampled
from support.trace_mode import emulator_only

OPERANDS = ("bias", "multiply", "residual")
IN_MLX = {None: lambda y: y} | {name: getattr(nn, name) for name in ACTIVATIONS[1:]}


def operands(*shape: int, dtype: mx.Dtype = mx.float16) -> dict[str, mx.array]:
    """Makes a bias, a multiplier and a residual for a result [*shape, N]."""
    shapes = {"bias": (N,), "multiply": (*shape, N), "residual": (*shape, N)}
    return {
        name: mx.random.normal(size, key=mx.random.key(seed)).astype(dtype)
        for seed, (name, size) in enumerate(shapes.items())
    }


def in_float32(
    x: mx.array, native: tuple[mx.array, ...], activation: str | None, **given: mx.array
) -> mx.array:
    """Computes the same in MLX's operations, in float32."""
    w, *floats = native
    y = mx.quantized_matmul(
        x.astype(mx.float32), w, *(each.astype(mx.float32) for each in floats)
    )
    as_float = {name: array.astype(mx.float32) for name, array in given.items()}
    y = IN_MLX[activation](y + as_float.get("bias", 0.0))
    return y * as_float.get("multiply", 1.0) + as_float.get("residual", 0.0)


def assert_finished(y: mx.array, expected: mx.array, *, rounding: float) -> None:
    """Checks elements up to a rounding to the result's dtype, and a little beside."""
    difference = np.abs(oracles.exact(y) - oracles.exact(expected))
    scale = np.abs(oracles.exact(expected))
    assert np.all(difference <= rounding * scale + 1e-4 + rounding * scale.mean())


@pytest.mark.usefixtures("kernels")
@drawn(
    4,
    shape=st.sampled_from([(1,), (3,), (9,), (2, 5), (1, 1, 4)]),
    activation=st.sampled_from([*IN_MLX]),
    chosen=st.sets(st.sampled_from(OPERANDS)),
    packed=st.booleans(),
)
def test_every_epilogue_is_what_mlx_would_do_in_float32(
    shape: tuple[int, ...], activation: str | None, chosen: set[str], packed: bool
) -> None:
    x, native = activations(*shape, K).astype(mx.float16), weight(dtype=mx.float16)
    given = {name: operands(*shape)[name] for name in sorted(chosen)}
    arguments = (pack(*native),) if packed else native

    y = mlx_marlin.linear(x, *arguments, activation=activation, **given)

    assert (y.shape, y.dtype) == ((*shape, N), mx.float16)
    assert_finished(y, in_float32(x, native, activation, **given), rounding=2e-3)


def test_an_epilogue_costs_no_dispatch(
    backend: Choose, recorded: Callable[..., list[str]]
) -> None:
    backend("metal")
    x, native, given = activations(8, K), weight(), operands(8, dtype=mx.float32)
    mx.eval(native, given)

    def finished(x: mx.array) -> mx.array:
        return mlx_marlin.linear(x, *native, activation="silu", **given)

    assert recorded(finished, x) == ["CustomKernel"]


@pytest.mark.parametrize("shape", [(8,), (2, 4), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_rows_stand_in_any_shape_without_a_reshape(
    backend: Choose,
    recorded: Callable[..., list[str]],
    shape: tuple[int, ...],
    packed: bool,
) -> None:
    backend("stock")
    x, native = activations(*shape, K), weight()
    whole = pack(*native)
    given = operands(*shape, dtype=mx.float32)
    mx.eval(given, native, whole.words, whole.scales)
    arguments = (whole,) if packed else native
    backend("metal")

    def finished(x: mx.array) -> mx.array:
        y = mlx_marlin.linear(x, *arguments, activation="silu", **given)
        assert y.shape == (*shape, N)
        return y

    assert {*recorded(finished, x)} == {"CustomKernel"}


@pytest.mark.usefixtures("stock")
def test_where_stock_serves_the_same_operations_follow() -> None:
    x, native, given = activations(8, K), weight(), operands(8, dtype=mx.float32)

    y = mlx_marlin.linear(x, *native, activation="gelu", **given)

    product = mx.quantized_matmul(x, *native)
    expected = nn.gelu(product + given["bias"]) * given["multiply"] + given["residual"]
    assert mx.array_equal(y, expected)


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("rows", [0, 3])
def test_an_empty_sum_is_finished_too(rows: int) -> None:
    x, (w, scales, biases) = mx.zeros((rows, 0)), weight()
    native = w[:, :0], scales[:, :0], biases[:, :0]
    given = operands(rows, dtype=mx.float32)

    y = mlx_marlin.linear(x, *native, **given)

    expected = mx.broadcast_to(given["bias"], (rows, N)) * given["multiply"]
    assert mx.array_equal(y, expected + given["residual"])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.usefixtures("kernels")
def test_gradients_reach_every_array(packed: bool) -> None:
    x, native = activations(3, K), weight()
    given = operands(3, dtype=mx.float32)
    ours = (pack(*native),) if packed else native

    def loss(product: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def of(x: mx.array, *arrays: mx.array) -> mx.array:
            return product(x, *arrays).square().sum()

        return of

    def fused(x: mx.array, *arrays: mx.array) -> mx.array:
        named = dict(zip(OPERANDS, arrays, strict=True))
        return mlx_marlin.linear(x, *ours, activation="silu", **named)

    def apart(x: mx.array, bias: mx.array, *arrays: mx.array) -> mx.array:
        y = nn.silu(mx.quantized_matmul(x, *native) + bias)
        return y * arrays[0] + arrays[1]

    places = (0, 1, 2, 3)
    found = mx.grad(loss(fused), places)(x, *given.values())
    expected = mx.grad(loss(apart), places)(x, *given.values())

    for ours_grad, theirs in zip(found, expected, strict=True):
        assert mx.allclose(ours_grad, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("bias", (3, N), f"({N},)"),
        ("bias", (N + 1,), f"({N},)"),
        ("multiply", (N,), f"(3, {N})"),
        ("residual", (3, 1), f"(3, {N})"),
    ],
)
def test_an_operand_of_another_shape_is_refused(
    name: str, shape: tuple[int, ...], expected: str
) -> None:
    with pytest.raises(ValueError, match=rf"{name} has shape") as caught:
        mlx_marlin.linear(activations(3, K), *weight(), **{name: mx.zeros(shape)})

    assert expected in str(caught.value)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation='tanh' is not one of"):
        mlx_marlin.linear(activations(3, K), *weight(), activation="tanh")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.usefixtures("kernels")
def test_an_invariant_row_has_the_same_bits_in_any_batch(packed: bool) -> None:
    x, native = activations(64, K), weight()
    arguments = (pack(*native),) if packed else native
    alone = [
        mlx_marlin.linear(x[i : i + 1], *arguments, invariant=True) for i in (0, 6, 63)
    ]

    for first, rows in ((0, 5), (0, 8), (2, 31), (0, 64)):
        y = mlx_marlin.linear(x[first : first + rows], *arguments, invariant=True)
        for row, bits in zip((0, 6, 63), alone, strict=True):
            if first <= row < first + rows:
                assert mx.array_equal(y[row - first], bits[0])


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_invariance_is_refused_where_stock_would_serve(
    packed: bool, batch: int
) -> None:
    native = weight(batch=batch)
    arguments = (pack(*native),) if packed else native
    with pytest.raises(ValueError, match="invariant=True cannot be kept"):
        mlx_marlin.linear(activations(3, K), *arguments, invariant=True)


def test_an_invariant_product_is_never_handed_over(
    backend: Choose, recorded: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend(None)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(this_machine, "why_not", lambda _: None)
    assert selection.backend() == "metal"
    x, native = activations(1, K), weight()
    mx.eval(native)

    def product(x: mx.array) -> mx.array:
        return mlx_marlin.linear(x, *native)

    def invariant(x: mx.array) -> mx.array:
        return mlx_marlin.linear(x, *native, invariant=True)

    assert recorded(product, x) == ["QuantizedMatmul"]
    assert recorded(invariant, x) == ["CustomKernel"]


def test_every_call_checks_the_shapes_of_a_weight(backend: Choose) -> None:
    backend("emulator")
    w, scales, biases = mx.quantize(mx.random.normal((64, 64)), group_size=64)
    x = mx.random.normal((8, 64))

    def call(*arrays: mx.array) -> object:
        weight = (*arrays, (64, 4, "affine"))
        return fused_linear(x, weight, Epilogue(activation="silu"), ())

    assert call(w, scales, biases) is not None
    with pytest.raises(ValueError, match="scales"):
        call(w, scales[:32], biases)
    with pytest.raises(ValueError, match="biases"):
        call(w, scales, biases[:32])
    with pytest.raises(ValueError, match="should be uint32"):
        call(w.view(mx.int32), scales, biases)


@pytest.mark.usefixtures("kernels")
@drawn(
    5,
    shape=st.sampled_from([(1,), (2,), (9,), (0,), (2, 5), ()]),
    parts=st.lists(st.integers(1, 70), min_size=2, max_size=MOST_PARTS),
    biased=st.booleans(),
    packed=st.booleans(),
)
def test_each_part_is_the_product_of_its_own_weight(
    shape: tuple[int, ...], parts: list[int], biased: bool, packed: bool
) -> None:
    x, native = activations(*shape, K), weight(n=sum(parts))
    bias = mx.random.normal((sum(parts),), key=mx.random.key(7)) if biased else None
    arguments = (pack(*native),) if packed else native

    found = mlx_marlin.linears(x, *arguments, parts=parts, bias=bias)

    end = 0
    for y, rows in zip(found, parts, strict=True):
        own = slice(end, end + rows)
        end += rows
        if not x.size:  # MLX divides by the rows
            assert y.shape == (*shape, rows)
            continue
        expected = mx.quantized_matmul(
            x.reshape(-1, K), *(each[own] for each in native)
        ).reshape(*shape, rows)
        expected = expected if bias is None else expected + bias[own]
        assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
        assert mx.allclose(y, expected, rtol=1e-4, atol=1e-4)


PROBLEMS = {
    "gemv": Problem(m=3, n=100, k=448),
    "gemm": Problem(m=11, n=100, k=448, dtype="bfloat16", scale_dtype="bfloat16"),
    "gemm, packed": Problem(m=9, n=70, k=640, group_size=128, layout="marlin"),
}


@sampled(0, 3)
@emulator_only
@pytest.mark.parametrize("reduction", ["workspace", "atomic"])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_every_strategy_stores_every_part(
    problem: Problem, reduction: Reduction
) -> None:
    """In trace mode: nothing is written twice, or outside."""
    parts = (33, 1, problem.n - 34)
    asked = replace(problem, epilogue=Epilogue(bias=True, parts=parts))
    x, native = drawn_arrays.arrays(problem, seed=4)
    finish = drawn_arrays.finish_arrays(problem, seed=5)
    total = oracles.product(x, *native, group_size=problem.group_size)
    expected = epilogues.finished(total, finish, asked.epilogue)
    weight = native
    if problem.layout == "marlin":
        packed = pack(*native, group_size=problem.group_size)
        weight = (packed.words, packed.scales, packed.scales)

    for plan in strategies.one_of_each(asked, reduction=reduction):
        with emulated(trace=True):
            y = epilogues.whole(graph.product(plan)(x, *weight, *finish))
            mx.eval(y)
        off = np.abs(oracles.exact(y) - expected)
        assert np.all(off <= epilogues.allowed(plan, x, native, finish))


def test_all_parts_take_one_dispatch(
    backend: Choose, recorded: Callable[..., list[str]]
) -> None:
    backend("metal")
    x, native = activations(8, K), weight(n=96)
    mx.eval(native)

    def products(x: mx.array) -> tuple[mx.array, ...]:
        return mlx_marlin.linears(x, *native, parts=(32, 40, 24))

    views = ("Slice", "Reshape", "Flatten")
    assert [each for each in recorded(products, x) if each not in views] == [
        "CustomKernel"
    ]


@pytest.mark.usefixtures("stock")
def test_where_stock_serves_its_product_is_split() -> None:
    x, native = activations(8, K), weight(n=96)

    found = mlx_marlin.linears(x, *native, parts=(32, 64))

    expected = mx.split(mx.quantized_matmul(x, *native), [32], axis=-1)
    assert all(mx.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.usefixtures("kernels")
def test_gradients_of_the_parts_meet_in_x_and_codes_have_none(packed: bool) -> None:
    x, native = activations(3, K), weight(n=50)
    arguments = (pack(*native),) if packed else native

    def ours(x: mx.array, codes: mx.array) -> mx.array:
        stored = (
            (replace(arguments[0], words=codes),) if packed else (codes, *native[1:])
        )
        first, second = mlx_marlin.linears(x, *stored, parts=(20, 30))
        return (first.square()).sum() + 3 * second.sum()

    def theirs(x: mx.array) -> mx.array:
        first, second = mx.split(mx.quantized_matmul(x, *native), [20], axis=-1)
        return (first.square()).sum() + 3 * second.sum()

    codes = arguments[0].words if packed else native[0]
    assert mx.allclose(
        mx.grad(ours)(x, codes), mx.grad(theirs)(x), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(ValueError, match="no gradient wrt uint"):
        mx.grad(ours, 1)(x, codes)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((40, 41), "do not add up to the weight's 80 rows"),
        ((80,), "are not 2 to 6 numbers of columns"),
        ((80, 0), "are not 2 to 6 numbers of columns"),
        ((10,) * 8, "are not 2 to 6 numbers of columns"),
    ],
)
def test_parts_that_cannot_be_are_refused(parts: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mlx_marlin.linears(activations(3, K), *weight(n=80), parts=parts)


def test_a_problems_parts_are_its_columns_and_have_no_other_operands() -> None:
    with pytest.raises(ValueError, match=r"parts=\(1, 2\) do not add up to n=4"):
        Problem(m=1, n=4, k=64, epilogue=Epilogue(parts=(1, 2)))
    with pytest.raises(ValueError, match="have no multiplier and no residual"):
        Epilogue(residual=True, parts=(1, 2))
    assert Epilogue(parts=(1, 2)).explain() == "y in parts of 1, 2"


def test_a_weight_in_a_batch_of_one_has_parts_too() -> None:
    x = mx.random.normal((3, 64), key=mx.random.key(1)).astype(mx.float16)
    native = mx.quantize(mx.random.normal((1, 96, 64), key=mx.random.key(2)))
    native = [each.astype(mx.float16) if i else each for i, each in enumerate(native)]

    results = mlx_marlin.linears(x, *native, parts=(32, 64))

    y = mlx_marlin.quantized_matmul(x, *native)
    assert [each.shape for each in results] == [(1, 3, 32), (1, 3, 64)]
    assert mx.allclose(mx.concatenate(results, axis=-1), y, rtol=1e-2, atol=1e-2)
