"""Compares the time of a product with the limits of a device: the roofline model.

Values and arithmetic only: nothing here measures, prints or needs MLX.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, Literal

from mlx_marlin.backends import devices, registry
from mlx_marlin.planning.device import PlanningDevice, Residency
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import FRAGMENT
from mlx_marlin.weights.formats import TILE_N


def operand_bytes(problem: Problem) -> dict[str, int]:
    """Returns the bytes of a product's operands, each counted once.

    Offsets are biases or zero points; the epilogue has further arrays.
    """
    scales = problem.scale_bytes // problem.format.parameters
    found = {
        "codes": problem.code_bytes,
        "scales": scales,
        "offsets": problem.scale_bytes - scales,
        "activations": problem.activation_bytes,
        "result": problem.output_bytes,
        "epilogue": problem.epilogue.operands * problem.output_bytes,
    }
    return found | {"total": sum(found.values())}


def traffic(plan: Plan) -> dict[str, int]:
    """Returns what the simdgroups of a plan request, as its tiles imply it.

    Caches serve most of what is requested again, so this is no memory traffic. Without
    stages, simdgroups read for themselves: each column of packed tiles reads x, and
    each group of row fragments reads the weight. With stages, a threadgroup reads what
    its tile needs once.
    """
    problem = plan.problem
    rows = FRAGMENT * plan.fragments_m or plan.tile.m
    weight_reads = plan.m_tiles if plan.buffers else -(-problem.m // rows)
    columns = plan.n_tiles if plan.buffers else -(-problem.n // TILE_N)
    once = problem.bytes - problem.weight_bytes - problem.activation_bytes
    return {
        "weight_reads": weight_reads,  # of each weight
        "activation_reads": columns,  # of each activation
        "workspace": plan.workspace_traffic,  # partial sums, written and read back
        "total": once
        + weight_reads * problem.weight_bytes
        + columns * problem.activation_bytes
        + plan.workspace_traffic,
    }


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

    def utilizations(self, point: Point) -> dict[str, float]:
        """Returns operations per second over their peak, bytes over the bandwidth."""
        return {
            "compute": point.tflops / self.tflops,
            "memory": point.bandwidth_gbs / self.bandwidth_gbs,
        }

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


Origin = Literal["measured", "predicted", "assumed"]
"""Where a time comes from: a clock on the device, the cost model, or the caller."""

LOW_OCCUPANCY = 0.25
"""Occupancy below which it is called low: the ALUs of M1 and M2 are busy from about 24
of 96 simdgroups on (metal-benchmarks)."""

CAUSES = {
    "memory": "the operands were in a cache, because too few weights were rotated",
    "compute": "the clock stopped before the GPU had finished, or the time is that of "
    "another product; operands in a cache cannot cause it",
}
"""Likely cause of a time that exceeds a roof."""
CAUSE_OF_PREDICTION = "an error of the cost model"
STAND_IN = "; or the peaks, which are a small device's, because this one is not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A product on a device that a plan, or stock MLX, computed in some time."""

    problem: Problem
    plan: Plan | None  # The plan; None for stock MLX
    device: PlanningDevice
    seconds: float  # The time of the product
    origin: Origin  # Where the time comes from
    # What the emulator counted; None if it did not run the plan
    counts: dict[str, int] | None = None

    @property
    def kernel(self) -> str:
        """The kernel: its name and its simdgroups, or stock MLX's name of it."""
        return "quantized_matmul" if self.plan is None else self.plan.variant

    @property
    def roofline(self) -> Roofline:
        """The roofs for this kernel; stock MLX has the peak of tensor units."""
        has_units = self.plan is None or self.plan.has_tensor_operations
        return Roofline(
            tflops=self.device.stock_tflops if has_units else self.device.tflops,
            bandwidth_gbs=self.device.bandwidth_gbs,
        )

    @property
    def point(self) -> Point:
        """The product's place below the roofs."""
        return Point(
            flops=self.problem.flops, bytes=self.problem.bytes, seconds=self.seconds
        )

    @property
    def refusal(self) -> str | None:
        """Why the time cannot be right, with the likely cause; None if it can be."""
        roofline = self.roofline
        roofs = {
            "compute": f"the peak of {roofline.tflops:.2f} TFLOPS",
            "memory": f"the bandwidth of {roofline.bandwidth_gbs:g} GB/s",
        }
        shares = roofline.utilizations(self.point)
        exceeded = [roof for roof, share in shares.items() if share > 1]
        if not exceeded:
            return None
        said = " and ".join(
            f"{shares[each]:.3f} times {roofs[each]}" for each in exceeded
        )
        # Cached operands exceed the bandwidth only; what explains both is the rest.
        cause = CAUSES[exceeded[0]]
        if self.origin == "predicted":
            cause = CAUSE_OF_PREDICTION
        stand_in = "" if devices.is_known(self.device) else STAND_IN
        return f"{said}; likely cause: {cause}{stand_in}"


def why_low(plan: Plan, resident: Residency, cores: int) -> str | None:
    """Returns why few simdgroups of a plan are resident; None if enough are."""
    if resident.occupancy >= LOW_OCCUPANCY:
        return None
    return {
        "launched threadgroups": f"only {plan.num_threadgroups} threadgroups of "
        f"{plan.simdgroups} simdgroups for {cores} cores",
        "threadgroup memory": f"{plan.threadgroup_bytes} bytes of threadgroup memory "
        f"for each threadgroup",
        "registers": "registers of each thread",
        "threads": f"{plan.threads} threads in each threadgroup",
    }[resident.limit]


SCHEMA = "mlx_marlin.profile"
VERSION = 1
"""Version of the schema. It changes if a field is removed or changes its meaning."""
FIGURES = ("tflops", "stock_tflops", "bandwidth_gbs")
DEVICE = ("name", "variant", "arch", "cores", *FIGURES)
"""Fields of the device in a document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A product that was not profiled."""

    problem: Problem  # The product
    kernel: str  # What was to compute it
    reason: str  # Why it was not profiled


def document(
    device: PlanningDevice, profiles: Sequence[Profile], skipped: Sequence[Skipped] = ()
) -> dict[str, Any]:
    """Returns profiles as values that `json.dumps` accepts."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "device": {name: getattr(device, name) for name in DEVICE},
        "profiles": [_profile(profile) for profile in profiles],
        "skipped": [asdict(row) for row in skipped],
    }


def _profile(profile: Profile) -> dict[str, Any]:
    """Returns a profile; conclusions from a time that cannot be right are None."""
    point, roofline, refusal = profile.point, profile.roofline, profile.refusal
    shares, plan = roofline.utilizations(point), profile.plan
    return {
        "problem": asdict(profile.problem),
        "kernel": profile.kernel,
        "served_by": "stock" if plan is None else "ours",
        "plan": None if plan is None else plan.explain(),
        "origin": profile.origin,
        "point": asdict(point),
        "roofline": asdict(roofline),
        "ridge": roofline.ridge,
        "intensity": point.intensity,
        "tflops": point.tflops,
        "bandwidth_gbs": point.bandwidth_gbs,
        **{f"{roof}_utilization": share for roof, share in shares.items()},
        "attained": None if refusal else roofline.attained(point),
        "bottleneck": None if refusal else roofline.bottleneck(point),
        "refusal": refusal,
        "operands": operand_bytes(profile.problem),
        "traffic": None if plan is None else traffic(plan),
        "counts": profile.counts,
        "occupancy": None if plan is None else _occupancy(plan, profile.device),
    }


def _occupancy(plan: Plan, device: PlanningDevice) -> dict[str, Any]:
    residency = registry.of_device(device).residency(plan, device)
    return asdict(residency) | {
        "resident": residency.resident,
        "occupancy": residency.occupancy,
        "limit": residency.limit,
        "low": why_low(plan, residency, device.cores),
    }
