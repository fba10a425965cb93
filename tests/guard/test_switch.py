"""Where the guard checks: its switch, and back ends that need no check."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import metal_emulator
import mlx_marlin
from mlx_marlin import guard
from mlx_marlin.backends import graph, planner
from mlx_marlin.guard import known_answers
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.planning.problem import problem_of
from mlx_marlin.products import dispatch
from support.choose import Choose
from support.guard_faults import Fault
from support.guarded_calls import DEVICE, K, N, operands
from support.marks import needs_emulator

pytestmark = needs_emulator


def test_a_trace_checks_with_constants_and_holds_no_check(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault("gemv", "wrong factor").plant(monkeypatch)
    x, w = operands(m=1)

    def product(x: mx.array) -> mx.array:
        return mlx_marlin.quantized_matmul(x, *w)

    expected = mx.quantized_matmul(x, *w)
    with pytest.warns(RuntimeWarning, match="marlin_gemv failed"):
        compiled = mx.compile(product)(x)
    assert mx.array_equal(compiled, expected)
    assert fault.called == 1
    gradient = mx.grad(lambda x: product(x).sum())(x)
    assert mx.array_equal(
        gradient, mx.quantized_matmul(mx.ones((1, N), mx.float16), *w, transpose=False)
    )
    assert fault.called == 1


def test_without_a_device_nothing_is_checked_or_exported(
    backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mx.metal.is_available():
        pytest.skip("there is a Metal device here")
    monkeypatch.setenv(guard.ENVIRONMENT, "1")
    backend("metal")
    ran: list[Any] = []
    monkeypatch.setattr(known_answers, "fault_of", ran.append)
    # MLX cannot export a function with derivatives of its own.
    monkeypatch.setattr(dispatch, "differentiable", lambda ours, *_: ours)
    x, w = operands()
    mx.eval(x, w)
    names: list[str] = []

    def note(node: dict[str, Any]) -> None:
        if node["type"] == "primitive":
            names.append(node["name"])

    mx.export_function(note, lambda x: mlx_marlin.quantized_matmul(x, *w), x)
    assert ran == []
    assert names == ["CustomKernel"]


def test_on_the_emulator_a_broken_kernel_raises_by_default(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(guard.ENVIRONMENT)
    Fault("gemv", "body does not compile").plant(monkeypatch)
    x, w = operands(m=1)
    with pytest.raises(metal_emulator.CompileError):
        mlx_marlin.quantized_matmul(x, *w)


def test_other_values_of_the_switch_are_refused(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(guard.ENVIRONMENT, "yes")
    x, w = operands(m=1)
    with pytest.raises(ValueError, match="MLX_MARLIN_GUARD='yes', expected 0, 1"):
        mlx_marlin.quantized_matmul(x, *w)


def test_a_plan_of_tuning_is_checked_too(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fault("dequantize", "zeros").plant(monkeypatch)
    plan = dequantize_plan(problem_of(300, N, K, layout="marlin"))
    with pytest.warns(RuntimeWarning, match="marlin_dequantize failed"):
        assert guard.why_not(plan) is not None
    assert graph.plans_built() == []


@pytest.mark.skipif(not mx.metal.is_available(), reason="no Metal device here")
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
def test_on_a_mac_the_usual_kernels_pass(
    m: int, guarded: Path, backend: Choose
) -> None:
    backend("metal")
    for dtype in ("float16", "bfloat16"):
        for layout in ("mlx", "marlin"):
            problem = problem_of(m, 4096, 4096, dtype=dtype, layout=layout)
            assert guard.why_not(planner.choose(problem, DEVICE)) is None
