"""Where the guard checks, and what serves in place of a kernel with a fault."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_marlin
from mlx_marlin import guard
from mlx_marlin.backends import graph, planner
from mlx_marlin.guard import known_answers
from mlx_marlin.planning.block_plans import RepackPlan
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.planning.problem import problem_of
from mlx_marlin.products import dispatch, packing
from mlx_marlin.weights import tile_conversion
from mlx_marlin.weights.formats import CHANNEL
from support import guard_faults, oracles
from support.choose import Choose
from support.format_cases import Weight
from support.guard_faults import Fault
from support.guarded_calls import (
    PRODUCTS,
    K,
    N,
    chosen,
    collected,
    is_right,
    new_process,
    operands,
)
from support.marks import needs_emulator
from support.packed_codes import any_bits, packed_of
from support.profiles import sampled

pytestmark = needs_emulator


@sampled(2, 4)
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_a_right_kernel_serves_after_its_check(
    kernel: str, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "choose", chosen(kernel))
    x, w = operands()
    y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))

    assert messages == []
    assert mlx_marlin.why_not(x, *w) is None
    assert is_right(y, x, w)
    (verdict,) = guard.verdicts_so_far()
    assert (verdict.state, verdict.fault) == ("passed", "")
    assert kernel in verdict.kernels


@sampled(15)
@pytest.mark.parametrize("kind", guard_faults.KINDS)
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_a_kernel_with_a_fault_never_serves(
    kernel: str, kind: str, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "choose", chosen(kernel))
    fault = Fault(kernel, kind).plant(monkeypatch)
    x, w = operands()
    expected = mx.quantized_matmul(x, *w)

    y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))

    assert mx.array_equal(y, expected)
    assert fault.built
    assert len(messages) == 1
    assert f"marlin_{kernel}" in messages[0]
    assert "mlx-marlin doctor" in messages[0]
    reason = mlx_marlin.why_not(x, *w)
    assert reason is not None
    assert "failed its check on this machine" in reason

    new_process()
    built, called = fault.built, fault.called
    y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))
    assert mx.array_equal(y, expected)
    assert mlx_marlin.why_not(x, *w) == reason
    assert (fault.built, fault.called) == (built, called)
    assert len(messages) == 1


@sampled(4)
@pytest.mark.parametrize("kind", guard_faults.KINDS)
def test_experts_kernel_with_a_fault_never_serves(
    kind: str, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault("gather", kind).plant(monkeypatch)
    w = mx.quantize(mx.random.normal((3, N, K), key=mx.random.key(1)))
    x = mx.random.normal((4, 1, K), key=mx.random.key(2))
    experts = mx.array([2, 0, 2, 2])
    expected = mx.gather_qmm(x, *w, rhs_indices=experts)

    def run() -> mx.array:
        return mlx_marlin.gather_qmm(x, *w, rhs_indices=experts)

    y, messages = collected(run)
    assert mx.array_equal(y, expected)
    assert len(messages) == 1
    new_process()
    called = fault.called
    y, messages = collected(run)
    assert mx.array_equal(y, expected)
    assert (fault.called, len(messages)) == (called, 1)


@sampled(4)
@pytest.mark.parametrize("kind", guard_faults.KINDS)
def test_a_decoding_kernel_with_a_fault_never_serves(
    kind: str, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fault("dequantize", kind).plant(monkeypatch)
    x, w = operands()
    packed = mlx_marlin.pack(*w)
    rows = x[:, :N]
    expected = mx.quantized_matmul(rows, *w, transpose=False)

    y, messages = collected(
        lambda: mlx_marlin.quantized_matmul(rows, packed, transpose=False)
    )
    assert mx.array_equal(y, expected)
    assert len(messages) == 1
    reason = mlx_marlin.why_not(rows, packed, transpose=False)
    assert reason is not None
    assert "marlin_dequantize" in reason


@sampled(6)
@pytest.mark.parametrize("kind", guard_faults.OF_CODES)
@pytest.mark.parametrize("to", ["marlin", "mlx"])
def test_a_repack_kernel_with_a_fault_moves_nothing(
    to: str, kind: str, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_on_gpu", lambda: True)
    name = "pack" if to == "marlin" else "unpack"
    Fault(name, kind).plant(monkeypatch)
    _, w = operands()

    packed, messages = collected(lambda: mlx_marlin.pack(*w))
    back, more = collected(lambda: mlx_marlin.unpack(packed))

    assert len(messages + more) == 1
    for one, other in zip(back, w, strict=True):
        assert mx.array_equal(one, other)
    form = {"bits": 4, "group_size": 64}
    assert mx.array_equal(
        packed.words, tile_conversion.tiles_of_rows(w[0], N, K, **form)
    )


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


def test_pack_reads_back_what_it_wrote(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that the small known answer does not show loses no weight either."""
    monkeypatch.setattr(packing, "_on_gpu", lambda: True)
    right = graph.call
    large: list[int] = []

    def call(plan: RepackPlan) -> Callable[[mx.array], mx.array]:
        move = right(plan)
        if plan.n != N or plan.to != "marlin":
            return move
        large.append(plan.n)
        return lambda w: move(w) ^ 1

    monkeypatch.setattr(graph, "call", call)
    _, w = operands()
    packed, messages = collected(lambda: mlx_marlin.pack(*w))

    assert large == [N]
    assert len(messages) == 1
    assert "wrong codes" in messages[0]
    assert mx.array_equal(mlx_marlin.unpack(packed)[0], w[0])
    # And it is known for the next weight, of any process.
    new_process()
    _, messages = collected(lambda: mlx_marlin.pack(*w))
    assert (large, len(messages)) == ([N], 1)


def test_pack_raises_where_codes_cannot_be_read_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = tile_conversion.tiles_of_rows
    monkeypatch.setattr(
        tile_conversion,
        "tiles_of_rows",
        lambda *given, **form: right(*given, **form) ^ 1,
    )
    _, w = operands()
    with pytest.raises(RuntimeError, match="256→70 of 4 bits in groups of 64"):
        mlx_marlin.pack(*w)


def test_invariant_products_raise_instead(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fault("gemm_register", "wrong factor").plant(monkeypatch)
    x, w = operands()
    with (
        pytest.warns(RuntimeWarning, match="marlin_gemm_register failed"),
        pytest.raises(ValueError, match=r"invariant=True.*failed its check"),
    ):
        mlx_marlin.linear(x, *w, invariant=True)
    with pytest.raises(ValueError, match=r"invariant=True.*failed its check"):
        mlx_marlin.linear(x, *w, invariant=True)


def test_experts_that_must_not_vary_raise_instead(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fault("gather", "zeros").plant(monkeypatch)
    w = mx.quantize(mx.random.normal((3, N, K)))
    experts = mx.array([2, 0])
    x = mx.random.normal((2, 1, K))
    with (
        pytest.warns(RuntimeWarning, match="marlin_gather failed"),
        pytest.raises(ValueError, match=r"invariant=True.*failed its check"),
    ):
        mlx_marlin.gather_qmm(x, *w, rhs_indices=experts, invariant=True)


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [
        ("affine", 3, 16),
        ("affine", 5, CHANNEL),
        ("symmetric", 4, 256),
        ("zero_point", 6, 32),
        ("mxfp8", 8, 32),
        ("nvfp4", 4, 16),
    ],
)
def test_packed_weights_are_unpacked_without_our_kernels(
    mode: str,
    bits: int,
    group_size: int,
    guarded: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Fault("", "factory raises").plant(monkeypatch)  # every kernel of ours
    monkeypatch.setattr(packing, "_on_gpu", lambda: True)
    if mode in ("mxfp8", "nvfp4"):
        w = mx.random.normal((N, K), key=mx.random.key(1))
        native = mx.quantize(w, group_size, bits, mode)
        weight = Weight(mode, bits, group_size, tuple(native))
    else:
        weight = any_bits(mode, bits, group_size, n=N, k=K, dtype="float32")
    x = mx.random.normal((3, K), key=mx.random.key(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = packed_of(weight)
        y = mlx_marlin.quantized_matmul(x, packed)
        back = mlx_marlin.quantized_matmul(y, packed, transpose=False)

    expected = oracles.exact(x) @ weight.decoded.T
    assert oracles.error(y, expected) < 1e-5
    assert oracles.error(back, oracles.exact(y) @ weight.decoded) < 1e-5
