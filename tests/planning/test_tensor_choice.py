"""When `gemm_tensor` is chosen, by the model, and what the model was fitted to."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import kernel_times
from kernel_times import speed
from mlx_marlin.backends import devices, planner
from mlx_marlin.backends.metal import choice, main_loop
from mlx_marlin.backends.metal.cost import predict, tensor_loop
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.main_loop import loop_of
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.products import serving
from support.profiles import sampled

M5 = Device.named("M5")
M5_PRO = Device.named("M5 Pro")
M5_MAX = Device.named("M5 Max")
LARGE = ((17408, 5120), (5120, 17408), (14336, 4096))
"""n and k of products of large models."""
SMALL = ((4096, 4096), (1024, 4096), (248320, 5120))
DOCUMENT = Path(__file__).parents[2] / "docs" / "m5.md"


def kernel_of(problem: Problem, device: Device) -> str:
    served = serving.serve_problem(problem, serving.Place(device=device, is_here=False))
    return served.kernel if isinstance(served, Plan) else "other"


@pytest.mark.parametrize("device", [M5_MAX, M5_PRO], ids=lambda device: device.name)
@pytest.mark.parametrize(("n", "k"), LARGE)
@pytest.mark.parametrize("m", [8, 16])
def test_8_and_16_rows_are_predicted_half_as_fast_again_as_stock_mlx(
    m: int, n: int, k: int, device: Device
) -> None:
    for dtype in ("float16", "bfloat16"):
        problem = problem_of(m, n, k, dtype=dtype)

        assert speed(problem, device) >= 1.5
        assert (kernel_of(problem, device) == "gemm_tensor") == (m == 16)


@sampled(3)
@pytest.mark.parametrize("device", [M5_MAX, M5_PRO, M5], ids=lambda device: device.name)
@pytest.mark.parametrize(("n", "k"), [*LARGE, *SMALL])
def test_no_number_of_rows_is_predicted_to_lose(n: int, k: int, device: Device) -> None:
    for m in range(1, 129):
        assert speed(problem_of(m, n, k, dtype="bfloat16"), device) >= 1


def plans(problem: Problem, device: Device) -> set[str]:
    return {
        each.plan.kernel for each in planner.compare(problem, device=device).candidates
    }


@pytest.mark.parametrize(
    ("device", "m", "n", "k", "compared"),
    [
        *((M5_MAX, m, 17408, 5120, m in (6, 64)) for m in (5, 6, 64, 65)),
        *((M5_PRO, m, 17408, 5120, m == 9) for m in (8, 9)),
        (M5, 8, 17408, 5120, False),
        *((M5_MAX, 11, 2048, k, k == 7872) for k in (7808, 7872)),
        (M5_MAX, 12, 2048, 1024, True),
        (M5_MAX, 16, 2047, 4096, False),
        (replace(M5_MAX, tier="ultra"), 6, 17408, 5120, True),
        (Device.named("M4 Max"), 16, 17408, 5120, False),
        (replace(M5_MAX, has_tensor_system=False), 16, 17408, 5120, False),
        (replace(M5_MAX, arch="applegpu_g17p"), 16, 17408, 5120, False),
        (replace(M5_MAX, arch="applegpu_g16s"), 16, 17408, 5120, False),
        (replace(Device.named("M4 Max"), arch="applegpu_g18p"), 16, 17408, 5120, True),
    ],
    ids=str,
)
def test_the_kernel_is_compared_where_published_gains_held(
    device: Device, m: int, n: int, k: int, compared: bool
) -> None:
    assert ("gemm_tensor" in plans(problem_of(m, n, k), device)) == compared


@pytest.mark.parametrize(("m", "n", "k"), [(16, 1024, 4096), (8, 4096, 2048)])
def test_the_weights_of_a_batch_count_together(m: int, n: int, k: int) -> None:
    for batch, compared in ((1, False), (2, True)):
        problem = problem_of(m, n, k, batch=batch)
        assert choice.is_candidate(problem, M5_MAX) == compared


@pytest.mark.parametrize(
    "problem",
    [
        problem_of(16, 17408, 5120, dtype="float32"),
        problem_of(16, 17408, 5120, invariant=True),
        problem_of(16, 17408, 5120, group_size=16, layout="marlin"),
    ],
    ids=str,
)
def test_the_kernel_is_not_compared_for_what_it_does_not_compute(
    problem: Problem,
) -> None:
    assert "gemm_tensor" not in plans(problem, M5_MAX)


@pytest.mark.parametrize(
    ("arch", "kernel"), [("applegpu_g17s", "gemm_tensor"), ("", "gemm_register")]
)
def test_mlx_s_variable_selects_the_kernel_on_any_machine(
    arch: str, kernel: str, chip: Callable[..., None]
) -> None:
    chip("M4 Max", arch)

    plan = planner.choose(problem_of(16, 17408, 5120), devices.current())

    assert plan.kernel == kernel


@pytest.mark.parametrize("m", [6, 9, 16, 17, 24, 32, 48, 64])
@pytest.mark.parametrize(("n", "k"), [*LARGE, *SMALL, (512, 17408)])
def test_tiles_that_fill_the_gpu_are_not_split_and_fit_it(
    m: int, n: int, k: int
) -> None:
    plan = planner.make(problem_of(m, n, k), device=M5_MAX, kernel="gemm_tensor")

    assert plan.threads <= 256
    assert plan.threadgroup_bytes <= 8192
    if (n, k) in LARGE:
        assert plan.dispatches == 1
    if n == 512 and m == 16:  # few tiles are split along k
        assert plan.dispatches == 2


@pytest.mark.parametrize(
    ("m", "grid", "fragments_m"),
    [
        (16, (1, 1, 8), 2),
        (17, (1, 1, 8), 4),
        (24, (1, 1, 8), 4),
        (32, (1, 1, 8), 4),
        (33, (3, 1, 2), 2),
    ],
)
def test_17_to_32_rows_decode_each_weight_once(
    m: int, grid: tuple[int, int, int], fragments_m: int
) -> None:
    problem = problem_of(m, 17408, 5120)
    plan = planner.make(problem, device=M5_MAX, kernel="gemm_tensor")

    assert isinstance(plan, MetalPlan)
    assert plan.simdgroup_grid == grid
    assert plan.fragments_m == fragments_m
    assert plan.registers == {2: 82, 4: 112}[fragments_m]


def test_two_operations_a_simdgroup_have_fewer_slots_and_the_same_products() -> None:
    for m, mode in product((17, 32), ("affine", "mxfp4")):
        problem = problem_of(m, 17408, 5120, mode=mode, group_size=32)
        one, two = (tensor_loop(problem, count, M5_MAX) for count in (2, 4))

        assert 0.59 < two.slots / one.slots < 0.83
        assert two.lane_bytes < one.lane_bytes
        assert (two.matrix, two.bytes) == (one.matrix, one.bytes)
    # Up to 16 rows there is one operation, however many a simdgroup could have.
    few = problem_of(16, 17408, 5120)
    assert tensor_loop(few, 2, M5_MAX) == tensor_loop(few, 4, M5_MAX)


def test_a_simdgroup_has_one_operation_on_request_or_without_registers() -> None:
    problem = problem_of(24, 17408, 5120)
    of_96_registers = replace(Device.named("M4 Max"), arch="applegpu_g17s")

    def fragments_m(device: Device, **given: Any) -> int:
        plan = planner.make(problem, device=device, kernel="gemm_tensor", **given)
        return plan.fragments_m

    assert fragments_m(M5_MAX) == fragments_m(M5_MAX, simdgroups_m=1) == 4
    assert fragments_m(M5_MAX, simdgroups_m=2) == 2
    assert fragments_m(M5_MAX, fragments_m=2) == 2
    assert fragments_m(of_96_registers) == 2


def test_a_tuner_tries_one_operation_a_simdgroup_too() -> None:
    """The registers of two are counted by hand."""

    def tried(m: int) -> list[int]:
        found = planner.experiments(problem_of(m, 5120, 17408), M5_MAX)
        return [each.fragments_m for each in found if each.kernel == "gemm_tensor"]

    assert (tried(16), tried(24)) == ([], [2])


def test_a_prediction_has_three_walls() -> None:
    """16 rows are bound by feeding the units, which take as long at 8 rows."""
    times = {}
    for m in (8, 16, 32, 64):
        problem = problem_of(m, 17408, 5120)
        plan = planner.make(problem, device=M5_MAX, kernel="gemm_tensor")
        assert isinstance(plan, MetalPlan)
        times[m] = predict(plan, M5_MAX)

    assert times[8].bound == times[16].bound == "issue"
    assert times[8].matrix == times[16].matrix < times[16].memory
    assert times[32].matrix == pytest.approx(2 * times[16].matrix)
    assert times[16].issue < times[32].issue < 1.65 * times[16].issue
    assert times[64].matrix > times[64].memory


def test_feeding_was_fitted_to_published_times() -> None:
    fitted = kernel_times.fitted("gemm_tensor", "M5")

    assert len(fitted) == 4
    assert kernel_times.mean_factor(fitted) == pytest.approx(1, abs=0.02)
    assert all(abs(row.error()) < 0.11 for row in fitted)


def test_our_8x8_products_are_near_those_that_were_measured() -> None:
    measured = kernel_times.fitted("gemm_register", "M4")
    on_m5 = kernel_times.fitted("gemm_register", "M5")

    assert len(measured) == 12
    assert kernel_times.mean_error(measured) <= 0.08
    assert all(abs(row.error()) < 0.08 for row in measured)
    assert kernel_times.mean_error(on_m5) <= 0.02
    text = (DOCUMENT.parent / "stock_model.md").read_text("utf-8")
    assert kernel_times.summary(measured) in text.replace("\n", " ")


@pytest.mark.parametrize("name", ["matrix_slots", "scattered"])
def test_the_constants_of_our_kernels_are_the_best_fit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = kernel_times.fitted("gemm_register", "M4")

    def error(factor: float) -> float:
        value = getattr(main_loop.APPLE9, name) * factor
        changed = replace(main_loop.APPLE9, **{name: value})
        monkeypatch.setitem(main_loop.RATES, "M4", changed)
        loop_of.cache_clear()
        return sum(math.log(1 + row.error()) ** 2 for row in measured)

    try:
        assert error(1) <= min(error(0.95), error(1.05))
    finally:
        loop_of.cache_clear()


def test_the_document_states_the_errors_on_published_times() -> None:
    text = " ".join(DOCUMENT.read_text("utf-8").split())
    errors = [row.error() for row in kernel_times.fitted("gemm_tensor", "M5")]
    others = {row.source: row.error() for row in kernel_times.rows() if not row.fitted}

    # After a change: python tests/kernel_times.py
    assert f"meets them within {100 * max(map(abs, errors)):.0f} %" in text
    assert f"within {100 * others['TensorFold 0.3.5']:.0f} %; 8 bits" in text
    assert f"reads {100 * others['incoai/splash']:.0f} % faster than predicted" in text
