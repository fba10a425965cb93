"""A traced graph has no derivatives, and still there are all that are asked for."""

from collections.abc import Callable
from io import StringIO
from threading import Thread

import mlx.core as mx
import pytest

from mlx_marlin.products import autodiff
from mlx_marlin.products.autodiff import are_without_vjp, differentiable, without_vjp

X, W = mx.array([3.0, 1.0, 2.0]), mx.array([2.0, 2.0, 4.0])
Function = Callable[..., mx.array]


class Opaque:
    """A product whose own operations have another gradient than the one it is given."""

    def __init__(self) -> None:
        self.traces = 0
        self.run: Function = autodiff.traced(self.function, self.put)

    def put(self, function: Function) -> None:
        self.run = function

    def function(self, x: mx.array, w: mx.array, none: None = None) -> mx.array:
        self.traces += 1
        product = differentiable(
            lambda x, w: mx.sort(mx.stop_gradient(x)) * w, lambda x, w: 10 * x * w
        )
        return product(x, w)

    def __call__(self, x: mx.array, w: mx.array) -> mx.array:
        return self.run(x, w, None)


def nodes(y: mx.array) -> str:
    text = StringIO()
    mx.export_to_dot(text, y)
    return text.getvalue()


@pytest.fixture
def opaque() -> Opaque:
    return Opaque()


def has_derivatives(opaque: Opaque) -> bool:
    y = opaque(X, W)
    found = "CustomTransforms" in nodes(y)
    assert mx.array_equal(y, mx.sort(X) * W)
    return found


def test_from_the_second_call_on_a_graph_has_no_derivatives(opaque: Opaque) -> None:
    assert has_derivatives(opaque)
    assert not has_derivatives(opaque)
    traces = opaque.traces
    assert not has_derivatives(opaque)
    assert opaque.traces == traces == 2
    assert not are_without_vjp()


def test_so_in_every_stream(opaque: Opaque) -> None:
    other = mx.new_stream(mx.default_device())
    has_derivatives(opaque)
    with mx.stream(other):
        assert has_derivatives(opaque)
        assert not has_derivatives(opaque)
    traces = opaque.traces
    assert not has_derivatives(opaque)
    assert opaque.traces == traces


@pytest.mark.parametrize("calls", [0, 1, 2])
@pytest.mark.parametrize("compiled", ["neither", "inside", "outside"])
def test_gradients_are_there_whenever_asked_for(
    opaque: Opaque, calls: int, compiled: str
) -> None:
    for _ in range(calls):
        opaque(X, W)

    def loss(x: mx.array) -> mx.array:
        return opaque(x, W).sum()

    gradient = mx.grad(mx.compile(loss) if compiled == "inside" else loss)
    gradient = mx.compile(gradient) if compiled == "outside" else gradient

    assert mx.array_equal(gradient(X), 10 * W)
    assert mx.array_equal(gradient(X), 10 * W)
    has_derivatives(opaque)
    assert not has_derivatives(opaque)


def test_tangents_are_too(opaque: Opaque) -> None:
    opaque(X, W)

    _, tangents = mx.jvp(lambda x: opaque(x, W), [X], [mx.ones(3)])

    assert mx.array_equal(tangents[0], 10 * W)


def test_another_thread_leaves_nothing_out() -> None:
    seen: list[bool] = []

    with without_vjp():
        thread = Thread(target=lambda: seen.append(are_without_vjp()))
        thread.start()
        thread.join()
        assert are_without_vjp()

    assert seen == [False]


def test_another_thread_has_graphs_of_its_own(opaque: Opaque) -> None:
    seen: list[bool] = []
    has_derivatives(opaque)

    def work() -> None:
        seen.extend(has_derivatives(opaque) for _ in range(3))

    thread = Thread(target=work)
    thread.start()
    thread.join()

    assert seen == [True, False, False]
    has_derivatives(opaque)  # still right
    assert mx.array_equal(mx.grad(lambda x: opaque(x, W).sum())(X), 10 * W)


def test_graphs_of_a_traced_caller_have_none_either(opaque: Opaque) -> None:
    box: list[Function] = []
    run = autodiff.traced(lambda x: opaque(x, W) + 1, box.append)

    assert "CustomTransforms" in nodes(run(X))
    y = box[0](X)

    assert "CustomTransforms" not in nodes(y)
    assert mx.array_equal(y, mx.sort(X) * W + 1)
    gradient = mx.grad(lambda x: box[0](x).sum())(X)
    assert mx.array_equal(gradient, 10 * W)


def test_graphs_without_derivatives_are_not_made_forever(
    opaque: Opaque, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autodiff, "MOST_GRAPHS", 1)
    has_derivatives(opaque)
    with mx.stream(mx.new_stream(mx.default_device())):
        assert has_derivatives(opaque)
        assert has_derivatives(opaque)
    assert not has_derivatives(opaque)


def test_compiled_gradients_of_integers_raise_only_where_they_are_asked_for() -> None:
    def double(codes: mx.array, x: mx.array, bytes_: mx.array) -> mx.array:
        return codes.astype(mx.float32) * x * bytes_.astype(mx.float32)

    product = differentiable(lambda *arrays: mx.stop_gradient(double(*arrays)), double)
    arrays = W.astype(mx.uint32), X, W.astype(mx.uint8)

    def of(*arrays: mx.array) -> mx.array:
        return product(*arrays).sum()

    found = mx.compile(mx.grad(of, argnums=1))(*arrays)

    assert mx.array_equal(found, W * W)
    for argnums in (0, 2, (0, 1)):
        with pytest.raises(ValueError, match="no gradient wrt uint"):
            mx.compile(mx.grad(of, argnums=argnums))(*arrays)
