"""Profiles: the time of a product, what it means, and how far to trust it."""

from dataclasses import dataclass
from typing import Literal

from mlx_marlin.backends import devices, registry
from mlx_marlin.measure.profiling.roofline import Point, Roofline
from mlx_marlin.measure.profiling.traffic import Counts, OperandBytes, Traffic
from mlx_marlin.planning.device import PlanningDevice, Residency
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem

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
    stock = registry.of_device(device).predict_stock(problem, device)
    return Profile(
        problem=problem,
        kernel="quantized_matmul" if stock is None else stock.call.kernel,
        served_by="stock",
        device=device,
        seconds=seconds,
        origin=origin,
        roofline=Roofline(
            tflops=device.stock_tflops, bandwidth_gbs=device.bandwidth_gbs
        ),
    )
