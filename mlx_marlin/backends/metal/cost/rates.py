"""Throughput of Apple GPUs: fitted rates of each generation, and times that follow.

The rates are fitted to published times of stock MLX on M3 Max and M4 Pro, within 6 %.
"""

from dataclasses import dataclass

from mlx_marlin.backends.metal.device import Device

SCHEDULERS_PER_CORE = 4
"""Simdgroup instructions that a core can issue per clock (metal-benchmarks)."""
LANE_BYTES_PER_CLOCK = 85
"""Bytes that the loads of a core return to lanes per clock (fit: M3 Max, M4 Pro)."""
FURTHER_DISPATCH = 1.6e-6
"""Seconds for the barrier and launch of each dispatch after the first (reported: 1.3
to 2 us)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Fitted rates of one chip generation.

    Attributes:
        matrix_slots: Issue slots of one 8x8 product.
        exposed: Share of the other slots that is not hidden behind the products.
        bandwidth: Share of the stated memory bandwidth that kernels reach.
    """

    matrix_slots: float
    exposed: float
    bandwidth: float


APPLE9 = Rates(matrix_slots=16, exposed=0.6, bandwidth=0.9)
"""M3 and M4, fitted to published M3 Max and M4 Pro times."""
NEWEST = Rates(matrix_slots=16, exposed=0.6, bandwidth=0.8)
"""M5: as M3 and M4, except for the bandwidth, where the published times of one row do
not support more."""
EARLIER = Rates(matrix_slots=20, exposed=1.0, bandwidth=0.8)
"""M1, M2 and unknown chips: no published time to fit, hence the slowest known rates."""
RATES = {"M3": APPLE9, "M4": APPLE9, "M5": NEWEST}


def rates_of(device: Device) -> Rates:
    """Returns the fitted rates of a device's generation."""
    return RATES.get(device.generation, EARLIER)


def memory_seconds(size: int, device: Device) -> float:
    """Returns the seconds to move `size` bytes at the fitted bandwidth."""
    return size / (rates_of(device).bandwidth * device.bandwidth_gbs * 1e9)


def slots_per_second(device: Device) -> float:
    """Returns the issue slots per second of all cores."""
    return SCHEDULERS_PER_CORE * (device.cores * device.clock_ghz * 1e9)


def lane_bytes_per_second(device: Device) -> float:
    """Returns the bytes per second that the loads of all cores return to lanes."""
    return LANE_BYTES_PER_CLOCK * (device.cores * device.clock_ghz * 1e9)
