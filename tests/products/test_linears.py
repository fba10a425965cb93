"""Weights that share x are multiplied in one launch, each into an array of its own."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

import mlx_marlin
from metal_emulator import emulated
from mlx_marlin.backends import graph
from mlx_marlin.planning.epilogue import MOST_PARTS, Epilogue
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import Reduction
from mlx_marlin.products.packing import pack
from support import drawn_arrays, epilogues, oracles, strategies
from support.arguments import K, activations, weight
from support.choose import Choose
from support.profiles import drawn, sampled
from support.trace_mode import emulator_only


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
