"""The JSON form of profiles."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlx_marlin.measure.profiling.profile import Profile
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.problem import Problem

SCHEMA = "mlx_marlin.profile"
VERSION = 1
"""Version of the schema. It changes if a field is removed or changes its meaning."""


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
        "device": {
            "name": device.name,
            "variant": device.variant,
            "arch": device.arch,
            "cores": device.cores,
            "tflops": device.tflops,
            "stock_tflops": device.stock_tflops,
            "bandwidth_gbs": device.bandwidth_gbs,
        },
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
