"""Estimated seconds of a launch, from the emulator's counters and the cost model.

The result is the same on every machine. The counters include neither scalar arithmetic
nor the balance of work among cores, so this clock serves to test tuning and benchmarks
without a Mac, not to choose plans for one. Stock MLX does not run in the emulator: its
times are the cost model's.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlx_marlin.backends.metal import dequantize
from mlx_marlin.backends.metal.cost import rates
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.stock.prediction import stock_prediction
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.problem import Problem

if TYPE_CHECKING:
    from metal_emulator import Counters

OTHER = ("simd", "shuffle", "simdgroup barrier", "matrix memory", "barrier")
"""Operations that take one issue slot each. Matrix products take more."""


def counted_seconds(
    launches: Sequence["Counters"], device: Device, overlapped: bool = False
) -> float:
    """Returns the estimated seconds of launches.

    That is the longer of two times, plus the cost of each dispatch in a chain: the
    bytes of device memory over its bandwidth, and the issue slots (8x8 products, other
    operations, accesses) over the rate of the schedulers.

    Args:
        launches: The emulator's counters of at least one launch.
        device: The device whose bandwidth, cores and clock rate to use.
        overlapped: Whether other products run at the same time, which hides the
            dispatches.
    """
    fitted = rates.rates_of(device)
    slots = sum(
        fitted.matrix_slots * launch.count("matrix")
        + sum(buffer.accesses for buffer in launch.traffic)
        + sum(map(launch.count, OTHER))
        for launch in launches
    )
    memory = rates.memory_seconds(sum(map(_device_bytes, launches)), device)
    issue = slots / (rates.SCHEDULERS_PER_CORE * device.clocks)
    dispatches = 0 if overlapped else len(launches)
    return max(memory, issue) + rates.level_seconds(device) * dispatches


def stock_seconds(
    problem: Problem, device: PlanningDevice, overlapped: bool = False
) -> float:
    """Returns the seconds that the cost model predicts for `mx.quantized_matmul`.

    Args:
        problem: The product; its epilogue is not included.
        device: An Apple GPU.
        overlapped: Whether other products run at the same time.
    """
    assert isinstance(device, Device)
    prediction = stock_prediction(problem, device)
    return prediction.independent_seconds if overlapped else prediction.seconds


def dequantized_seconds(
    problem: Problem, device: PlanningDevice, overlapped: bool = False
) -> float:
    """Returns the predicted seconds of `mx.dequantize` followed by `mx.matmul`.

    Args:
        problem: The product; its epilogue is not included.
        device: An Apple GPU.
        overlapped: Whether other products run at the same time, which hides both
            dispatches.
    """
    assert isinstance(device, Device)
    hidden = 2 * rates.level_seconds(device) if overlapped else 0.0
    return dequantize.dequantize_seconds(problem, device) - hidden


def _device_bytes(counters: "Counters") -> int:
    return sum(
        buffer.read_bytes
        - buffer.repeated_read_bytes
        + buffer.written_bytes
        - buffer.repeated_written_bytes
        for buffer in counters.traffic
        if buffer.space == "device"
    )
