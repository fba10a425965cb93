"""Profiles of plans and of stock MLX: occupancy, refused times, the JSON form."""

import json
from dataclasses import replace

import pytest

from mlx_marlin.backends import devices, planner, registry
from mlx_marlin.backends.metal.device import DEFAULT, Device
from mlx_marlin.measure.profiling import (
    Counts,
    Point,
    Profile,
    Roofline,
    Skipped,
    document,
    of_plan,
    of_stock,
)
from mlx_marlin.planning.device import PlanningDevice, Residency
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of

M1, M4_MAX = map(Device.named, ("M1", "M4 Max"))
DECODE = problem_of(
    1, 4096, 4096, mode="symmetric", bits=3, group_size=128, layout="marlin"
)
PREFILL = replace(DECODE, m=512)


def residency(plan: Plan, device: PlanningDevice) -> Residency:
    return registry.of_device(device).residency(plan, device)


def profile(problem: Problem, milliseconds: float) -> Profile:
    plan = planner.choose(problem, M4_MAX)
    return of_plan(plan, M4_MAX, milliseconds / 1e3, "assumed")


def test_occupancy_is_resident_simdgroups_over_those_of_a_core() -> None:
    plan = planner.make(
        problem_of(16, 65536, 1024), device=M1, kernel="gemm_register", simdgroups_k=1
    )
    found = residency(plan, M1)

    # By hand: 208 KiB of registers, 60 KiB of threadgroup memory, 3072 threads.
    simdgroups, size = plan.simdgroups, plan.threadgroup_bytes
    assert found.threadgroups["threads"] == 3072 // (32 * simdgroups)
    assert found.threadgroups["threadgroup memory"] == 60 * 1024 // size
    registers = found.threadgroups["registers"]
    # Two row fragments of 4-bit codes: 129 16-bit registers alive, 136 allocated.
    assert registers in (
        208 * 1024 // (2 * count * 32 * simdgroups) for count in (129, 136)
    )
    assert found.resident == min(found.threadgroups.values()) * simdgroups
    assert found.occupancy == found.resident / 96
    assert found.assumed == ""
    assert residency(plan, M4_MAX).assumed == "a core with the memory of an M2"


def test_low_occupancy_names_its_cause() -> None:
    few = profile(DECODE, 0.042)
    assert few.residency.limit == "launched threadgroups"
    assert few.low_occupancy == "only 128 threadgroups of 2 simdgroups for 40 cores"

    staged = planner.make(
        replace(PREFILL, m=64, n=65536), device=M1, kernel="gemm_staged", buffers=3
    )
    found = of_plan(staged, M1, 1.0, "assumed")
    assert found.low_occupancy is not None
    assert "bytes of threadgroup memory for each threadgroup" in found.low_occupancy

    many = planner.choose(problem_of(512, 4096, 4096, dtype="bfloat16"), M1)
    assert of_plan(many, M1, 1.0, "assumed").low_occupancy == "registers of each thread"


@pytest.mark.parametrize("count", [24, 23])
def test_a_quarter_of_a_core_is_enough(count: int) -> None:
    limits = {"launched threadgroups": 99, "threads": count}
    few = Residency(simdgroups=1, max_simdgroups=96, threadgroups=limits)

    found = replace(profile(DECODE, 0.042), residency=few).low_occupancy

    assert (found is None) == (count == 24)


def test_a_threadgroup_is_resident_whatever_it_needs() -> None:
    limits = {"launched threadgroups": 3, "registers": 0}
    found = Residency(simdgroups=4, max_simdgroups=96, threadgroups=limits)

    assert (found.limit, found.resident) == ("registers", 4)


@pytest.mark.parametrize(
    ("name", "warps"), [("H200", 64), ("A100", 64), ("RTX 4090", 48), ("L40S", 48)]
)
def test_cuda_has_occupancy_without_registers(name: str, warps: int) -> None:
    device = devices.named(name)
    plan = planner.choose(replace(DECODE, m=16, bits=4), device)

    found = residency(plan, device)

    assert found.max_simdgroups == warps
    assert "registers" not in found.threadgroups
    assert found.assumed == "no limit by registers"
    assert 0 < found.occupancy <= 1


@pytest.mark.parametrize(
    ("problem", "refused", "said", "cause", "possible"),
    [
        (
            *(PREFILL, 0.85, "1.251 times the peak of 16.16 TFLOPS"),
            *("operands in a cache cannot cause it", 1.07),
        ),
        (
            *(DECODE, 0.012, "1.003 times the bandwidth of 546 GB/s"),
            *("the operands were in a cache", 0.0121),
        ),
    ],
)
def test_more_than_the_peak_or_the_bandwidth_is_refused(
    problem: Problem, refused: float, said: str, cause: str, possible: float
) -> None:
    refusal = profile(problem, refused).refusal

    assert refusal is not None
    assert refusal.startswith(f"{said}; likely cause: ")
    assert cause in refusal
    assert profile(problem, possible).refusal is None


def test_a_refused_prediction_is_an_error_of_the_model() -> None:
    plan = planner.choose(DECODE, M4_MAX)

    refused = of_plan(plan, M4_MAX, 1e-6, "predicted").refusal

    assert refused is not None
    assert refused.endswith("likely cause: an error of the cost model")


def test_an_unknown_device_has_unknown_peaks() -> None:
    device = replace(DEFAULT, name="Apple M9", variant="Apple M9, not in the table")
    plan = planner.choose(PREFILL, device)

    refused = of_plan(plan, device, 1e-3, "measured").refusal

    assert refused is not None
    assert refused.endswith("a small device's, because this one is not known")
    assert "because this one" not in (profile(PREFILL, 0.85).refusal or "")


def test_stock_mlx_has_no_plan() -> None:
    native = problem_of(8, 4096, 4096)
    found = of_stock(native, Device.named("M5"), 1e-3, "predicted")

    assert (found.served_by, found.kernel) == ("stock", "quantized_matmul")
    assert found.traffic is found.residency is found.low_occupancy is None
    assert found.roofline.tflops == pytest.approx(16.16, rel=0.01)


def test_the_document_is_complete_and_read_back() -> None:
    counts = Counts(
        launches=2, read_bytes=1, written_bytes=2, matrix_products=3, barriers=4
    )
    good = replace(profile(DECODE, 0.042), counts=counts)
    bad = profile(PREFILL, 0.85)
    stock = of_stock(problem_of(8, 4096, 4096), M4_MAX, 1e-3, "predicted")
    skipped = Skipped(problem=DECODE, kernel="gemm_staged", reason="too few rows")

    written = json.dumps(document(M4_MAX, [good, bad, stock], [skipped]))
    data = json.loads(written)

    assert (data["schema"], data["version"]) == ("mlx_marlin.profile", 1)
    assert data["device"]["name"] == "Apple M4 Max"
    assert data["device"]["tflops"] == M4_MAX.tflops
    keys = {frozenset(row) for row in data["profiles"]}
    assert len(keys) == 1, "all rows have the same keys"
    for row, known in zip(data["profiles"], (good, bad, stock), strict=True):
        point, roofline = Point(**row["point"]), Roofline(**row["roofline"])
        assert (point, roofline) == (known.point, known.roofline)
        for name in ("tflops", "bandwidth_gbs", "intensity"):
            assert row[name] == getattr(point, name)
        assert row["ridge"] == roofline.ridge
        assert row["compute_utilization"] == roofline.compute_utilization(point)
        assert row["memory_utilization"] == roofline.memory_utilization(point)
        assert row["operands"]["total"] == point.bytes
        assert row["origin"] == known.origin
        assert row["refusal"] == known.refusal
        epilogue = row["problem"].pop("epilogue")
        assert Problem(**row["problem"]) == known.problem
        assert epilogue["activation"] == "none"
    first, second, third = data["profiles"]
    assert (first["bottleneck"], round(first["attained"], 3)) == ("LATENCY", 0.286)
    assert second["bottleneck"] is second["attained"] is None
    assert (first["served_by"], third["served_by"]) == ("ours", "stock")
    assert first["counts"]["matrix_products"] == 3
    assert second["counts"] is third["traffic"] is third["occupancy"] is None
    assert first["traffic"]["weight_reads"] == 1
    assert first["occupancy"]["low"] == good.low_occupancy
    assert first["occupancy"]["resident"] == 8
    assert first["plan"] == good.plan.explain()
    assert data["skipped"][0]["reason"] == "too few rows"


def test_tensor_operations_have_the_peak_of_tensor_units() -> None:
    device = Device.named("Apple M5 Max")
    problem = problem_of(64, 17408, 5120)
    plan = planner.make(problem, device=device, kernel="gemm_tensor")
    other = planner.make(problem, device=device, kernel="gemm_register")

    predicted = of_plan(plan, device, planner.predict(plan, device).seconds, "assumed")

    assert predicted.refusal is None
    assert predicted.roofline.tflops == device.stock_tflops
    assert of_plan(other, device, 1.0, "assumed").roofline.tflops == device.tflops
