"""Who serves a call, our kernels or stock MLX, and the reason given."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_marlin
from mlx_marlin import state
from mlx_marlin.backends import devices, graph, measured_results, planner, selection
from mlx_marlin.backends.metal import backend as metal
from mlx_marlin.backends.metal import device
from mlx_marlin.layers.guarded_parameters import GuardedParameters
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.planning.epilogue import PLAIN, Epilogue, Rotation
from mlx_marlin.planning.measurement import Measured
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products import dispatch, serving
from mlx_marlin.products.packing import pack
from mlx_marlin.products.request import Request
from mlx_marlin.weights.packed_weight import PackedWeight
from support.arguments import BIASES, PACKED, SCALES, K, N, W, X, activations, weight
from support.choose import Choose
from support.format_cases import OF_MLX, any_weight
from support.profiles import sampled


def test_our_kernels_serve_what_is_theirs(ran: list[Plan]) -> None:
    x, native = activations(2, 3, K, dtype=mx.float16), weight(dtype=mx.float16)
    packed = pack(*native)

    for arguments in (native, (packed,)):
        assert mlx_marlin.why_not(x, *arguments) is None
        mlx_marlin.quantized_matmul(x, *arguments)

    problems = [plan.problem for plan in ran]
    assert [each.layout for each in problems] == ["mlx", "marlin"]
    assert {(each.m, each.n, each.k) for each in problems} == {(6, N, K)}
    assert {(each.dtype, each.scale_dtype) for each in problems} == {("float16",) * 2}


def test_a_kind_of_call_is_decided_once(
    ran: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, native = activations(3, K), weight()
    mlx_marlin.quantized_matmul(x, *native)
    monkeypatch.setattr(graph, "product", None)

    mlx_marlin.quantized_matmul(x + 1, *native)

    assert len(ran) == 2


# What goes to stock MLX, and what the reason must say.
STOCK: dict[str, tuple[Callable[[], tuple[mx.array, ...]], dict[str, Any], str]] = {
    "a k that nvfp4 cannot have": (
        lambda: (activations(3, 80), *weight(k=80, mode="nvfp4")),
        {"mode": "nvfp4"},
        "k=80 is not a multiple of 64",
    ),
    "transpose=False": (
        lambda: (activations(3, N), *weight()),
        {"transpose": False},
        "transposed weight only",
    ),
    "transpose=False, a batch": (
        lambda: (activations(2, 3, N), *weight(batch=2)),
        {"transpose": False},
        "transposed weight only",
    ),
}


@pytest.mark.parametrize(("mode", "bits", "group_size"), OF_MLX)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_every_scheme_of_mlx_is_ours(
    backend: Choose, mode: str, bits: int, group_size: int, layout: str
) -> None:
    made = any_weight(mode, bits, group_size, N, K, dtype="float16", seed=1)
    options: dict[str, Any] = {**made.options}
    arrays: tuple[Any, ...] = made.native
    if layout == "marlin":
        arrays, options = (pack(*made.native, **options),), {}
    backend("metal")

    assert mlx_marlin.why_not(activations(3, K), *arrays, **options) is None

    (plan,) = graph.plans_built()
    asked = plan.problem
    assert (asked.mode, asked.bits, asked.group_size) == (mode, bits, group_size)
    assert asked.layout == layout


@pytest.mark.parametrize("kind", STOCK)
def test_stock_serves_what_is_not_ours_and_says_why(ran: list[Plan], kind: str) -> None:
    make, options, words = STOCK[kind]
    arguments = make()

    reason = mlx_marlin.why_not(*arguments, **options)
    y = mlx_marlin.quantized_matmul(*arguments, **options)

    assert reason is not None
    assert words in reason
    assert ran == []
    expected = mx.quantized_matmul(*arguments, **options)
    assert y.dtype == expected.dtype
    assert mx.array_equal(y, expected)


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("arguments", ["native", "packed"])
def test_without_a_back_end_stock_serves_everything(arguments: str) -> None:
    x, native = activations(3, K), weight()
    weights = native if arguments == "native" else (pack(*native),)

    reason = mlx_marlin.why_not(x, *weights)

    assert reason is not None
    assert "MLX_MARLIN_BACKEND" in reason
    y = mlx_marlin.quantized_matmul(x, *weights)
    assert mx.array_equal(y, mx.quantized_matmul(x, *native))


@pytest.mark.parametrize("group_size", [16, 256])
def test_a_group_size_that_mlx_refuses_when_it_runs_is_not_ours(
    ran: list[Plan], group_size: int
) -> None:
    words, scales = mx.zeros((8, 32), mx.uint32), mx.ones((8, 256 // group_size))
    arguments = (activations(2, 256), words, scales, scales)

    reason = mlx_marlin.why_not(*arguments, group_size=group_size)
    y = mlx_marlin.quantized_matmul(*arguments, group_size=group_size)

    assert f"group_size={group_size} is not one of" in str(reason)
    with pytest.raises(RuntimeError, match="group size must be 32, 64 or 128"):
        mx.eval(y)
    assert ran == []


@pytest.mark.parametrize("transpose", [True, False])
def test_a_packed_weight_is_unpacked_for_what_is_not_ours(
    on_a_mac: Callable[..., None], transpose: bool
) -> None:
    on_a_mac("M3 Max", mx.cpu)
    x = activations(3, K if transpose else N)

    y = mlx_marlin.quantized_matmul(x, PACKED, transpose=transpose)

    expected = mx.quantized_matmul(x, W, SCALES, BIASES, transpose=transpose)
    assert mx.array_equal(y, expected)
    for stored in ((PACKED,), (W, SCALES, BIASES)):
        reason = mlx_marlin.why_not(x, *stored, transpose=transpose)
        assert reason == "the call runs on the CPU"


@pytest.fixture
def on_a_mac(
    backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, mx.DeviceType], None]:
    """Makes Metal seem available, on a chip, with a default device."""

    def pretend(chip: str, default: mx.DeviceType) -> None:
        backend(None)
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(default))
        monkeypatch.setattr(devices, "current", lambda *_: device.Device.named(chip))

    return pretend


@cache
def large_weight() -> tuple[tuple[mx.array, ...], PackedWeight]:
    native = weight(4096, 4096, dtype=mx.float16)
    return native, pack(*native)


@sampled(2)
@pytest.mark.parametrize(
    ("chip", "rows", "words"),
    [
        ("M3 Max", 1, "by the table of Apple M3 Max our kernels serve"),
        ("M3 Max", 8, None),
        ("M4 Pro", 30, "not measured here"),
        ("M3 Max", 48, None),
        ("M4 Pro", 64, "not measured here"),
        ("M1 Max", 48, None),
        ("M1", 64, "not measured here"),
        ("M5", 8, None),
        ("M5 Max", 1, "not measured here"),
    ],
)
def test_on_a_mac_stock_serves_what_it_serves_as_fast(
    on_a_mac: Callable[..., None], chip: str, rows: int, words: str | None
) -> None:
    native, packed = large_weight()
    x = activations(rows, 4096, dtype=mx.float16)
    on_a_mac(chip, mx.gpu)

    reason = mlx_marlin.why_not(x, *native)

    assert (reason is None) if words is None else (words in str(reason))
    # Unpacking for every call would cost more than any kernel of ours.
    assert mlx_marlin.why_not(x, packed) is None


@pytest.mark.parametrize("chip", ["M1", "M3 Max", "M5"])
@pytest.mark.parametrize(("mode", "bits", "group_size"), OF_MLX)
def test_on_a_mac_every_scheme_of_mlx_has_its_server(
    on_a_mac: Callable[..., None], mode: str, bits: int, group_size: int, chip: str
) -> None:
    made = any_weight(mode, bits, group_size, 64, 128, dtype="float16", seed=1)
    options: dict[str, Any] = {**made.options}
    packed = pack(*made.native, **options)
    on_a_mac(chip, mx.gpu)

    for rows in (1, 8, 30, 100):
        x = activations(rows, 128, dtype=mx.float16)
        reason = mlx_marlin.why_not(x, *made.native, **options)
        assert reason is None or "table" in reason
        assert mlx_marlin.why_not(x, packed) is None


def test_who_forces_a_back_end_gets_it_for_every_size(
    backend: Choose, on_a_mac: Callable[..., None]
) -> None:
    on_a_mac("M5", mx.gpu)
    backend("metal")

    for rows in (1, 16, 30, 100):
        assert mlx_marlin.why_not(activations(rows, K), *weight()) is None


@pytest.mark.usefixtures("ran")
def test_no_more_calls_are_kept_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MOST_CALLS", 2)
    x, native = activations(4, K), weight()
    packed = pack(*native)
    layer = mlx_marlin.MarlinLinear(K, N, False, layout="marlin")

    for m in (1, 2, 3, 4, 1):
        for y in (
            mlx_marlin.quantized_matmul(x[:m], *native),
            mlx_marlin.quantized_matmul(x[:m], packed),
            layer(x[:m]),
            mlx_marlin.linear(x[:m], packed, bias=mx.zeros((N,))),
        ):
            assert y.shape == (m, N)

    assert 0 < len(dispatch.calls) <= 2


def test_after_a_reset_the_back_end_is_chosen_again(backend: Choose) -> None:
    backend("stock")
    assert mlx_marlin.why_not(X, W, SCALES, BIASES) is not None

    backend("metal")

    assert mlx_marlin.why_not(X, W, SCALES, BIASES) is None
    assert [plan.problem.m for plan in graph.plans_built()] == [3]
    state.reset()
    assert graph.plans_built() == []


def test_a_layer_that_begins_to_remember_does_not_disturb_a_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in another thread, while decisions are dropped."""
    layers = [MarlinLinear.from_quantized(nn.QuantizedLinear(64, 32)) for _ in range(3)]
    late = MarlinLinear.from_quantized(nn.QuantizedLinear(64, 32))
    for layer in layers:
        layer.remember_stock("a call")
    forget = GuardedParameters.forget_stock

    def forgetting(layer: GuardedParameters) -> None:
        late.remember_stock("another call")
        forget(layer)

    monkeypatch.setattr(GuardedParameters, "forget_stock", forgetting)
    state.reset()
    assert not any(layer._stock_calls for layer in layers)


def test_only_a_call_of_mlxs_own_layout_is_left_to_stock_for_good(
    stock: None,
) -> None:
    mlx_marlin.quantized_matmul(X, W, SCALES, BIASES)
    mlx_marlin.quantized_matmul(X, PACKED)

    assert [each.is_stock for each in dispatch.calls.values()] == [True, False]
    assert all(each.reason for each in dispatch.calls.values())


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("measured", [None, Measured(reason="stock was faster")])
def test_another_machine_is_decided_for_without_what_is_known_of_this_one(
    is_here: bool,
    forced: bool,
    transpose: bool,
    measured: Measured | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem(m=3, n=N, k=K, layout="marlin")
    checked: list[Any] = []
    monkeypatch.setattr(metal, "handover", lambda *_: "stock is predicted")
    monkeypatch.setattr(selection, "may_hand_over", lambda: not forced)
    monkeypatch.setattr(measured_results, "find", lambda *_: measured)
    chip = devices.named("M3 Max")
    fault: Any = checked.append if is_here else None
    place = serving.Place(device=chip, is_here=is_here, fault=fault)

    answer = serving.serve_problem(problem, place, transpose=transpose)

    reason = "stock is predicted"
    if is_here and measured is not None:
        reason = "stock was faster"
    if not transpose:
        assert answer == dequantize_plan(problem, transposed=False)
    elif is_here and forced:
        assert answer == planner.choose(problem, chip)
    else:
        assert answer == serving.Refusal(reason, "speed")
    is_plan = not isinstance(answer, serving.Refusal)
    assert checked == ([answer] if is_here and is_plan else [])


PLAIN_REQUEST = Request(
    x_shape=(3, K),
    x_dtype=mx.float16,
    shape=(3, N),
    dtype=mx.float16,
    n=N,
    k=K,
    scale_dtype=mx.float16,
    mode="affine",
    bits=4,
    group_size=64,
    transpose=True,
    layout="mlx",
    on_cpu=False,
    invariant=False,
)
ROTATED = Epilogue(bias=True, rotation=Rotation(8, N, norm=1e-5, queries=8))
WIDE, HALF = mx.zeros(2), mx.zeros(2, mx.float16)
HANDED: list[tuple[Any, list[mx.array | None], list[mx.Dtype]]] = [
    ({}, [HALF, HALF, HALF, HALF], [mx.float16] * 4),
    # The activations are narrower than the result.
    ({"x_dtype": mx.bfloat16}, [WIDE, HALF, HALF, HALF], [mx.float16] * 4),
    # Scales and biases have two dtypes, and another one holds both.
    (
        {"scales_alike": False, "scale_dtype": mx.float32},
        *([HALF, HALF, HALF, HALF], [mx.float16] * 2 + [mx.float32] * 2),
    ),
    (
        {"epilogue": Epilogue(bias=True, multiply=True, residual=True)},
        *([HALF] * 4 + [WIDE] * 3, [mx.float16] * 7),
    ),
    # A bias, then positions and frequencies as they are, and the weights of norms.
    (
        {"epilogue": ROTATED},
        [*[HALF] * 4, WIDE, mx.zeros(2, mx.int32), WIDE, WIDE, WIDE],
        [*[mx.float16] * 5, mx.int32, mx.float32, *[mx.float16] * 2],
    ),
    # Kernels of a mode without biases get the scales, those of packed weights what the
    # caller has: a global scale.
    ({"mode": "mxfp4"}, [HALF, HALF, mx.zeros(2, mx.uint8), None], [*"hhss"]),
    ({"mode": "nvfp4", "layout": "marlin"}, [HALF, HALF, HALF, WIDE], [*"hhhw"]),
]


@pytest.mark.parametrize(("changes", "arrays", "wanted"), HANDED)
def test_a_product_is_handed_the_dtypes_that_it_reads(
    changes: Any, arrays: list[Any], wanted: list[Any]
) -> None:
    def product(*handed: mx.array) -> Any:
        return [each.dtype for each in handed]

    letters = {"h": mx.float16, "s": mx.uint8, "w": mx.float32}
    run: Any = dispatch.as_called(product, replace(PLAIN_REQUEST, **changes))

    assert run(*arrays) == [letters.get(each, each) for each in wanted]


def test_only_packed_weights_have_a_shorter_way_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Problem] = []
    monkeypatch.setattr(dispatch, "_backward", asked.append)

    mx.grad(lambda x: mlx_marlin.quantized_matmul(x, W, SCALES, BIASES).sum())(X)
    assert asked == []
    mx.grad(lambda x: mlx_marlin.quantized_matmul(x, PACKED).sum())(X)
    assert [each.layout for each in asked] == ["marlin"]


def test_a_traced_call_replaces_itself_and_computes_the_same() -> None:
    prepared = dispatch.traced_call(lambda x: x + 1)
    first = prepared.run

    assert first(mx.array(1)).item() == 2
    assert prepared.run is not first
    assert prepared.run(mx.array(2)).item() == 3


def test_the_epilogue_follows_a_product_with_a_decoded_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph, "dequantized_product", lambda _: lambda x, *_: x)
    problem = Problem(m=2, n=64, k=64, epilogue=Epilogue(bias=True))
    run = dispatch._decoded(dequantize_plan(problem))
    plain = dispatch._decoded(dequantize_plan(replace(problem, epilogue=PLAIN)))

    x, bias = mx.zeros((2, 64)), mx.arange(64.0)
    assert mx.array_equal(run(x, x, x, x, bias), mx.broadcast_to(bias, x.shape))
    assert plain(x, x, x, x) is x


@pytest.mark.parametrize("norm", [None, 1e-5])
def test_the_weight_of_a_norm_follows_placeholders(
    norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "product", lambda _: lambda *arrays: arrays)
    problem = Problem(m=2, n=64, k=64, norm=norm)
    run: Any = dispatch._planned(planner.choose(problem, devices.named("M3 Max")))

    given = ["x", "w", "scales", "biases"]
    if norm is None:
        assert run(*given) == (*given,)
    else:
        assert run(*given, "norm") == (*given, "x", "x", "x", "norm")
