"""`MLX_MARLIN_LOG=1`: one line for each decision of who serves a call."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

import mlx_marlin
from mlx_marlin import decision_log, state
from mlx_marlin.backends import graph
from mlx_marlin.planning.plan import Plan
from support.choose import Choose

N, K = 64, 128


@pytest.fixture
def logged(
    ran: list[Plan], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[], list[str]]:
    """Returns the lines since its last call; NumPy computes in place of kernels."""
    monkeypatch.setenv(decision_log.ENVIRONMENT, "1")
    state.reset()
    return lambda: capfd.readouterr().err.splitlines()


def native(dtype: mx.Dtype = mx.float32) -> tuple[mx.array, ...]:
    return mx.quantize(mx.random.normal((N, K)).astype(dtype))


def test_a_new_call_is_a_line_and_a_warm_one_is_none(
    logged: Callable[[], list[str]], ran: list[Plan]
) -> None:
    w = native()
    for rows in (3, 3, 5, 3):
        mlx_marlin.quantized_matmul(mx.zeros((rows, K)), *w)

    first, second = logged()
    served = "affine 4-bit, group 64, float32 with float32 scales, mlx layout"
    assert first.startswith(f"mlx_marlin: 3 rows of {K}→{N}, {served}: our kernels: ")
    assert first.endswith(ran[0].explain())
    assert second.startswith(f"mlx_marlin: 5 rows of {K}→{N}, {served}: our kernels: ")

    half = native(mx.float16)
    mlx_marlin.quantized_matmul(mx.zeros((3, K), mx.float16), *half)
    mlx_marlin.quantized_matmul(mx.zeros((3, K), mx.float16), mlx_marlin.pack(*half))
    a_dtype, a_layout = logged()
    assert "float16 with float16 scales, mlx layout" in a_dtype
    assert "float16 with float16 scales, marlin layout" in a_layout


def test_stock_mlx_comes_with_the_reason(logged: Callable[[], list[str]]) -> None:
    w = native()
    mlx_marlin.quantized_matmul(mx.zeros((3, N)), *w, transpose=False)
    mlx_marlin.quantized_matmul(mx.zeros((0, K)), *w)
    none = mx.quantize(mx.zeros((1, N, K)))
    none = [array[:0] for array in none]
    mlx_marlin.quantized_matmul(mx.zeros((0, 3, K)), *none)

    other, *empty = logged()
    assert ", not transposed, " in other
    transposed_only = "our kernels multiply by the transposed weight only"
    assert other.endswith(f": stock MLX: {transposed_only}")
    assert len(empty) == 2
    assert all(line.endswith("there is nothing to add up") for line in empty)


def test_layers_are_logged(logged: Callable[[], list[str]]) -> None:
    layer = mlx_marlin.MarlinLinear(K, N, bias=True)
    for _ in range(2):
        layer(mx.zeros((1, 2, K)))

    (line,) = logged()
    assert line.startswith(f"mlx_marlin: 2 rows of {K}→{N}, ")
    assert "bias" in line


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.usefixtures("kernels")
def test_experts_are_logged(
    layout: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = SwitchGLU(64, 96, 6, bias=False)
    nn.quantize(model, group_size=32, bits=4)
    mlx_marlin.optimize(model, layout=layout)
    monkeypatch.setenv(decision_log.ENVIRONMENT, "1")
    state.reset()
    capfd.readouterr()
    for _ in range(2):
        mx.eval(model(mx.zeros((3, 64)), mx.zeros((3, 2), mx.uint32)))

    up_or_gate, down = capfd.readouterr().err.splitlines()
    begin = "mlx_marlin: 6 pairs of a row and one of 6 experts "
    assert up_or_gate.startswith(f"{begin}64→96, ")
    assert down.startswith(f"{begin}96→64, ")
    assert f", {layout} layout: our kernels: gather " in down


def test_experts_of_stock_mlx_come_with_the_reason(
    backend: Choose, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(decision_log.ENVIRONMENT, "1")
    backend("stock")
    w = mx.quantize(mx.zeros((4, N, K)))

    for _ in range(2):
        indices = mx.zeros((1, 2), mx.uint32)
        mlx_marlin.gather_qmm(mx.zeros((1, 1, 1, K)), *w, rhs_indices=indices)

    (line,) = capfd.readouterr().err.splitlines()
    assert "2 pairs of a row and one of 4 experts 128→64" in line
    assert ": stock MLX: no back end here runs our kernels" in line


@pytest.mark.parametrize("value", ["", "0", None])
def test_nothing_is_logged_by_default(
    ran: list[Plan],
    value: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if value is None:
        monkeypatch.delenv(decision_log.ENVIRONMENT, raising=False)
    else:
        monkeypatch.setenv(decision_log.ENVIRONMENT, value)
    state.reset()

    mlx_marlin.quantized_matmul(mx.zeros((3, K)), *native())

    assert ran
    assert capfd.readouterr().err == ""


def test_a_wrong_value_is_named(
    ran: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(decision_log.ENVIRONMENT, "yes")
    state.reset()

    with pytest.raises(ValueError, match="MLX_MARLIN_LOG='yes', expected 0, 1 or"):
        mlx_marlin.quantized_matmul(mx.zeros((3, K)), *native())


def test_a_warm_call_does_not_ask(
    logged: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    w, x = native(), mx.zeros((3, K))
    mlx_marlin.quantized_matmul(x, *w)
    for module, name in ((decision_log, "is_on"), (graph, "product")):
        monkeypatch.setattr(module, name, None)

    mlx_marlin.quantized_matmul(x, *w)


def test_a_process_without_standard_error_logs_nothing(
    logged: Callable[[], list[str]],
    ran: list[Plan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", None)
        mlx_marlin.quantized_matmul(mx.zeros((3, K)), *native())

    assert ran
    assert logged() == []
