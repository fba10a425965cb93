"""What serves in place of a kernel that failed its check."""

import warnings
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_marlin
from mlx_marlin.backends import graph
from mlx_marlin.planning.block_plans import RepackPlan
from mlx_marlin.products import packing
from mlx_marlin.weights import tile_conversion
from mlx_marlin.weights.formats import CHANNEL
from support import oracles
from support.format_cases import Weight
from support.guard_faults import Fault
from support.guarded_calls import K, N, collected, new_process, operands
from support.marks import needs_emulator
from support.packed_codes import any_bits, packed_of

pytestmark = needs_emulator


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
