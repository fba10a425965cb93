"""Profiles: roofs, bytes, and what a time of a product means."""

import json
import math
import warnings
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import metal_emulator
from mlx_marlin.backends import devices, graph, planner, registry
from mlx_marlin.backends.metal.device import DEFAULT, Device
from mlx_marlin.measure import operands
from mlx_marlin.measure.profiling import (
    Origin,
    Point,
    Profile,
    Roofline,
    Skipped,
    document,
    operand_bytes,
    traffic,
    why_low,
)
from mlx_marlin.planning.device import PlanningDevice, Residency
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.weights.formats import CHANNEL
from support.choose import Choose
from support.format_cases import GROUPED, layouts_of, step_of
from support.marks import needs_emulator
from support.profiles import sampled

M1, M4_MAX = map(Device.named, ("M1", "M4 Max"))
DECODE = problem_of(
    1, 4096, 4096, mode="symmetric", bits=3, group_size=128, layout="marlin"
)
PREFILL = replace(DECODE, m=512)


def residency(plan: Plan, device: PlanningDevice) -> Residency:
    return registry.of_device(device).residency(plan, device)


def of_plan(
    plan: Plan, device: PlanningDevice, seconds: float, origin: Origin = "assumed"
) -> Profile:
    return Profile(
        problem=plan.problem, plan=plan, device=device, seconds=seconds, origin=origin
    )


def profile(problem: Problem, milliseconds: float) -> Profile:
    plan = planner.choose(problem, M4_MAX)
    return of_plan(plan, M4_MAX, milliseconds / 1e3)


def of_stock(device: PlanningDevice) -> Profile:
    return Profile(
        problem=problem_of(8, 4096, 4096),
        plan=None,
        device=device,
        seconds=1e-3,
        origin="predicted",
    )


def low(plan: Plan, device: PlanningDevice) -> str | None:
    return why_low(plan, residency(plan, device), device.cores)


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
    few = planner.choose(DECODE, M4_MAX)
    assert residency(few, M4_MAX).limit == "launched threadgroups"
    assert low(few, M4_MAX) == "only 128 threadgroups of 2 simdgroups for 40 cores"

    staged = planner.make(
        replace(PREFILL, m=64, n=65536), device=M1, kernel="gemm_staged", buffers=3
    )
    assert "threadgroup memory for each threadgroup" in str(low(staged, M1))

    many = planner.choose(problem_of(512, 4096, 4096, dtype="bfloat16"), M1)
    assert low(many, M1) == "registers of each thread"


@pytest.mark.parametrize("count", [24, 23])
def test_a_quarter_of_a_core_is_enough(count: int) -> None:
    limits = {"launched threadgroups": 99, "threads": count}
    few = Residency(simdgroups=1, max_simdgroups=96, threadgroups=limits)

    found = why_low(planner.choose(DECODE, M4_MAX), few, M4_MAX.cores)

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


def test_stock_mlx_has_the_peak_of_tensor_units() -> None:
    found = of_stock(Device.named("M5"))

    assert found.kernel == "quantized_matmul"
    assert found.roofline.tflops == pytest.approx(16.16, rel=0.01)


def test_the_document_is_complete_and_read_back() -> None:
    good = replace(profile(DECODE, 0.042), counts={"matrix_products": 3})
    bad = profile(PREFILL, 0.85)
    stock = of_stock(M4_MAX)
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
        for roof, share in roofline.utilizations(point).items():
            assert row[f"{roof}_utilization"] == share
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
    assert first["occupancy"]["low"] == low(good.plan, M4_MAX)
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


@pytest.mark.parametrize(
    ("chip", "tflops", "ridge"),
    [
        ("M1", 2.617, 38.5),
        ("M1 Max", 10.617, 26),
        ("M2 Max", 13.600, 33),
        ("M3 Max", 14.1, 34.5),
        ("M4 Max", 16.2, 29.5),
        ("M5 Max", 16.2, 26.5),
    ],
)
def test_peaks_are_those_of_the_alus(chip: str, tflops: float, ridge: float) -> None:
    device = devices.named(chip)
    roofline = Roofline(tflops=device.tflops, bandwidth_gbs=device.bandwidth_gbs)

    assert roofline.tflops == pytest.approx(tflops, rel=0.01)
    assert roofline.ridge == pytest.approx(ridge, rel=0.025)


def test_tensor_units_are_a_roof_of_their_own() -> None:
    m5, m4, h200 = map(devices.named, ("M5 Max", "M4 Max", "H200"))

    assert m5.stock_tflops == pytest.approx(4 * m5.tflops) == pytest.approx(64.6, 0.01)
    assert m4.stock_tflops == m4.tflops
    assert h200.stock_tflops == h200.tflops == 989


ROOFLINE = Roofline(tflops=10.0, bandwidth_gbs=100)  # ridge point 100


@pytest.mark.parametrize(
    ("intensity", "attained", "expected"),
    [
        (10, 0.49, "LATENCY"),
        (100, 0.49, "LATENCY"),
        (1000, 0.49, "LATENCY"),
        (10, 0.51, "MEMORY"),
        (89, 1.0, "MEMORY"),
        (91, 0.51, "BALANCED"),
        (109, 0.51, "BALANCED"),
        (111, 0.51, "COMPUTE"),
        (10_000, 0.51, "COMPUTE"),
    ],
)
def test_the_first_rule_that_applies_decides(
    intensity: int, attained: float, expected: str
) -> None:
    tflops = attained * ROOFLINE.attainable_tflops(intensity)
    flops = intensity * 10**6
    point = Point(flops=flops, bytes=10**6, seconds=flops / tflops / 1e12)

    assert ROOFLINE.bottleneck(point) == expected


sizes = st.integers(1, 10**15)
seconds = st.floats(1e-9, 1e3)
positive = st.floats(1e-2, 1e5)


@given(sizes, sizes, seconds, positive, positive)
def test_the_nearer_roof_is_the_one_above_the_point(
    flops: int, size: int, time: float, tflops: float, bandwidth: float
) -> None:
    point = Point(flops=flops, bytes=size, seconds=time)
    roofline = Roofline(tflops=tflops, bandwidth_gbs=bandwidth)
    compute, memory = roofline.utilizations(point).values()

    assert roofline.attained(point) == pytest.approx(max(compute, memory))
    assert memory / compute == pytest.approx(roofline.ridge / point.intensity)
    if roofline.bottleneck(point) == "MEMORY":
        assert memory > compute
    if roofline.bottleneck(point) == "COMPUTE":
        assert compute > memory


@pytest.mark.parametrize("time", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_is_none_is_refused(time: float) -> None:
    with pytest.raises(ValueError, match=r"seconds=.* must be above 0 and finite"):
        Point(flops=1, bytes=1, seconds=time)


def test_sizes_and_roofs_are_positive() -> None:
    with pytest.raises(ValueError, match="flops=0 and bytes=1 must be at least 1"):
        Point(flops=0, bytes=1, seconds=1)
    with pytest.raises(ValueError, match="tflops=1 and bandwidth_gbs=0 must be above"):
        Roofline(tflops=1, bandwidth_gbs=0)


M3_MAX = devices.named("M3 Max")
FORMATS = [(*row, layout) for row in GROUPED for layout in layouts_of(*row)]
PARAMETERS = {"affine": (2, 2), "symmetric": (2, 0), "zero_point": (2, 2)}
PARAMETERS |= {"codebook": (2, 0), "k_codebook": (1.25, 0)}
PARAMETERS |= {"k_quant 4": (1.25, 1.25), "k_quant 5": (1.25, 1.25)}
PARAMETERS |= {"k_quant 3": (1.125, 0), "k_quant 6": (1.125, 0)}
PARAMETERS |= {"k_quant 2": (0.625, 0.625)}
"""Bytes of a scale and of an offset by mode; the other modes have a byte and none."""


@given(
    st.sampled_from(FORMATS),
    st.sampled_from([1, 2, 7, 512]),
    st.integers(1, 300),
    st.integers(1, 4),
)
def test_each_operand_counts_once_in_every_format(
    format: tuple[str, int, int, str], m: int, n: int, steps: int
) -> None:
    mode, bits, group_size, layout = format
    k = step_of(mode, bits, group_size) * (1 if group_size == CHANNEL else steps)
    group = group_size or k
    problem = problem_of(m, n, k, mode=mode, bits=bits, group_size=group, layout=layout)
    kind = f"{mode} {bits}" if mode == "k_quant" else mode
    scale, offset = PARAMETERS.get(kind, (1, 0))

    found = operand_bytes(problem)

    assert found["codes"] == n * k * bits / 8
    assert found["scales"] == n * (k / group) * scale
    assert found["offsets"] == n * (k / group) * offset
    assert (found["activations"], found["result"]) == (m * k * 2, m * n * 2)
    assert found["epilogue"] == 0
    assert found["total"] == problem.bytes


def test_operands_of_an_epilogue_count_too() -> None:
    epilogue = Epilogue(multiply=True, residual=True)
    problem = problem_of(3, 64, 128, epilogue=epilogue)

    found = operand_bytes(problem)

    assert found["epilogue"] == 2 * found["result"] == 2 * 3 * 64 * 2
    assert found["total"] == problem.bytes


@sampled(3)
@pytest.mark.parametrize(
    ("m", "n", "k", "kernel"),
    [
        (1, 512, 1024, "gemv"),
        (3, 96, 2048, "gemv"),
        (8, 512, 1024, "gemm_register"),
        (33, 256, 512, "gemm_register"),
        (64, 128, 512, "gemm_register"),
        (24, 128, 512, "gemm_staged"),
    ],
)
@needs_emulator
def test_plans_request_what_the_emulator_counts(
    backend: Choose, m: int, n: int, k: int, kernel: str
) -> None:
    backend("emulator")
    problem = problem_of(m, n, k, mode="mxfp8")  # each scale is one byte of each row
    plan = planner.make(problem, device=M3_MAX, kernel=kernel)
    inputs = operands.operands(problem, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", metal_emulator.EmulatorWarning)
        launches = metal_emulator.trace(
            graph.product(plan), inputs.x, *inputs.weights[0]
        )

    found, first = traffic(plan), launches[0]

    x, codes = first.of("x"), first.of("w")
    assert x.read_bytes == found["activation_reads"] * problem.activation_bytes
    assert codes.read_bytes == found["weight_reads"] * problem.code_bytes
    if plan.is_split:
        sums = first.of("out").written_bytes, launches[1].of("partials").read_bytes
        assert sum(sums) == found["workspace"]
    assert found["total"] >= problem.bytes


def test_a_split_adds_its_workspace() -> None:
    problem = problem_of(4, 64, 4096)
    whole, split = (
        planner.make(problem, device=M3_MAX, strategy=strategy, kernel="gemv", **slices)
        for strategy, slices in (("data_parallel", {}), ("split_k", {"k_parallel": 4}))
    )

    assert traffic(whole)["workspace"] == 0
    # Each of 4 slices writes 4 x 64 float32 sums, which are read back.
    assert traffic(split)["workspace"] == 2 * 4 * 4 * 64 * 4
    more = traffic(split)["total"] - traffic(whole)["total"]
    assert more == traffic(split)["workspace"]
