"""MLX's transforms see our product as they see MLX's own: never a silent zero."""

import io
from collections.abc import Callable
from dataclasses import replace
from threading import Thread

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_marlin
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.products import autodiff
from mlx_marlin.products.autodiff import differentiable
from mlx_marlin.products.packing import pack
from support.arguments import packed_unread

K, N = 128, 40
W, SCALES, BIASES = mx.quantize(mx.random.normal((N, K), key=mx.random.key(0)))
PACKED = packed_unread(W, SCALES, BIASES)
X = mx.random.normal((2, 3, K), key=mx.random.key(1))
TARGET = mx.random.normal((2, 3, N), key=mx.random.key(2))

Product = Callable[..., mx.array]


@pytest.fixture(params=["ran", "kernels"], autouse=True)
def _ours(request: pytest.FixtureRequest) -> None:
    """Serves by NumPy in the kernels' place, then by the kernels."""
    request.getfixturevalue(request.param)
    assert mlx_marlin.why_not(X, W, SCALES, BIASES) is None


def loss(product: Product) -> Callable[..., mx.array]:
    """Returns a loss that is not linear in any argument of a product."""

    def of(x: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return ((product(x, W, scales, biases) - TARGET) ** 2).mean()

    return of


def assert_close(
    actual: tuple[mx.array, ...], expected: tuple[mx.array, ...], rtol: float = 1e-4
) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert mx.abs(theirs).max() > 0
        error = mx.abs(ours.astype(mx.float32) - theirs.astype(mx.float32)).max()
        assert error <= rtol * mx.abs(theirs.astype(mx.float32)).max()


def gradients(product: Product, *arguments: mx.array) -> tuple[mx.array, ...]:
    value, found = mx.value_and_grad(loss(product), argnums=(0, 1, 2))(*arguments)
    return value, *found


@pytest.mark.parametrize("x", [X, X[1], X[1, :1]], ids=["batch", "matrix", "row"])
def test_gradients_of_x_scales_and_biases_are_mlxs(x: mx.array) -> None:
    ours = gradients(mlx_marlin.quantized_matmul, x, SCALES, BIASES)

    assert_close(ours, gradients(mx.quantized_matmul, x, SCALES, BIASES))


def test_a_vector_has_the_gradients_of_its_row() -> None:
    # MLX itself cannot: "start_axis must be less than or equal to end_axis".
    value, dx, *rest = gradients(mlx_marlin.quantized_matmul, X[1, 0], SCALES, BIASES)

    row = gradients(mx.quantized_matmul, X[1, :1], SCALES, BIASES)
    assert_close((value, dx[None], *rest), row)


def test_gradients_keep_the_dtypes_that_mlx_gives_them() -> None:
    arguments = (
        X.astype(mx.bfloat16),
        SCALES.astype(mx.float16),
        BIASES.astype(mx.float32),
    )

    ours = gradients(mlx_marlin.quantized_matmul, *arguments)

    assert_close(ours, gradients(mx.quantized_matmul, *arguments), rtol=0.02)


def test_the_gradient_of_a_gradient_is_mlxs() -> None:
    def norm(product: Product) -> mx.array:
        first = mx.grad(loss(product))
        return mx.grad(lambda x: (first(x, SCALES, BIASES) ** 2).sum())(X)

    assert_close(
        (norm(mlx_marlin.quantized_matmul),), (norm(mx.quantized_matmul),), rtol=1e-3
    )


def test_a_checkpoint_gives_the_same_gradients() -> None:
    kept = mx.grad(loss(mlx_marlin.quantized_matmul), argnums=(0, 1, 2))
    again = mx.grad(mx.checkpoint(loss(mlx_marlin.quantized_matmul)), argnums=(0, 1, 2))

    assert_close(again(X, SCALES, BIASES), kept(X, SCALES, BIASES))


def test_a_packed_weight_has_mlxs_gradients_in_its_own_order() -> None:
    def of(x: mx.array, pairs: mx.array) -> mx.array:
        weight = replace(PACKED, scales=pairs)
        return ((mlx_marlin.quantized_matmul(x, weight) - TARGET) ** 2).mean()

    dx, dpairs = mx.grad(of, argnums=(0, 1))(X, PACKED.scales)

    _, *theirs = gradients(mx.quantized_matmul, X, SCALES, BIASES)
    assert_close((dx, dpairs), (theirs[0], pack(W, *theirs[1:]).scales))


RAISES = pytest.raises(ValueError, match=r"no gradient wrt uint32 .*codes")


def test_a_gradient_of_codes_raises_as_it_does_for_mlx() -> None:
    with pytest.raises(RuntimeError, match="no gradient wrt the quantized weights"):
        mx.grad(lambda w: mx.quantized_matmul(X, w, SCALES, BIASES).sum())(W)

    def plain(w: mx.array, x: mx.array) -> mx.array:
        return mlx_marlin.quantized_matmul(x, w, SCALES, BIASES).sum()

    def packed(words: mx.array, x: mx.array) -> mx.array:
        return mlx_marlin.quantized_matmul(x, replace(PACKED, words=words)).sum()

    def finished(w: mx.array, x: mx.array) -> mx.array:
        return mlx_marlin.linear(x, w, SCALES, BIASES, bias=mx.zeros(N)).sum()

    for of in (plain, packed, finished):
        codes = PACKED.words if of is packed else W
        for argnum in (0, (0, 1), (1, 0)):
            with RAISES:
                mx.grad(of, argnum)(codes, X)
        assert mx.abs(mx.grad(of, 1)(codes, X)).max() > 0
    with RAISES:
        mx.vjp(plain, [W, X], [mx.array(1.0)])


def test_the_tangent_along_x_is_mlxs() -> None:
    along = mx.random.normal(X.shape, key=mx.random.key(3))

    def tangent(product: Product) -> mx.array:
        _, tangents = mx.jvp(lambda x: product(x, W, SCALES, BIASES), [X], [along])
        return tangents[0]

    assert_close(
        (tangent(mlx_marlin.quantized_matmul),), (tangent(mx.quantized_matmul),)
    )


def test_tangents_that_mlx_does_not_have_raise_as_they_do_there() -> None:
    for product in (mx.quantized_matmul, mlx_marlin.quantized_matmul):
        with pytest.raises(RuntimeError, match="No JVP wrt the quantized matrix"):
            mx.jvp(lambda s, f=product: f(X, W, s, BIASES), [SCALES], [SCALES])


def test_vmap_raises_as_it_does_for_mlx() -> None:
    for product in (mx.quantized_matmul, mlx_marlin.quantized_matmul):
        with pytest.raises((RuntimeError, ValueError)):
            mx.eval(mx.vmap(lambda x, f=product: f(x, W, SCALES, BIASES))(X))


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_an_adapter_trains_through_a_layer_of_ours(layout: str) -> None:
    stock = nn.QuantizedLinear(K, N)
    ours = MarlinLinear.from_quantized(stock, layout=layout)

    def trained(layer: nn.Module) -> tuple[mx.array, ...]:
        before = nn.Linear(K, K)
        before.update({"weight": mx.eye(K), "bias": mx.zeros(K)})
        model = nn.Sequential(before, layer)

        def error(x: mx.array) -> mx.array:
            return ((model(x) - TARGET) ** 2).mean()

        value, found = nn.value_and_grad(model, error)(X)
        first, second = found["layers"]
        assert second == {}
        return value, first["weight"], first["bias"]

    assert_close(trained(ours), trained(stock))


def test_scales_that_are_unfrozen_train_as_in_mlxs_layer() -> None:
    stock = nn.QuantizedLinear(K, N)
    ours = MarlinLinear.from_quantized(stock)

    def trained(layer: nn.Module) -> tuple[mx.array, ...]:
        layer.unfreeze(keys=["scales", "biases"])
        value, found = nn.value_and_grad(layer, lambda x: (layer(x) ** 2).mean())(X)
        assert sorted(found) == ["biases", "scales"]
        return value, found["scales"], found["biases"]

    assert_close(trained(ours), trained(stock))


def test_no_rows_have_an_empty_gradient() -> None:
    found = mx.grad(lambda x: mlx_marlin.quantized_matmul(x, W, SCALES, BIASES).sum())(
        mx.zeros((0, K))
    )

    assert found.shape == (0, K)


TWOS = mx.full(X.shape, 2.0)
"""An array of the same shape: MLX does not compile what captures its own input."""


@pytest.fixture
def served() -> tuple[Callable[..., mx.array], list[bool]]:
    """Returns a product, and whether each call of it has had derivatives."""
    with_derivatives: list[bool] = []

    def ours(x: mx.array, w: mx.array) -> mx.array:
        return mx.stop_gradient(x * w)

    product = differentiable(ours, lambda x, w: x * w)

    def noted(x: mx.array, w: mx.array) -> mx.array:
        y = product(x, w)
        graph = io.StringIO()
        mx.export_to_dot(graph, y)
        with_derivatives.append("CustomTransforms" in graph.getvalue())
        return y

    noted(X, X)  # the first of a kind may have them
    with_derivatives.clear()
    return noted, with_derivatives


def test_a_product_has_derivatives_only_in_transformations(
    served: tuple[Callable[..., mx.array], list[bool]],
) -> None:
    product, with_derivatives = served

    def loss(x: mx.array) -> mx.array:
        return product(x, TWOS).sum()

    for shape in ((2, 3, K), (5, 1, K)):
        product(mx.zeros(shape), mx.zeros(shape))
    assert with_derivatives == [False, False]
    with_derivatives.clear()

    for transformed in (
        mx.grad(loss),
        mx.grad(lambda x: loss(x * 2 + 1)),
        mx.grad(mx.checkpoint(loss)),
        mx.grad(lambda x: mx.grad(loss)(x).sum()),
        lambda x: mx.jvp(loss, [x], [x]),
        lambda x: mx.vjp(loss, [x], [mx.array(1.0)]),
        mx.compile(loss),
        mx.grad(mx.compile(loss)),
        mx.compile(mx.grad(loss)),
    ):
        transformed(X)
        assert with_derivatives
        assert all(with_derivatives)
        with_derivatives.clear()

    # Nothing here depends on what is differentiated.
    mx.grad(lambda x: x.sum() + product(TWOS, TWOS).sum())(X)
    assert with_derivatives == [False]


def test_each_product_has_derivatives_where_compile_does_not_tell(
    served: tuple[Callable[..., mx.array], list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    product, with_derivatives = served
    assert autodiff._compile_detects()
    monkeypatch.setattr(autodiff, "_noted", lambda *_: ())
    monkeypatch.setattr(
        autodiff, "_compile_detects", autodiff._compile_detects.__wrapped__
    )
    assert not autodiff._compile_detects()

    product(X, X)

    assert with_derivatives == [True]
    assert mx.array_equal(mx.grad(lambda x: product(x, X).sum())(X), X)


def test_gradients_are_there_in_another_thread_and_without_compile(
    request: pytest.FixtureRequest,
) -> None:
    product = differentiable(lambda x, w: mx.stop_gradient(x * w), lambda x, w: x * w)
    right: list[bool] = []

    def differentiate() -> None:
        for _ in range(2):
            product(X, X)
            gradient = mx.grad(lambda x: product(x, X).sum())(X)
            right.append(mx.array_equal(gradient, X).item())

    thread = Thread(target=differentiate)
    thread.start()
    thread.join()
    request.getfixturevalue("unfused")
    differentiate()
    assert right == [True] * 4


def test_a_gradient_of_the_gradient_of_x_reaches_packed_scales() -> None:
    """It is taken by kernels, which have no derivatives of their own."""

    def steepness(of: Callable[[mx.array], mx.array]) -> mx.array:
        return (mx.grad(lambda x: (of(x) * TARGET).sum())(X) ** 2).sum()

    def packed(scales: mx.array) -> mx.array:
        weight = replace(PACKED, scales=scales)
        return steepness(lambda x: mlx_marlin.quantized_matmul(x, weight))

    def native(scales: mx.array, biases: mx.array) -> mx.array:
        return steepness(lambda x: mx.quantized_matmul(x, W, scales, biases))

    value, found = mx.value_and_grad(packed)(PACKED.scales)
    expected, theirs = mx.value_and_grad(native, argnums=(0, 1))(SCALES, BIASES)
    as_packed = pack(W, *theirs)

    assert_close((value,), (expected,))
    assert_close((found,), (as_packed.scales,))


def test_another_thread_does_not_call_a_compiled_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a process may abort when it ends (MLX 0.32.4)."""

    def fails(*_: mx.array) -> None:
        raise AssertionError

    monkeypatch.setattr(autodiff, "_noted", fails)
    found: list[bool] = []
    thread = Thread(target=lambda: found.append(autodiff._are_transformed(X)))
    thread.start()
    thread.join()
    assert found == [True]
