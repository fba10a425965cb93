"""Three ways to time a product, all by the host's clock, which decide what waits.

"eval": 30 products are built, evaluated by one `mx.eval` and waited for. Nothing of it
overlaps but the products of that evaluation: building the graph, encoding it and the
GPU's work follow each other, as for who asks for one result. The acceptance judges it.

"stream": the same evaluations one after the other by `mx.async_eval`, and the host
waits for the last one only. While the GPU computes, the host builds and encodes what
comes next, as in decoding, and as PyTorch's queue does it. So a product takes what the
slower of host and GPU needs.

"device": one evaluation, queued behind a kernel that waits until the host has encoded
all of it. The time of the wait alone is taken off. What is left is the GPU's: it does
not depend on the host, nor on what calls a product. On CUDA only.
"""

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
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    do {
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begun < nanoseconds[0]);
    waited[0] = static_cast<uint32_t>(now - begun);
"""
WAIT_NANOSECONDS = 4_000_000
"""Five times what a slow host takes to build and encode 30 products."""


@dataclass(frozen=True)
class Clock:
    """How often products are timed.

    Attributes:
        products: Products an evaluation.
        repeats: Times by "eval", of which the median counts.
        streams: Likewise by "stream".
        evals: Evaluations of a stream.
        on_device: Whether they are timed by "device", as often as by "eval".
    """

    products: int
    repeats: int
    streams: int
    evals: int
    on_device: bool


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
    """Returns what the GPU computes for `WAIT_NANOSECONDS`, beside nothing else."""
    kernel: Any = mx.fast.cuda_kernel(
        name="wait", input_names=["nanoseconds"], output_names=["waited"], source=WAIT
    )
    (waited,) = kernel(
        inputs=[mx.array([WAIT_NANOSECONDS], mx.uint32)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.uint32],
    )
    result: mx.array = waited
    return result


def time_behind_wait(call: Call, products: int) -> float | None:
    """Returns the microseconds of a wait and what is queued behind it.

    None if the host had not encoded it all when the wait was over.
    """
    mx.synchronize()
    start = time.perf_counter()
    mx.async_eval(held())
    if products:
        mx.async_eval([call() for _ in range(products)])
    encoded = time.perf_counter()
    mx.synchronize()
    late = (encoded - start) * 1e9 > WAIT_NANOSECONDS
    return None if late else (time.perf_counter() - start) * 1e6


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
    if clock.on_device:
        row |= _times_on_device(calls, clock)
    return row


def _times_on_device(calls: dict[str, Call], clock: Clock) -> dict[str, Any]:
    """Times calls by "device"; one that the host never encodes in time has none."""
    behind: dict[str, list[float]] = {name: [] for name in calls}
    alone: list[float] = []
    for _ in range(clock.repeats):
        for name, call in calls.items():
            alone += _known(time_behind_wait(call, 0))
            behind[name] += _known(time_behind_wait(call, clock.products))
    wait = statistics.median(alone)
    row: dict[str, Any] = {}
    for name, times in behind.items():
        each = [(time - wait) / clock.products for time in times]
        row |= _summed_up(f"{name}_device", each) if each else {}
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
