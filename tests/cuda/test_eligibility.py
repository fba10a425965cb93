"""Which calls CUDA kernels serve, and the reason where stock MLX does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_marlin
from mlx_marlin import state
from mlx_marlin.backends import devices, graph, selection
from mlx_marlin.backends.cuda import backend, cost
from mlx_marlin.backends.cuda import device as cuda_device
from mlx_marlin.lm.layer_conversion import default_layout
from mlx_marlin.products.packing import pack
from support.arguments import activations, weight
from support.choose import Choose
from support.cuda_launches import K, Model, N
from support.recorder import Recorder


def test_our_kernels_serve_few_rows_in_both_layouts(recorder: Recorder) -> None:
    x, native = activations(3, K, dtype=mx.float16), weight(N, K, dtype=mx.float16)

    for given in (native, (pack(*native),)):
        assert mlx_marlin.why_not(x, *given) is None
        y = mlx_marlin.quantized_matmul(x, *given)
        assert (y.shape, y.dtype) == ((3, N), mx.float16)

    plans = graph.plans_built()
    assert [plan.problem.layout for plan in plans] == ["mlx", "marlin"]
    assert {plan.kernel for plan in plans} == {"mma"}
    assert len(recorder.called) == sum(plan.dispatches for plan in plans)


def test_a_batch_of_weights_is_served(recorder: Recorder) -> None:
    x = activations(2, 3, K, dtype=mx.float16)
    native = weight(N, K, dtype=mx.float16, batch=2)

    y = mlx_marlin.quantized_matmul(x, *native)

    assert y.shape == (2, 3, N)
    assert graph.plans_built()[0].problem.batch == 2
    assert ("BATCHED", True) in recorder.called[0]["template"]


MANY_ROWS = {"mlx": backend.FEW_ROWS + 1, "marlin": 150}

STOCK: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, Any], str]] = {
    "float32": (
        lambda: (activations(3, K), *weight(N, K)),
        {},
        "multiply float16 and bfloat16, and dtype is float32",
    ),
    "transpose=False": (
        lambda: (
            activations(2, 3, N, dtype=mx.float16),
            pack(*weight(N, K, dtype=mx.float16, batch=2)),
        ),
        {"transpose": False},
        "our CUDA kernels multiply a batch by transposed weights only",
    ),
    "many rows": (
        lambda: (
            activations(MANY_ROWS["mlx"], K, dtype=mx.float16),
            *weight(N, K, dtype=mx.float16),
        ),
        {},
        f"{MANY_ROWS['mlx']} rows on NVIDIA H200",
    ),
    "groups of 16": (
        lambda: (
            activations(3, K, dtype=mx.float16),
            mlx_marlin.quantize(activations(N, K, dtype=mx.float16), group_size=16),
        ),
        {},
        "groups of 16 integers",
    ),
}


@pytest.mark.parametrize("kind", STOCK)
def test_stock_serves_the_rest_and_says_why(recorder: Recorder, kind: str) -> None:
    make, options, words = STOCK[kind]
    arguments = make()

    assert words in str(mlx_marlin.why_not(*arguments, **options))
    y = mlx_marlin.quantized_matmul(*arguments, **options)

    assert recorder.built == []
    assert mx.isfinite(y).all()
    assert mx.abs(y).max() > 0  # not the recorder's zeros


def test_an_old_device_is_stocks(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = replace(cuda_device.DEFAULT, name="an old device", arch="sm_75")
    monkeypatch.setattr(devices, "current", lambda *_: old)
    packed = pack(*weight(N, K, dtype=mx.float16))
    x = activations(3, K, dtype=mx.float16)

    needed = "need compute capability 8.0, an old device has less"
    assert needed in str(mlx_marlin.why_not(x, packed))
    assert mx.abs(mlx_marlin.quantized_matmul(x, packed)).max() > 0
    assert recorder.built == []
    linear = nn.Linear(K, N)
    assert default_layout(nn.QuantizedLinear.from_linear(linear)) == "mlx"


def test_a_call_on_the_cpu_is_stocks(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, native = activations(3, K, dtype=mx.float16), weight(N, K, dtype=mx.float16)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))

    assert mlx_marlin.why_not(x, *native) == "the call runs on the CPU"
    # Nor is a model packed then, which stock MLX would unpack at each call.
    assert default_layout(nn.QuantizedLinear.from_linear(nn.Linear(K, N))) == "mlx"


def test_what_a_layer_remembers_ends_with_what_decided_it(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = mlx_marlin.optimize(Model()).linear
    x = activations(3, K, dtype=mx.float16)

    def is_ours() -> bool:
        y = layer(x)
        assert mx.array_equal(y, layer(x))
        return not mx.abs(y).max()  # the recorder's zeros

    assert is_ours()
    del layer["bias"]
    assert is_ours()
    with monkeypatch.context() as patch:
        patch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
        assert not is_ours()
    assert is_ours()
    layer.set_dtype(mx.bfloat16)
    assert not is_ours()  # promoted to float32
    layer.set_dtype(mx.float16)
    assert is_ours()
    layer.invariant = True
    layer(x)
    assert graph.plans_built()[-1].problem.invariant
    monkeypatch.setenv(selection.ENVIRONMENT, "stock")
    layer.invariant = False
    assert is_ours()
    state.reset()
    assert not is_ours()


def test_who_forces_the_back_end_sees_it_run_for_any_rows(
    recorder: Recorder, backend: Choose
) -> None:
    backend("cuda")
    for layout, m in MANY_ROWS.items():
        native = weight(N, K, dtype=mx.float16)
        x = activations(m, K, dtype=mx.float16)
        recorder.called.clear()

        mlx_marlin.quantized_matmul(x, *native if layout == "mlx" else [pack(*native)])

        assert "FRAGMENTS_M" in dict(recorder.called[0]["template"])


@pytest.mark.parametrize(
    ("m", "columns", "transpose"), [(MANY_ROWS["marlin"], N, True), (3, K, False)]
)
def test_a_packed_weight_is_decoded_once(
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    m: int,
    columns: int,
    transpose: bool,
) -> None:
    monkeypatch.setattr(cost, "DECODE_SECONDS", 0.0)  # so small a weight is never
    x = activations(m, K if transpose else N, dtype=mx.float16)
    packed = pack(*weight(N, K, dtype=mx.float16))

    assert mlx_marlin.why_not(x, packed, transpose=transpose) is None
    y = mlx_marlin.quantized_matmul(x, packed, transpose=transpose)

    assert y.shape == (m, columns)
    (built,), (call,) = recorder.built, recorder.called
    assert (built["name"], built["shared_memory"]) == ("marlin_dequantize", 0)
    assert call["output_shapes"] == [(N, K)]
    assert call["output_dtypes"] == [mx.float16]


def test_invariance_is_refused_where_stock_would_serve(recorder: Recorder) -> None:
    x, native = activations(3, K), weight(N, K)

    with pytest.raises(ValueError, match="invariant=True cannot be kept"):
        mlx_marlin.linear(x, *native, invariant=True)

    half = activations(3, K, dtype=mx.float16), *weight(N, K, dtype=mx.float16)
    mlx_marlin.linear(*half, invariant=True)
    assert graph.plans_built()[-1].problem.invariant


def test_gradients_are_mlxs_or_from_a_decoded_weight(recorder: Recorder) -> None:
    x, native = activations(3, K, dtype=mx.float16), weight(N, K, dtype=mx.float16)

    def loss(product: Callable[..., mx.array], *w: Any) -> Callable[..., mx.array]:
        return lambda x: product(x, *w).sum()

    expected = mx.grad(loss(mx.quantized_matmul, *native))(x)
    gradient = mx.grad(loss(mlx_marlin.quantized_matmul, *native))(x)
    assert mx.allclose(gradient, expected, rtol=1e-2, atol=1e-2)
    assert {each["name"] for each in recorder.built} == {"marlin_mma"}

    mx.eval(mx.grad(loss(mlx_marlin.quantized_matmul, pack(*native)))(x))
    assert recorder.built[-1]["name"] == "marlin_dequantize"


def test_experts_have_a_kernel_but_in_float32(recorder: Recorder) -> None:
    chosen = mx.array([3, 1])
    w = weight(N, K, dtype=mx.float32, batch=4)
    x = activations(2, 1, K, dtype=mx.float32)

    y = mlx_marlin.gather_qmm(x, *w, rhs_indices=chosen)
    packed = mlx_marlin.gather_qmm(x, pack(*w), rhs_indices=chosen)

    expected = mx.gather_qmm(x, *w, rhs_indices=chosen)
    assert mx.array_equal(y, expected)
    assert mx.allclose(packed, expected, rtol=1e-2, atol=1e-2)
    assert recorder.built == []
    w = weight(N, K, dtype=mx.float16, batch=4)
    for stored in (w, (pack(*w),)):
        mlx_marlin.gather_qmm(x.astype(mx.float16), *stored, rhs_indices=chosen)
    assert [each["name"] for each in recorder.built] == ["marlin_gather"] * 2
