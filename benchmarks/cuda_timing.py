"""Three ways to time a product, all by the host's clock, which decide what waits.

"eval": 30 products are built, evaluated by one `mx.eval` and waited for. Nothing of it
overlaps but the products of that evaluation: building the graph, encoding it and the
GPU's work follow each other, as for who asks for one result. The acceptance judges it.

"stream": the same evaluations one after the other by `mx.async_eval`, and the host
waits for the last one only. While the GPU computes, the host builds and encodes what
comes next, as in decoding, and as PyTorch's queue does it. So a product takes what the
slower of host and GPU needs.

"device": one evaluation, queued behind a kernel that waits until the host has encoded
all of it, from the end of that kernel. What the same takes with fewer products, which
last longer than the host needs to see that end, is taken off. What is left is the
GPU's: it does not depend on the host, nor on what calls a product. On CUDA only.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Call = Callable[[], mx.array]

WARM_UPS, WARM_SECONDS = 2, 0.1
"""Least rounds and time before those that count: an idle chip clocks low."""
WAIT = """
    const long long begun = clock64();
    while (clock64() - begun < cycles[0]) {
    }
    waited[0] = cycles[0];
"""
WAIT_CYCLES = 5_000_000
"""2.5 ms or more; a slow host takes 1.7 to build and encode the most products."""
FEW_MICROSECONDS, MOST_FEW, MORE = 150.0, 60, 24
"""What fewer products take at least, how many they are at most, and how many more."""
LATE_SECONDS = 1e-4
"""If the host waits less for a wait to end, it may have been over before."""


@dataclass(frozen=True)
class Clock:
    """How often products are timed.

    Attributes:
        products: Products an evaluation.
        repeats: Times by "eval", of which the median counts.
        streams: Likewise by "stream".
        evals: Evaluations of a stream.
        devices: Times by "device"; none where there is no CUDA.
        few: Fewer products of these.
    """

    products: int
    repeats: int
    streams: int
    evals: int
    devices: int
    few: int = 1


@dataclass(frozen=True)
class Time:
    """Microseconds of a product, its share of an evaluation of several.

    Attributes:
        whole: From before its graph is built to when it has run.
        build: Of these, building the graph, before MLX starts anything.
    """

    whole: float
    build: float


def time_of_eval(call: Call, products: int) -> Time:
    mx.synchronize()
    start = time.perf_counter()
    graph = [call() for _ in range(products)]
    built = time.perf_counter()
    mx.eval(graph)
    mx.synchronize()
    end = time.perf_counter()
    return Time(*((until - start) / products * 1e6 for until in (end, built)))


def time_of_stream(call: Call, products: int, evals: int) -> float:
    """Returns the microseconds of a product in a chain of evaluations."""
    mx.synchronize()
    start = time.perf_counter()
    for _ in range(evals):
        mx.async_eval([call() for _ in range(products)])
    mx.synchronize()
    return (time.perf_counter() - start) / (evals * products) * 1e6


def held() -> mx.array:
    """Returns what a thread of the GPU computes for `WAIT_CYCLES`."""
    kernel: Any = mx.fast.cuda_kernel(
        name="wait", input_names=["cycles"], output_names=["waited"], source=WAIT
    )
    (waited,) = kernel(
        inputs=[mx.array([WAIT_CYCLES], mx.int32)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    result: mx.array = waited
    return result


def time_behind_wait(call: Call, products: int) -> float | None:
    """Returns the microseconds from the end of a wait to that of what follows it.

    None if the wait was over before the host had encoded what follows.
    """
    mx.synchronize()
    wait = held()
    mx.async_eval(wait)
    graph = [call() for _ in range(products)]
    mx.async_eval(graph)
    encoded = time.perf_counter()
    mx.eval(wait)
    start = time.perf_counter()
    mx.synchronize()
    late = start - encoded < LATE_SECONDS
    return None if late else (time.perf_counter() - start) * 1e6


def few_of(microseconds: float) -> int:
    """Returns how many products of so many microseconds, or more, are enough."""
    return min(math.ceil(FEW_MICROSECONDS / microseconds), MOST_FEW)


def times_of(calls: dict[str, Call], clock: Clock) -> dict[str, Any]:
    """Times calls that take turns.

    Returns:
        Medians and ranges as a row of the report has them: "ours_us", "ours_range_us",
        "ours_build_us", "ours_stream_us" and "ours_stream_range_us" for a call "ours";
        "ours_device_us" and its range too if the clock has them.
    """
    warm, started = 0, time.monotonic()
    while warm < WARM_UPS or time.monotonic() - started < WARM_SECONDS:
        for call in calls.values():
            time_of_eval(call, clock.products)
        warm += 1
    evals: dict[str, list[Time]] = {name: [] for name in calls}
    streams: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(clock.repeats):
        for name, call in calls.items():
            evals[name].append(time_of_eval(call, clock.products))
    for _ in range(clock.streams):
        for name, call in calls.items():
            streams[name].append(time_of_stream(call, clock.products, clock.evals))
    row: dict[str, Any] = {}
    for name in calls:
        whole = [each.whole for each in evals[name]]
        row[f"{name}_build_us"] = statistics.median(each.build for each in evals[name])
        row |= _summed_up(name, whole) | _summed_up(f"{name}_stream", streams[name])
    if clock.devices:
        row |= _times_on_device(calls, clock)
    return row


def _times_on_device(calls: dict[str, Call], clock: Clock) -> dict[str, Any]:
    """Times calls by "device"; one that the host never encodes in time has none."""
    fewer: dict[str, list[float]] = {name: [] for name in calls}
    every: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(clock.devices):
        for name, call in calls.items():
            fewer[name] += _known(time_behind_wait(call, clock.few))
            every[name] += _known(time_behind_wait(call, clock.few + MORE))
    row: dict[str, Any] = {}
    for name in calls:
        if fewer[name] and every[name]:
            base = statistics.median(fewer[name])
            each = [(time - base) / MORE for time in every[name]]
            row |= _summed_up(f"{name}_device", each)
    return row


def _known(time: float | None) -> list[float]:
    return [] if time is None else [time]


def _summed_up(name: str, times: list[float]) -> dict[str, Any]:
    return {
        f"{name}_us": statistics.median(times),
        f"{name}_range_us": [min(times), max(times)],
    }


def measured_bandwidth(nbytes: int, repeats: int) -> float:
    """Returns the bytes a microsecond that negating a large array reads and writes."""
    array = mx.zeros(nbytes // 2, mx.float16)
    mx.eval(array)
    time_of_eval(lambda: -array, 4)
    times = [time_of_eval(lambda: -array, 4).whole for _ in range(repeats)]
    return 2 * array.nbytes / statistics.median(times)
