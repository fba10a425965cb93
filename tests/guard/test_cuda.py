"""The guard on CUDA: in the emulator, and on a GPU with `pytest -m cuda`."""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_marlin
from mlx_marlin import guard
from mlx_marlin.backends import planner, source
from mlx_marlin.backends.cuda import source as cuda_source
from mlx_marlin.guard import verdicts
from mlx_marlin.guard.miniatures import miniatures
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.products.this_machine import device as target
from support import cuda_on_cpu
from support.choose import Choose
from support.guarded_calls import new_process
from support.marks import needs_emulator

N, K = 256, 1024
LANE = (
    "(lane.pair >> 1) << 3 | (lane.row & 3) << 1 | (lane.pair & 1)",
    "(lane.pair & 1) << 3 | (lane.row & 3) << 1 | (lane.pair >> 1)",
)
FAULTS = {
    "wrong lane map": ("lane.cuh", *LANE),
    "does not compile": ("lane.cuh", LANE[0], "broken("),
}
NO_DEVICE = pytest.mark.skipif(
    not mx.cuda.is_available(), reason="MLX has no CUDA device here"
)


def on_gpu(test: Any) -> Any:
    """Marks a test that needs a CUDA device."""
    return pytest.mark.cuda(NO_DEVICE(test))


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(guard.ENVIRONMENT, "1")
    monkeypatch.setattr(verdicts, "folder", lambda: tmp_path / "verdicts")


def operands() -> tuple[mx.array, tuple[mx.array, ...]]:
    w = mx.quantize(mx.random.normal((N, K), key=mx.random.key(1)).astype(mx.float16))
    return mx.random.normal((4, K), key=mx.random.key(2)).astype(mx.float16), w


def few_warps(problem: Problem, device: PlanningDevice) -> Plan:
    """Returns a plan for which the emulator has memory."""
    few = {"kernel": "mma", "simdgroups_n": 2, "simdgroups_k": 2}
    return planner.make(problem, device=device, **few)


def assert_stock_serves() -> None:
    x, w = operands()
    packed = mlx_marlin.pack(*w)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="failed its check") as found:
            y = mlx_marlin.quantized_matmul(x, packed)
        assert len(found) == 1
        assert mx.array_equal(y, mx.quantized_matmul(x, *w))
        assert "failed its check" in str(mlx_marlin.why_not(x, packed))
        new_process()


@needs_emulator
def test_a_cuda_kernel_with_a_fault_never_serves(
    guarded: None, backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_on_cpu.serve(monkeypatch, {"lane.cuh": LANE})
    monkeypatch.setattr(planner, "choose", few_warps)
    backend("cuda")
    assert_stock_serves()


@needs_emulator
def test_a_right_cuda_kernel_serves(
    guarded: None, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "choose", few_warps)
    x, w = operands()
    assert mlx_marlin.why_not(x, mlx_marlin.pack(*w)) is None
    assert {each.state for each in guard.verdicts_so_far()} == {"passed"}


@on_gpu
@pytest.mark.parametrize("fault", FAULTS)
def test_on_a_gpu_a_kernel_with_a_fault_never_serves(
    fault: str,
    guarded: None,
    backend: Choose,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    backend("cuda")
    file, old, new = FAULTS[fault]
    shutil.copytree(source.shader_folder(), tmp_path / "shaders")
    changed = tmp_path / "shaders" / "cuda" / file
    text = changed.read_text()
    assert old in text
    changed.write_text(text.replace(old, new, 1))
    monkeypatch.setattr(source, "shader_folder", lambda: tmp_path / "shaders")
    cuda_source._included.cache_clear()
    try:
        assert_stock_serves()
    finally:
        cuda_source._included.cache_clear()


@on_gpu
@pytest.mark.parametrize("m", [1, 4, 8, 16, 32, 64])
def test_on_a_gpu_every_kernel_of_a_model_passes(
    m: int, guarded: None, backend: Choose
) -> None:
    backend("cuda")
    for dtype in ("float16", "bfloat16"):
        for n, k in ((4096, 4096), (14336, 4096), (4096, 14336)):
            problem = problem_of(m, n, k, dtype=dtype, layout="marlin")
            plan = planner.choose(problem, target())
            assert guard.why_not(plan) is None
            assert miniatures(plan)[0] is not plan
