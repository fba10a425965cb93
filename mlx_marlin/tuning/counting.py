"""The emulator's counters as a clock: the same on every machine, and no time at all.

The weights are those of Metal's cost model. The counters do not see
arithmetic outside of matrices, nor how evenly cores are loaded, so this clock serves to
try the whole way without a Mac, not to choose plans for one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlx_marlin.backends.metal import cost
from mlx_marlin.backends.metal.device import Device

if TYPE_CHECKING:
    from mlx_marlin.emulator import Counters

OTHER = ("simd", "shuffle", "simdgroup barrier", "matrix memory", "barrier")
"""Kinds of operations that take a slot each; products of matrices take more."""


def counted_seconds(launches: Sequence["Counters"], device: Device) -> float:
    """Returns what counted launches would take by the weights of the cost model.

    The longer of two times: all bytes that device memory is asked for, over its
    bandwidth, and all slots (8x8 products, other operations, accesses) over the
    schedulers' rate; and the price of each launch after the first.

    Args:
        launches: What the emulator counted, at least one launch.
        device: Whose bandwidth, cores and clock to take.
    """
    rates = cost.rates_of(device)
    slots = sum(
        rates.matrix_slots * each.count("matrix")
        + rates.exposed * (_accesses(each) + sum(map(each.count, OTHER)))
        for each in launches
    )
    clocks = device.cores * device.clock_ghz * 1e9
    memory = cost.memory_seconds(sum(map(_device_bytes, launches)), device)
    issue = slots / (cost.SCHEDULERS_PER_CORE * clocks)
    return max(memory, issue) + cost.FURTHER_DISPATCH * (len(launches) - 1)


def _accesses(counters: "Counters") -> int:
    return sum(each.accesses for each in counters.traffic)


def _device_bytes(counters: "Counters") -> int:
    return sum(
        each.read_bytes
        - each.repeated_read_bytes
        + each.written_bytes
        - each.repeated_written_bytes
        for each in counters.traffic
        if each.space == "device"
    )
