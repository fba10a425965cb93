"""Kernels with planted faults never serve; stock MLX does, with a warning."""

from pathlib import Path

import mlx.core as mx
import pytest

import mlx_marlin
from mlx_marlin import guard
from mlx_marlin.backends import planner
from mlx_marlin.products import packing
from mlx_marlin.weights import tile_conversion
from support import guard_faults
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
from support.profiles import sampled

pytestmark = needs_emulator


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
