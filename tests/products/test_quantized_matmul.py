"""Our product answers every call as MLX's does, or better where MLX's is wrong."""

import re
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import mlx.core as mx
import pytest

import mlx_marlin
from mlx_marlin.backends import graph, selection
from mlx_marlin.planning.plan import Plan
from mlx_marlin.products.packing import pack
from support import oracles
from support.arguments import BIASES, PACKED, SCALES, K, N, W, X, activations, weight
from support.choose import Choose


def assert_right(y: mx.array, x: mx.array, native: tuple[mx.array, ...]) -> None:
    """Checks a product: MLX's own bits if stock serves it, else against float64."""
    stock = mx.quantized_matmul(x, *native)
    assert (y.shape, y.dtype) == (stock.shape, stock.dtype)
    if selection.backend() == "stock":
        assert mx.array_equal(y, stock)
    else:
        oracles.assert_close(y, stock, x, native, group_size=64, offset=64)


def assert_as_mlx(x: mx.array, native: tuple[mx.array, ...]) -> None:
    """Checks a call and the same one with a packed weight."""
    assert_right(mlx_marlin.quantized_matmul(x, *native), x, native)
    assert_right(mlx_marlin.quantized_matmul(x, pack(*native)), x, native)


X_AS: dict[str, Callable[[], mx.array]] = {
    "vector": lambda: activations(K),
    "one row": lambda: activations(1, K),
    "matrix": lambda: activations(9, K),
    "batch": lambda: activations(2, 3, K),
    "batch of batches": lambda: activations(2, 1, 3, K),
    "every second column": lambda: activations(3, 2 * K)[:, ::2],
    "transposed": lambda: activations(K, 3).T,
    "broadcast": lambda: mx.broadcast_to(activations(1, K), (4, K)),
    "backwards": lambda: activations(3, K)[::-1],
    "swapped batch": lambda: activations(3, 2, K).swapaxes(0, 1),
    "some rows": lambda: activations(5, 4, K)[1:, 2:3],
    "odd offset": lambda: activations(3 * K + 1)[1:].reshape(3, K),
    "int32": lambda: mx.arange(3 * K).reshape(3, K) % 7,
    "uint8": lambda: mx.arange(3 * K).reshape(3, K).astype(mx.uint8),
    "bool": lambda: activations(3, K) > 0,
}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("shape", [(0, K), (2, 0, K)])
@pytest.mark.usefixtures("served")
def test_an_empty_product_has_the_dtype_of_stocks(
    dtype: mx.Dtype, shape: tuple[int, ...]
) -> None:
    x, (w, scales, biases) = mx.zeros(shape, dtype), weight(dtype=dtype)
    stock = mx.zeros((*shape[:-1], N), dtype)
    finishes: list[dict[str, Any]] = [{}, {"bias": mx.ones((N,), dtype)}]
    finishes += [{"activation": "silu"}, {"multiply": stock}, {"residual": stock}]

    answers = [
        mlx_marlin.quantized_matmul(x, w, scales, biases),
        mlx_marlin.quantized_matmul(x, pack(w, scales, biases)),
        *[mlx_marlin.linear(x, w, scales, biases, **each) for each in finishes],
    ]

    assert {(y.shape, y.dtype) for y in answers} == {(stock.shape, dtype)}


@pytest.mark.parametrize("kind", X_AS)
@pytest.mark.usefixtures("served")
def test_any_x_is_multiplied_as_mlx_does(kind: str) -> None:
    assert_as_mlx(X_AS[kind](), weight())


DTYPES = [mx.float16, mx.bfloat16, mx.float32]


@pytest.mark.parametrize("biases_dtype", DTYPES)
@pytest.mark.parametrize("scales_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [*DTYPES, mx.int16])
@pytest.mark.usefixtures("served_by")
def test_any_mix_of_dtypes_gives_mlxs_dtype(
    dtype: mx.Dtype, scales_dtype: mx.Dtype, biases_dtype: mx.Dtype
) -> None:
    w, scales, biases = weight()
    x = (4 * activations(3, K)).astype(dtype)

    assert_as_mlx(x, (w, scales.astype(scales_dtype), biases.astype(biases_dtype)))


@pytest.mark.parametrize("n", [1, 7, 33])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.usefixtures("served_by")
def test_small_and_ragged_weights_are_right(n: int, group_size: int) -> None:
    native = weight(n, group_size, group_size=group_size)
    x = activations(2, group_size)

    y = mlx_marlin.quantized_matmul(x, *native, group_size=group_size)

    stock = mx.quantized_matmul(x, *native, group_size=group_size)
    oracles.assert_close(y, stock, x, native, group_size=group_size)


NO_SUM: dict[str, tuple[Callable[[], tuple[mx.array, ...]], tuple[int, ...]]] = {
    "no rows": (lambda: (activations(0, K), *weight()), (0, N)),
    "no rows, batched": (lambda: (activations(2, 0, K), *weight()), (2, 0, N)),
    "empty batch": (lambda: (activations(0, 2, K), *weight()), (0, 2, N)),
    "no rows, many weights": (lambda: (activations(0, K), *weight(batch=2)), (2, 0, N)),
    "empty batch, many weights": (
        lambda: (activations(0, 2, 1, K), *weight(batch=2)),
        (0, 2, 1, N),
    ),
    "no weights": (
        lambda: (activations(3, K), *(each[:0] for each in weight(batch=2))),
        (0, 3, N),
    ),
    "no columns": (
        lambda: (activations(3, K), *(each[:0] for each in weight())),
        (3, 0),
    ),
    "no k": (lambda: (activations(3, 0), *(each[:, :0] for each in weight())), (3, N)),
}


@pytest.mark.parametrize("kind", NO_SUM)
@pytest.mark.parametrize("dtype", [mx.float16, mx.int32])
@pytest.mark.usefixtures("served_by")
def test_where_nothing_is_added_up_the_answer_is_empty_or_zero(
    kind: str, dtype: mx.Dtype
) -> None:
    make, shape = NO_SUM[kind]
    x, *native = make()

    y = mlx_marlin.quantized_matmul(x.astype(dtype), *native)

    assert (y.shape, y.dtype) == (shape, mx.float32)
    assert not y.any()
    reason = mlx_marlin.why_not(x.astype(dtype), *native)
    assert reason == "there is nothing to add up"


def test_no_rows_of_x_and_a_packed_weight_are_an_empty_answer(ran: list[Plan]) -> None:
    packed = pack(*weight())

    assert mlx_marlin.quantized_matmul(activations(2, 0, K), packed).shape == (2, 0, N)
    assert ran == []


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.usefixtures("served_by")
def test_a_batch_of_weights_meets_each_row_and_no_vector(transpose: bool) -> None:
    # MLX's own answer is that of the first weight only, with too few dimensions.
    weights = weight(batch=2)
    x = activations(3, K if transpose else N)

    y = mlx_marlin.quantized_matmul(x, *weights, transpose=transpose)

    each = [
        mx.quantized_matmul(x, *(part[i] for part in weights), transpose=transpose)
        for i in range(2)
    ]
    assert mx.allclose(y, mx.stack(each), atol=1e-4)
    with pytest.raises(ValueError, match=r"for a batch \(2,\) of weights"):
        mlx_marlin.quantized_matmul(x[0], *weights, transpose=transpose)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"group_size": 64},
        {"bits": 4, "group_size": 64, "mode": "affine", "transpose": True},
        {"scales": None, "biases": None, "stream": mx.cpu},
    ],
)
@pytest.mark.usefixtures("served_by")
def test_a_packed_weight_stands_in_for_its_three_arrays(
    options: dict[str, Any],
) -> None:
    y = mlx_marlin.quantized_matmul(X, PACKED, **options)

    assert_right(y, X, (W, SCALES, BIASES))


def test_the_signature_is_mlxs_but_for_scales() -> None:
    doc = str(mx.quantized_matmul.__doc__).strip()
    stated = re.match(r"quantized_matmul\((.*)\) -> array", doc)
    assert stated is not None
    outside_brackets = re.sub(r"\[[^]]*\]", "", stated[1])
    theirs = [each.split(":")[0].strip() for each in outside_brackets.split(",")]

    parameters = [*signature(mlx_marlin.quantized_matmul).parameters.values()]

    ours = [each.name for each in parameters]
    assert [*ours[:2], "/", *ours[2:8], "*", *ours[8:]] == theirs
    kinds = [Parameter.POSITIONAL_ONLY] * 2 + [Parameter.POSITIONAL_OR_KEYWORD] * 6
    assert [each.kind for each in parameters] == [*kinds, Parameter.KEYWORD_ONLY]
    defaults = [each.default for each in parameters[2:]]
    assert defaults == [None, None, True, None, None, "affine", None]
    asked = signature(mlx_marlin.why_not).parameters.values()
    assert [*asked] == parameters


@pytest.mark.usefixtures("served_by")
def test_x_and_w_are_positional_only_and_the_rest_may_be_named() -> None:
    y = mlx_marlin.quantized_matmul(
        X, W, biases=BIASES, scales=SCALES, mode="affine", bits=4, group_size=64
    )

    assert mx.allclose(y, mx.quantized_matmul(X, W, SCALES, BIASES), atol=1e-4)
    for call in (mlx_marlin.quantized_matmul, mx.quantized_matmul):
        with pytest.raises(TypeError):
            call(X, w=W, scales=SCALES, biases=BIASES)  # type: ignore[call-overload]


@pytest.mark.parametrize("arguments", [(W, SCALES, BIASES), (PACKED,)])
def test_the_product_runs_on_the_callers_stream(
    backend: Choose, monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...]
) -> None:
    backend("emulator")
    streams = []

    def product(plan: Plan) -> graph.Product:
        def run(x: mx.array, *_: mx.array) -> mx.array:
            streams.append(mx.default_stream(mx.cpu))
            return mx.zeros((plan.problem.m, plan.problem.n), x.dtype)

        return run

    monkeypatch.setattr(graph, "product", product)
    own, usual = mx.new_stream(mx.cpu), mx.default_stream(mx.cpu)

    mlx_marlin.quantized_matmul(X, *arguments, stream=own)
    mlx_marlin.quantized_matmul(X, *arguments, stream=mx.cpu)
    mlx_marlin.quantized_matmul(X, *arguments)

    assert streams == [own, usual, usual]
