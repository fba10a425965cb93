"""Throughput of Apple GPUs: fitted rates of each generation, and times that follow.

All constants that are fitted or published per chip are here. `benchmarks/stock_fit.py`
fits them again and prints the error of each published time; docs/stock_model.md lists
both.
"""

from dataclasses import dataclass, replace

from mlx_marlin.backends.metal.device import Device

SCHEDULERS_PER_CORE = 4
"""Simdgroup instructions that a core can issue per clock (metal-benchmarks)."""
ULTRA_LANES = 0.85
"""Share of `Rates.lane_bytes` that an Ultra reaches (fit: M3 Ultra, chains)."""
LEVELS = {"unknown": 9e-6, "M1": 9e-6, "M2": 5e-6}
"""Seconds of a dispatch that waits for the one before it, by generation: launch,
barrier, and the time in which the first loads arrive. From published decoding rates, as
time of a token over its dependent dispatches: M1 Max 10 us, M1 Ultra 7 to 10. M2 Pro is
stated as 5.2 (ferrox#149). Unknown chips have the slowest."""
LEVEL = 3e-6
"""The same from M3 on: M4 Pro 2.1 us, M4 Max 2.7 to 4.3; M5 Max is stated as 3 to 4
(rltakashige/mlx-lm)."""
ULTRA_LEVEL = 5.5e-6
"""The same on Ultra chips from M2 on: M3 Ultra 5.3 to 5.6 us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Fitted rates of one chip generation.

    Attributes:
        matrix_slots: Issue slots of one 8x8 product.
        exposed: Share of the other slots that is not hidden behind the products.
        bandwidth: Share of the stated memory bandwidth that kernels reach.
        lane_bytes: Bytes that the loads of a core return to lanes per clock.
    """

    matrix_slots: float
    exposed: float
    bandwidth: float
    lane_bytes: float


APPLE9 = Rates(matrix_slots=16, exposed=0.6, bandwidth=0.9, lane_bytes=85)
"""M3 and M4, fitted to published M3 Max and M4 Pro times."""
M5 = Rates(matrix_slots=16, exposed=0.6, bandwidth=0.8, lane_bytes=106)
"""M5 and M5 Pro: 8x8 products as on M3 and M4, loads as on M5 Max, and the bandwidth of
the published times of one row."""
M5_MAX = replace(M5, bandwidth=0.9)
"""M5 Max, fitted to published times of 1 to 12 rows."""
EARLIER = Rates(matrix_slots=20, exposed=1.0, bandwidth=0.8, lane_bytes=85)
"""M1, M2 and unknown chips: no published time to fit, hence the slowest known rates."""
RATES = {"M3": APPLE9, "M4": APPLE9, "M5": M5}


def rates_of(device: Device) -> Rates:
    """Returns the fitted rates of a device."""
    if (device.generation, device.tier) == ("M5", "max"):
        return M5_MAX
    return RATES.get(device.generation, EARLIER)


def level_seconds(device: Device) -> float:
    """Returns the seconds that a dependent dispatch takes besides its work."""
    if device.tier == "ultra" and device.generation != "M1":
        return ULTRA_LEVEL
    return LEVELS.get(device.generation, LEVEL)


def memory_seconds(size: int, device: Device) -> float:
    """Returns the seconds to move `size` bytes at the fitted bandwidth."""
    return size / (rates_of(device).bandwidth * device.bandwidth_gbs * 1e9)


def slots_per_second(device: Device) -> float:
    """Returns the issue slots per second of all cores."""
    return SCHEDULERS_PER_CORE * device.clocks


def lane_bytes_per_second(device: Device) -> float:
    """Returns the bytes per second that the loads of all cores return to lanes."""
    share = ULTRA_LANES if device.tier == "ultra" else 1.0
    return share * rates_of(device).lane_bytes * device.clocks
