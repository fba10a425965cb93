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


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandBytes:
    """Bytes of the operands of a product, each counted once."""

    codes: int  # The codes of the weight
    scales: int  # The scales of its groups
    offsets: int  # The biases or zero points of its groups; 0 in formats without them
    activations: int  # The rows of x
    result: int  # The result
    epilogue: int = 0  # Other arrays of the epilogue

    @staticmethod
    def of(problem: Problem) -> "OperandBytes":
        """Returns the bytes of a problem's operands."""
        scales = problem.scale_bytes // problem.format.parameters
        return OperandBytes(
            codes=problem.code_bytes,
            scales=scales,
            offsets=problem.scale_bytes - scales,
            activations=problem.activation_bytes,
            result=problem.output_bytes,
            epilogue=problem.epilogue.operands * problem.output_bytes,
        )

    @property
    def total(self) -> int:
        """Bytes of all operands."""
        weight = self.codes + self.scales + self.offsets
        return weight + self.activations + self.result + self.epilogue


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the simdgroups of a plan request of device memory.

    Caches serve most of what is requested again, so this is no memory traffic.
    """

    weight_reads: int  # How often each weight is requested
    activation_reads: int  # How often each activation is requested
    workspace: int  # Bytes of partial sums that are written and read back
    total: int  # Bytes of all requests

    @staticmethod
    def of(plan: Plan) -> "Traffic":
        """Returns the requests of a plan, as its tiles imply them.

        Without stages, simdgroups read for themselves: each column of packed tiles
        reads x, and each group of row fragments reads the weight. With stages, a
        threadgroup reads what its tile needs once.
        """
        problem = plan.problem
        rows = FRAGMENT * plan.fragments_m or plan.tile.m
        weight_reads = plan.m_tiles if plan.buffers else -(-problem.m // rows)
        columns = plan.n_tiles if plan.buffers else -(-problem.n // TILE_N)
        once = problem.bytes - problem.weight_bytes - problem.activation_bytes
        return Traffic(
            weight_reads=weight_reads,
            activation_reads=columns,
            workspace=plan.workspace_traffic,
            total=once
            + weight_reads * problem.weight_bytes
            + columns * problem.activation_bytes
            + plan.workspace_traffic,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What the emulator counted when it ran a plan; the same on every machine."""

    launches: int  # Kernels that were launched
    # Bytes that simdgroups requested of device memory, except those that a compiler
    # would keep in registers
    read_bytes: int
    written_bytes: int  # Bytes that they wrote, likewise
    matrix_products: int  # 8x8 matrix products
    barriers: int  # Barriers of threadgroups


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
    """A product on a device, computed by one kernel in some time."""

    problem: Problem  # The product
    kernel: str  # The kernel: its name and its simdgroups, or stock MLX's name of it
    served_by: Literal["ours", "stock"]  # "ours" or "stock"
    device: PlanningDevice  # The device
    seconds: float  # The time of the product
    origin: Origin  # Where the time comes from
    roofline: Roofline  # The roofs for this kernel
    plan: Plan | None = None  # The plan; None for stock MLX
    # The resident threadgroups of the plan; None for stock MLX
    residency: Residency | None = None
    # What the emulator counted; None if it did not run the plan
    counts: Counts | None = None

    def __post_init__(self) -> None:
        Point(flops=1, bytes=1, seconds=self.seconds)  # checks the time

    @property
    def operands(self) -> OperandBytes:
        """Bytes of the operands."""
        return OperandBytes.of(self.problem)

    @property
    def traffic(self) -> Traffic | None:
        """What the plan requests of device memory; None for stock MLX."""
        return None if self.plan is None else Traffic.of(self.plan)

    @property
    def point(self) -> Point:
        """The product's place below the roofs."""
        return Point(
            flops=self.problem.flops, bytes=self.problem.bytes, seconds=self.seconds
        )

    @property
    def refusal(self) -> str | None:
        """Why the time cannot be right, with the likely cause; None if it can be."""
        roofs = self.roofline.roofs_exceeded(self.point)
        if not roofs:
            return None
        point, roofline = self.point, self.roofline
        excess = {
            "compute": f"{roofline.compute_utilization(point):.3f} times the peak of "
            f"{roofline.tflops:.2f} TFLOPS",
            "memory": f"{roofline.memory_utilization(point):.3f} times the bandwidth "
            f"of {roofline.bandwidth_gbs:g} GB/s",
        }
        # Cached operands exceed the bandwidth only; what explains both is the rest.
        cause = CAUSES[roofs[0]]
        if self.origin == "predicted":
            cause = CAUSE_OF_PREDICTION
        exceeded = " and ".join(excess[roof] for roof in roofs)
        known = devices.is_known(self.device)
        stand_in = "" if known else STAND_IN
        return f"{exceeded}; likely cause: {cause}{stand_in}"

    @property
    def low_occupancy(self) -> str | None:
        """Why few simdgroups are resident; None if enough are, or without a plan."""
        if self.plan is None or self.residency is None:
            return None
        if self.residency.occupancy >= LOW_OCCUPANCY:
            return None
        plan, resident = self.plan, self.residency
        return {
            "launched threadgroups": f"only {plan.num_threadgroups} threadgroups of "
            f"{plan.simdgroups} simdgroups for {self.device.cores} cores",
            "threadgroup memory": f"{plan.threadgroup_bytes} bytes of threadgroup "
            f"memory for each threadgroup",
            "registers": "registers of each thread",
            "threads": f"{plan.threads} threads in each threadgroup",
        }[resident.limit]


def of_plan(
    plan: Plan,
    device: PlanningDevice,
    seconds: float,
    origin: Origin,
    counts: Counts | None = None,
) -> Profile:
    """Returns the profile of a plan."""
    peak = device.stock_tflops if plan.has_tensor_operations else device.tflops
    return Profile(
        problem=plan.problem,
        kernel=plan.variant,
        served_by="ours",
        device=device,
        seconds=seconds,
        origin=origin,
        roofline=Roofline(tflops=peak, bandwidth_gbs=device.bandwidth_gbs),
        plan=plan,
        residency=registry.of_device(device).residency(plan, device),
        counts=counts,
    )


def of_stock(
    problem: Problem, device: PlanningDevice, seconds: float, origin: Origin
) -> Profile:
    """Returns the profile of stock MLX."""
    return Profile(
        problem=problem,
        kernel="quantized_matmul",
        served_by="stock",
        device=device,
        seconds=seconds,
        origin=origin,
        roofline=Roofline(
            tflops=device.stock_tflops, bandwidth_gbs=device.bandwidth_gbs
        ),
    )


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
    traffic, counts, plan = profile.traffic, profile.counts, profile.plan
    return {
        "problem": asdict(profile.problem),
        "kernel": profile.kernel,
        "served_by": profile.served_by,
        "plan": None if plan is None else plan.explain(),
        "origin": profile.origin,
        "point": asdict(point),
        "roofline": asdict(roofline),
        "ridge": roofline.ridge,
        "intensity": point.intensity,
        "tflops": point.tflops,
        "bandwidth_gbs": point.bandwidth_gbs,
        "compute_utilization": roofline.compute_utilization(point),
        "memory_utilization": roofline.memory_utilization(point),
        "attained": None if refusal else roofline.attained(point),
        "bottleneck": None if refusal else roofline.bottleneck(point),
        "refusal": refusal,
        "operands": asdict(profile.operands) | {"total": profile.operands.total},
        "traffic": None if traffic is None else asdict(traffic),
        "counts": None if counts is None else asdict(counts),
        "occupancy": _occupancy(profile),
    }


def _occupancy(profile: Profile) -> dict[str, Any] | None:
    residency = profile.residency
    if residency is None:
        return None
    return asdict(residency) | {
        "resident": residency.resident,
        "occupancy": residency.occupancy,
        "limit": residency.limit,
        "low": profile.low_occupancy,
    }
