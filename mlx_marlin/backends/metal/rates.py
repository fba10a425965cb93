"""Throughput of Apple GPUs: fitted rates of each generation, and times that follow.

Bandwidth and the rate of loads are those of a chip, for all kernels. The price of 8x8
products and the share of `scattered` loads are those of our kernels. `python -m
benchmarks.stock_fit` fits them again and prints the error of each published time;
docs/stock_model.md has the errors.
"""

from dataclasses import dataclass, replace

from mlx_marlin.backends.metal.device import Device

SCHEDULERS_PER_CORE = 4
"""Simdgroup instructions that a core can issue per clock (metal-benchmarks)."""
ULTRA_LANES = 0.94
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
    """Fitted rates of one chip generation."""

    # Issue slots of one 8x8 product in our kernels. No other slots are hidden behind
    # the products
    matrix_slots: float
    bandwidth: float  # Share of the stated memory bandwidth that kernels reach
    # Share of `bandwidth` at which our kernels read codes in MLX's layout: 8 rows of w
    # at a time instead of a whole packed tile
    scattered: float
    lane_bytes: float  # Bytes that the loads of a core return to lanes per clock


APPLE9 = Rates(matrix_slots=19, bandwidth=0.9, scattered=0.9, lane_bytes=85)
"""M3 and M4. Bandwidth and loads are fitted to published times of stock MLX on M3 Max
and M4 Pro, the others to those of a kernel of `gemm_register`'s design on M4 Pro
(mlx-dspark 0.20.3), which reads 212 to 217 GB/s in fragments and 241 to 244 in whole
lines, and multiplies 7.0 to 7.5 of 8.08 TFLOPS: 17 to 19 slots a product."""
M5 = replace(APPLE9, matrix_slots=16, bandwidth=0.8, lane_bytes=106)
"""M5 and M5 Pro: 8x8 products fitted to times of such a kernel on M5 Pro
(krcm0209/sous), loads as on M5 Max, and the bandwidth of the published times of one
row."""
M5_MAX = replace(M5, bandwidth=0.9)
"""M5 Max, fitted to published times of stock MLX with 1 to 12 rows."""
EARLIER = Rates(matrix_slots=20, bandwidth=0.8, scattered=1.0, lane_bytes=85)
"""M1, M2 and unknown chips: no published time to fit, hence the slowest known rates.
The bandwidth is that of scattered reads already."""
RATES = {"M3": APPLE9, "M4": APPLE9, "M5": M5}

MLX_MATRIX_SLOTS = {"M3": 16, "M4": 16, "M5": 16}
"""Issue slots of one 8x8 product of MLX's own kernels (fit: M3 Max, M4 Pro; assumed:
M5). Ours pay `Rates.matrix_slots`."""
SLOWEST_MATRIX_SLOTS = 20
"""The same for other generations, for which nothing was published."""


def mlx_matrix_slots(device: Device) -> int:
    """Returns the issue slots of one 8x8 product of MLX's own kernels."""
    return MLX_MATRIX_SLOTS.get(device.generation, SLOWEST_MATRIX_SLOTS)


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


def memory_seconds(size: float, device: Device) -> float:
    """Returns the seconds to move `size` bytes at the fitted bandwidth."""
    return size / (rates_of(device).bandwidth * device.bandwidth_gbs * 1e9)


def slots_per_second(device: Device) -> float:
    """Returns the issue slots per second of all cores."""
    return SCHEDULERS_PER_CORE * device.clocks


def lane_bytes_per_second(device: Device) -> float:
    """Returns the bytes per second that the loads of all cores return to lanes."""
    share = ULTRA_LANES if device.tier == "ultra" else 1.0
    return share * rates_of(device).lane_bytes * device.clocks
