"""Rooflines and traffic: figures of a product from its bytes and operations."""

import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

import metal_emulator
from mlx_marlin.backends import devices, graph, planner
from mlx_marlin.measure import operands
from mlx_marlin.measure.profiling import OperandBytes, Point, Roofline, Traffic
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.problem import problem_of
from mlx_marlin.weights.formats import CHANNEL
from support.choose import Choose
from support.format_cases import GROUPED, layouts_of, step_of
from support.marks import needs_emulator
from support.profiles import sampled


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
    compute = roofline.compute_utilization(point)
    memory = roofline.memory_utilization(point)

    assert roofline.attained(point) == pytest.approx(max(compute, memory))
    assert memory / compute == pytest.approx(roofline.ridge / point.intensity)
    assert bool(roofline.roofs_exceeded(point)) == (max(compute, memory) > 1)
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

    found = OperandBytes.of(problem)

    assert found.codes == n * k * bits / 8
    assert found.scales == n * (k / group) * scale
    assert found.offsets == n * (k / group) * offset
    assert (found.activations, found.result) == (m * k * 2, m * n * 2)
    assert found.epilogue == 0
    assert found.total == problem.bytes


def test_operands_of_an_epilogue_count_too() -> None:
    epilogue = Epilogue(multiply=True, residual=True)
    problem = problem_of(3, 64, 128, epilogue=epilogue)

    found = OperandBytes.of(problem)

    assert found.epilogue == 2 * found.result == 2 * 3 * 64 * 2
    assert found.total == problem.bytes


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

    found, first = Traffic.of(plan), launches[0]

    x, codes = first.of("x"), first.of("w")
    assert x.read_bytes == found.activation_reads * problem.activation_bytes
    assert codes.read_bytes == found.weight_reads * problem.code_bytes
    if plan.is_split:
        sums = first.of("out").written_bytes, launches[1].of("partials").read_bytes
        assert sum(sums) == found.workspace
    assert found.total >= problem.bytes


def test_a_split_adds_its_workspace() -> None:
    problem = problem_of(4, 64, 4096)
    whole, split = (
        planner.make(problem, device=M3_MAX, strategy=strategy, kernel="gemv", **slices)
        for strategy, slices in (("data_parallel", {}), ("split_k", {"k_parallel": 4}))
    )

    assert Traffic.of(whole).workspace == 0
    # Each of 4 slices writes 4 x 64 float32 sums, which are read back.
    assert Traffic.of(split).workspace == 2 * 4 * 4 * 64 * 4
    more = Traffic.of(split).total - Traffic.of(whole).total
    assert more == Traffic.of(split).workspace
