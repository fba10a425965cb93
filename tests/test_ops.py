"""Our product answers every call as MLX's does, or better where MLX's is wrong."""

import re
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import mlx.core as mx
import numpy as np
import oracles
import pytest

import mlx_marlin
from mlx_marlin import device, launch, serving
from mlx_marlin.packing import PackedWeight, pack
from mlx_marlin.plan import Plan

K, N = 128, 40
Choose = Callable[[str | None], None]


@pytest.fixture(params=["stock", "kernels"])
def served_by(
    request: pytest.FixtureRequest, backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Serves every call by stock MLX, then by the kernels' stand-in."""
    if request.param == "stock":
        backend("stock")
    else:
        request.getfixturevalue("ran")
    return str(request.param)


def weight(
    n: int = N,
    k: int = K,
    *,
    dtype: mx.Dtype = mx.float32,
    batch: int = 0,
    **format: Any,
) -> tuple[mx.array, ...]:
    """Quantizes a weight; `batch` of them if there is to be one."""
    shape = (batch, n, k) if batch else (n, k)
    w = mx.random.normal(shape, key=mx.random.key(n * k)).astype(dtype)
    return mx.quantize(w, **format)


def activations(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape))).astype(dtype)


def assert_right(y: mx.array, x: mx.array, native: tuple[mx.array, ...]) -> None:
    """Checks a product: MLX's own bits if stock serves it, else against float64."""
    stock = mx.quantized_matmul(x, *native)
    assert (y.shape, y.dtype) == (stock.shape, stock.dtype)
    if launch.backend() == "stock":
        assert mx.array_equal(y, stock)
    else:
        # How exact the kernels are is `test_kernels.py`'s subject: here, the right sum.
        expected = oracles.product(x, *native, group_size=64)
        scale = oracles.magnitude(x, *native, group_size=64)
        name = str(y.dtype).removeprefix("mlx.core.")
        assert oracles.error(y, expected, scale) < oracles.TOLERANCES[name]


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


@pytest.mark.parametrize("kind", X_AS)
@pytest.mark.usefixtures("served_by")
def test_any_x_is_multiplied_as_mlx_does(kind: str) -> None:
    assert_as_mlx(X_AS[kind](), weight())


@pytest.mark.parametrize("kind", X_AS)
@pytest.mark.usefixtures("kernels")
def test_our_kernels_read_any_x(kind: str) -> None:
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
    monkeypatch.setattr(launch, "product", None)

    mlx_marlin.quantized_matmul(x + 1, *native)

    assert len(ran) == 2


# What goes to stock MLX, and what the reason must say.
STOCK: dict[str, tuple[Callable[[], tuple[mx.array, ...]], dict[str, Any], str]] = {
    **{
        f"{bits} bits": (
            lambda bits=bits: (activations(3, K), *weight(bits=bits)),
            {"bits": bits},
            f"affine {bits}-bit with group size 64",
        )
        for bits in (2, 3, 5, 6, 8)
    },
    **{
        mode: (
            lambda mode=mode: (activations(3, K), *weight(mode=mode)),
            {"mode": mode},
            f"{mode} {bits}-bit with group size {group_size}",
        )
        for mode, group_size, bits in (
            ("mxfp4", 32, 4),
            ("mxfp8", 32, 8),
            ("nvfp4", 16, 4),
        )
    },
    "transpose=False": (
        lambda: (activations(3, N), *weight()),
        {"transpose": False},
        "transposed weight only",
    ),
    "batch of weights": (
        lambda: (activations(2, 3, K), *weight(batch=2)),
        {},
        "one weight matrix",
    ),
    "batches that broadcast": (
        lambda: (activations(5, 1, 3, K), *weight(batch=2)),
        {},
        "one weight matrix",
    ),
}


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


@pytest.mark.parametrize("arguments", ["native", "packed"])
def test_without_a_back_end_stock_serves_everything(
    backend: Choose, arguments: str
) -> None:
    backend("stock")
    x, native = activations(3, K), weight()
    weights = native if arguments == "native" else (pack(*native),)

    reason = mlx_marlin.why_not(x, *weights)

    assert reason is not None
    assert "MLX_MARLIN_BACKEND" in reason
    y = mlx_marlin.quantized_matmul(x, *weights)
    assert mx.array_equal(y, mx.quantized_matmul(x, *native))


NO_SUM: dict[str, tuple[Callable[[], tuple[mx.array, ...]], tuple[int, ...]]] = {
    "no rows": (lambda: (activations(0, K), *weight()), (0, N)),
    "no rows, batched": (lambda: (activations(2, 0, K), *weight()), (2, 0, N)),
    "empty batch": (lambda: (activations(0, 2, K), *weight()), (0, 2, N)),
    "no rows, many weights": (
        lambda: (activations(0, K), *weight(batch=2)),
        (2, 0, N),
    ),
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
    "no k": (
        lambda: (activations(3, 0), *(each[:, :0] for each in weight())),
        (3, N),
    ),
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
def test_a_batch_of_weights_meets_x_of_any_rank(transpose: bool) -> None:
    # MLX's own answer is that of the first weight only, with too few dimensions.
    weights = weight(batch=2)
    k = K if transpose else N

    for x in (activations(k), activations(3, k)):
        y = mlx_marlin.quantized_matmul(x, *weights, transpose=transpose)

        each = [
            mx.quantized_matmul(x, *(part[i] for part in weights), transpose=transpose)
            for i in range(2)
        ]
        assert mx.allclose(y, mx.stack(each), atol=1e-4)


W, SCALES, BIASES = weight()
X = activations(3, K)
FP4, FP4_SCALES = weight(mode="mxfp4")

WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "mode": ((X, W, SCALES, BIASES), {"mode": "foo"}),
    "group size that does not fit": ((X, W, SCALES, BIASES), {"group_size": 32}),
    "group size of no format": ((X, W, SCALES, BIASES), {"group_size": 16}),
    "negative group size": ((X, W, SCALES, BIASES), {"group_size": -64}),
    "group size 0": ((X, W, SCALES, BIASES), {"group_size": 0}),
    "bits that do not fit": ((X, W, SCALES, BIASES), {"bits": 8}),
    "negative bits": ((X, W, SCALES, BIASES), {"bits": -4}),
    "no biases": ((X, W, SCALES), {}),
    "biases of a float mode": ((X, FP4, FP4_SCALES, BIASES), {"mode": "mxfp4"}),
    "float scales of a float mode": ((X, W, SCALES), {"mode": "mxfp4"}),
    "float w": ((X, activations(N, K), SCALES, BIASES), {}),
    "signed w": ((X, W.astype(mx.int32), SCALES, BIASES), {}),
    "scales and biases that differ": ((X, W, SCALES, BIASES[:10]), {}),
    "scales with too few groups": ((X, W, SCALES[:, :1], BIASES[:, :1]), {}),
    "whole scales": ((X, W, SCALES.astype(mx.uint8), BIASES.astype(mx.uint8)), {}),
    "k": ((X[:, :64], W, SCALES, BIASES), {}),
    "k, no rows": ((X[:0, :64], W, SCALES, BIASES), {}),
    "k, transpose=False": ((X, W, SCALES, BIASES), {"transpose": False}),
    "complex x": ((X.astype(mx.complex64), W, SCALES, BIASES), {}),
    "vector w": ((X, W[0], SCALES[0], BIASES[0]), {}),
    "scalar w": ((X, W[0, 0], SCALES[0, 0], BIASES[0, 0]), {}),
    "batch of w alone": ((X, W[None], SCALES, BIASES), {}),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.usefixtures("served_by")
def test_a_wrong_call_raises_mlxs_own_error(kind: str) -> None:
    arguments, options = WRONG[kind]
    with pytest.raises(ValueError) as stock:  # noqa: PT011
        mx.quantized_matmul(*arguments, **options)

    for ask in (mlx_marlin.quantized_matmul, mlx_marlin.why_not):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            ask(*arguments, **options)
        assert str(error.value) == str(stock.value)


@pytest.mark.parametrize(
    "arguments",
    [
        (X.tolist(), W, SCALES, BIASES),
        (np.array(X), W, SCALES, BIASES),
        (1.0, W, SCALES, BIASES),
        (None, W, SCALES, BIASES),
        (X, np.array(W), SCALES, BIASES),
        (X, W, [1.0], BIASES),
        (X, W, None, None),
        (X, W),
        (X, W, SCALES, "biases"),
        (None, pack(W, SCALES, BIASES)),
    ],
)
@pytest.mark.usefixtures("served_by")
def test_what_is_not_an_array_is_a_type_error(arguments: tuple[Any, ...]) -> None:
    if not isinstance(arguments[1], PackedWeight):
        with pytest.raises(TypeError):
            mx.quantized_matmul(*arguments)

    for ask in (mlx_marlin.quantized_matmul, mlx_marlin.why_not):
        with pytest.raises(TypeError, match=r"must be mx\.array.*got"):
            ask(*arguments)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        # MLX reads past the end of the scales here.
        (
            (X, W, SCALES[:10], BIASES[:10]),
            {},
            r"scales has shape \(10, 2\).*\(40, 16\)",
        ),
        ((X, W, SCALES[:0], BIASES[:0]), {}, r"scales has shape \(0, 2\).*\(40, 16\)"),
        ((X, FP4, FP4_SCALES[1:]), {"mode": "mxfp4"}, r"scales has shape \(39, 4\)"),
        # MLX divides by zero here, and says "SmallVector out of range" there.
        ((X, W, SCALES, BIASES), {"bits": 0}, "bits=0"),
        (
            (X[0, 0], W, SCALES, BIASES),
            {},
            r"x has no dimensions, expected \[\.\.\., k\]",
        ),
    ],
)
@pytest.mark.usefixtures("served_by")
def test_where_mlx_crashes_or_reads_elsewhere_ours_raises(
    arguments: tuple[mx.array, ...], options: dict[str, Any], message: str
) -> None:
    for ask in (mlx_marlin.quantized_matmul, mlx_marlin.why_not):
        with pytest.raises(ValueError, match=message):
            ask(*arguments, **options)


@pytest.mark.parametrize("options", [{"mode": None}, {"bits": 2.5}, {"transpose": 3}])
@pytest.mark.usefixtures("served_by")
def test_an_option_of_the_wrong_type_is_a_type_error(options: dict[str, Any]) -> None:
    for ask in (mx.quantized_matmul, mlx_marlin.quantized_matmul, mlx_marlin.why_not):
        with pytest.raises(TypeError):
            ask(X, W, SCALES, BIASES, **options)


PACKED = pack(W, SCALES, BIASES)


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


def test_a_packed_weight_is_unpacked_for_what_is_not_ours(ran: list[Plan]) -> None:
    x = activations(3, N)

    y = mlx_marlin.quantized_matmul(x, PACKED, transpose=False)

    expected = mx.quantized_matmul(x, W, SCALES, BIASES, transpose=False)
    assert mx.array_equal(y, expected)
    assert ran == []
    reason = mlx_marlin.why_not(x, PACKED, transpose=False)
    assert reason is not None
    assert "transposed weight only" in reason


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (X, {"group_size": 32}, r"\(32, 4, 'affine'\).*\(64, 4, 'affine'\)"),
        (X, {"group_size": 0}, r"\(0, 4, 'affine'\)"),
        (X, {"bits": 8}, r"\(64, 8, 'affine'\)"),
        (X, {"bits": 0}, r"\(64, 0, 'affine'\)"),
        (X, {"mode": "mxfp4"}, r"\(64, 4, 'mxfp4'\)"),
        (X, {"scales": SCALES}, "carries its scales and biases"),
        (X, {"biases": BIASES}, "carries its scales and biases"),
        (X[:, :64], {}, r"x has shape \(3, 64\), expected \[\.\.\., 128\]"),
        (X[:0, :64], {}, r"x has shape \(0, 64\), expected \[\.\.\., 128\]"),
        (X, {"transpose": False}, r"x has shape \(3, 128\), expected \[\.\.\., 40\]"),
        (X[0, 0], {}, r"x has shape \(\), expected \[\.\.\., 128\]"),
        (X.astype(mx.complex64), {}, "complex64"),
    ],
)
@pytest.mark.usefixtures("served_by")
def test_a_packed_weight_refuses_what_does_not_fit_it(
    x: mx.array, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mlx_marlin.quantized_matmul(x, PACKED, **options)


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

    def product(plan: Plan) -> launch.Product:
        def run(x: mx.array, *_: mx.array) -> mx.array:
            streams.append(mx.default_stream(mx.cpu))
            return mx.zeros((plan.problem.m, plan.problem.n), x.dtype)

        return run

    monkeypatch.setattr(launch, "product", product)
    own, usual = mx.new_stream(mx.cpu), mx.default_stream(mx.cpu)

    mlx_marlin.quantized_matmul(X, *arguments, stream=own)
    mlx_marlin.quantized_matmul(X, *arguments, stream=mx.cpu)
    mlx_marlin.quantized_matmul(X, *arguments)

    assert streams == [own, usual, usual]


@pytest.fixture
def on_a_mac(
    backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, mx.DeviceType], None]:
    """Makes Metal seem available, on a chip, with a default device."""

    def pretend(chip: str, default: mx.DeviceType) -> None:
        backend(None)
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(default))
        monkeypatch.setattr(device, "current", lambda: device.Device.named(chip))

    return pretend


@pytest.mark.parametrize(
    ("chip", "rows", "words"),
    [
        ("M3 Max", 1, "bound by reading the weight"),
        ("M3 Max", 8, None),
        ("M3 Max", 30, "tile of 32"),
        ("M3 Max", 48, None),
        ("M3 Max", 65, "more than 64"),
        ("M5", 8, None),
        ("M5", 16, "tensor units"),
    ],
)
def test_on_a_mac_stock_serves_what_it_serves_as_fast(
    on_a_mac: Callable[..., None], chip: str, rows: int, words: str | None
) -> None:
    on_a_mac(chip, mx.gpu)
    x, native = activations(rows, 4096), weight(4096, 4096)

    reason = mlx_marlin.why_not(x, *native)

    assert (reason is None) if words is None else (words in str(reason))
    # Unpacking for every call would cost more than any kernel of ours.
    assert mlx_marlin.why_not(x, pack(*native)) is None


def test_who_forces_a_back_end_gets_it_for_every_size(
    backend: Choose, on_a_mac: Callable[..., None]
) -> None:
    on_a_mac("M5", mx.gpu)
    backend("metal")

    for rows in (1, 16, 30, 100):
        assert mlx_marlin.why_not(activations(rows, K), *weight()) is None


def test_on_a_mac_a_call_on_the_cpu_is_stocks(on_a_mac: Callable[..., None]) -> None:
    on_a_mac("M3 Max", mx.cpu)
    x, native = activations(8, K), weight()

    assert mlx_marlin.why_not(x, *native) == "the call runs on the CPU"
    assert mlx_marlin.why_not(x, pack(*native)) == "the call runs on the CPU"


def test_forgetting_asks_for_the_back_end_again(backend: Choose) -> None:
    backend("stock")
    assert mlx_marlin.why_not(X, W, SCALES, BIASES) is not None

    backend("metal")

    assert mlx_marlin.why_not(X, W, SCALES, BIASES) is None
    assert [plan.problem.m for plan in launch.plans_used()] == [3]
    serving.forget()
    assert launch.plans_used() == []
