"""The roofline model: what a device can reach, and where a product is below it."""

from dataclasses import dataclass
from math import inf
from typing import Literal

Bottleneck = Literal["MEMORY", "COMPUTE", "LATENCY", "BALANCED"]

NEAR_RIDGE = 0.1
"""Largest relative distance from the ridge point of a BALANCED product."""
LEAST_UTILIZATION = 0.5
"""A product that uses less of both roofs is bound by LATENCY."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A product that took some time."""

    flops: int  # Multiplications and additions
    bytes: int  # Bytes of its operands, each counted once
    seconds: float  # The time that it took

    def __post_init__(self) -> None:
        if self.flops < 1 or self.bytes < 1:
            raise ValueError(
                f"flops={self.flops} and bytes={self.bytes} must be at least 1"
            )
        if not 0 < self.seconds < inf:
            raise ValueError(f"seconds={self.seconds} must be above 0 and finite")

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: operations for each byte."""
        return self.flops / self.bytes

    @property
    def tflops(self) -> float:
        """Operations per second, in 10^12."""
        return self.flops / self.seconds / 1e12

    @property
    def bandwidth_gbs(self) -> float:
        """Bytes per second, in 10^9."""
        return self.bytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The two roofs of a device."""

    tflops: float  # Peak of the multiplying units, in 10^12 operations per second
    bandwidth_gbs: float  # Stated memory bandwidth, in 10^9 bytes per second

    def __post_init__(self) -> None:
        if not (0 < self.tflops < inf and 0 < self.bandwidth_gbs < inf):
            raise ValueError(
                f"tflops={self.tflops} and bandwidth_gbs={self.bandwidth_gbs} must be "
                f"above 0 and finite"
            )

    @property
    def ridge(self) -> float:
        """Ridge point: the arithmetic intensity at which the two roofs meet."""
        return self.tflops * 1000 / self.bandwidth_gbs

    def attainable_tflops(self, intensity: float) -> float:
        """Returns the roof above an arithmetic intensity."""
        return min(self.tflops, intensity * self.bandwidth_gbs / 1000)

    def compute_utilization(self, point: Point) -> float:
        """Returns the operations per second over their peak."""
        return point.tflops / self.tflops

    def memory_utilization(self, point: Point) -> float:
        """Returns the bytes per second over the bandwidth."""
        return point.bandwidth_gbs / self.bandwidth_gbs

    def attained(self, point: Point) -> float:
        """Returns the share of the roof above a point that it reaches.

        That is the larger of the two utilizations.
        """
        return point.tflops / self.attainable_tflops(point.intensity)

    def bottleneck(self, point: Point) -> Bottleneck:
        """Returns what limits a product; the first rule that applies decides.

        LATENCY if both utilizations are below a half: neither roof is what limits it.
        BALANCED within a tenth of the ridge point. MEMORY below the ridge point, where
        the memory utilization is the larger one, and COMPUTE above it.
        """
        if self.attained(point) < LEAST_UTILIZATION:
            return "LATENCY"
        if abs(point.intensity / self.ridge - 1) <= NEAR_RIDGE:
            return "BALANCED"
        return "MEMORY" if point.intensity < self.ridge else "COMPUTE"

    def roofs_exceeded(self, point: Point) -> tuple[str, ...]:
        """Returns which of "compute" and "memory" are exceeded, which cannot be."""
        utilizations = {
            "compute": self.compute_utilization(point),
            "memory": self.memory_utilization(point),
        }
        return tuple(name for name, share in utilizations.items() if share > 1)
