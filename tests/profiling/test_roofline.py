"""The roofline model: figures of known products, the rules, and their invariants."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.backends import devices
from mlx_marlin.measure.profiling import Point, Roofline


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
