"""Estimated seconds of a launch, from the emulator's counters and the cost model.

The result is the same on every machine. The counters include neither scalar arithmetic
nor the balance of work among cores, so this clock serves to test tuning without a Mac,
not to choose plans for one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlx_marlin.backends.metal import cost
from mlx_marlin.backends.metal.device import Device

if TYPE_CHECKING:
    from mlx_marlin.emulator import Counters

FURTHER_DISPATCH = 1.6e-6
"""Seconds for each launch after the first; part of this clock only."""
OTHER = ("simd", "shuffle", "simdgroup barrier", "matrix memory", "barrier")
"""Operations that take one issue slot each. Matrix products take more."""


def counted_seconds(launches: Sequence["Counters"], device: Device) -> float:
    """Returns the estimated seconds of launches.

    That is the longer of two times, plus the cost of each launch after the first: the
    bytes of device memory over its bandwidth, and the issue slots (8x8 products, other
    operations, accesses) over the rate of the schedulers.

    Args:
        launches: The emulator's counters of at least one launch.
        device: The device whose bandwidth, cores and clock rate to use.
    """
    rates = cost.rates_of(device)
    slots = sum(
        rates.matrix_slots * launch.count("matrix")
        + rates.exposed * (_accesses(launch) + sum(map(launch.count, OTHER)))
        for launch in launches
    )
    clocks = device.cores * device.clock_ghz * 1e9
    memory = cost.memory_seconds(sum(map(_device_bytes, launches)), device)
    issue = slots / (cost.SCHEDULERS_PER_CORE * clocks)
    return max(memory, issue) + FURTHER_DISPATCH * (len(launches) - 1)


def _accesses(counters: "Counters") -> int:
    return sum(buffer.accesses for buffer in counters.traffic)


def _device_bytes(counters: "Counters") -> int:
    return sum(
        buffer.read_bytes
        - buffer.repeated_read_bytes
        + buffer.written_bytes
        - buffer.repeated_written_bytes
        for buffer in counters.traffic
        if buffer.space == "device"
    )
