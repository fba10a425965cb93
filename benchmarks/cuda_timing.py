"""Two ways to time a product, both by the host's clock, which decide what waits.

"eval": 30 products are built, evaluated by one `mx.eval` and waited for. Nothing of it
overlaps but the products of that evaluation: building the graph, encoding it and the
GPU's work follow each other, as for who asks for one result. The acceptance judges it.

"stream": the same evaluations one after the other by `mx.async_eval`, and the host
waits for the last one only. While the GPU computes, the host builds and encodes what
comes next, as in decoding, and as PyTorch's queue does it. So a product takes what the
slower of host and GPU needs.

Either way the graph of an evaluation is built by 30 calls, or is one that was traced.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Build = Callable[[], list[mx.array]]
"""Builds the graph of an evaluation, of as many products each time."""

WARM_UPS, WARM_SECONDS = 2, 0.1
"""Least rounds and time before those that count: an idle chip clocks low."""


@dataclass(frozen=True)
class Clock:
    """How often products are timed.

    Attributes:
        products: Products of an evaluation.
        repeats: Times by "eval", of which the median counts.
        streams: Likewise by "stream".
        evals: Evaluations of a stream.
    """

    products: int
    repeats: int
    streams: int
    evals: int


@dataclass(frozen=True)
class Time:
    """Microseconds of a product, its share of an evaluation of several.

    Attributes:
        whole: From before its graph is built to when it has run.
        build: Of these, building the graph, before MLX starts anything.
    """

    whole: float
    build: float


def time_of_eval(build: Build) -> Time:
    mx.synchronize()
    start = time.perf_counter()
    graph = build()
    built = time.perf_counter()
    mx.eval(graph)
    mx.synchronize()
    end = time.perf_counter()
    return Time(*((until - start) / len(graph) * 1e6 for until in (end, built)))


def time_of_stream(build: Build, evals: int) -> float:
    """Returns the microseconds of a product in a chain of evaluations."""
    products = 0
    mx.synchronize()
    start = time.perf_counter()
    for _ in range(evals):
        graph = build()
        mx.async_eval(graph)
        products += len(graph)
    mx.synchronize()
    return (time.perf_counter() - start) / products * 1e6


def times_of(builds: dict[str, Build], clock: Clock) -> dict[str, Any]:
    """Times evaluations that take turns.

    Returns:
        Medians and ranges as a row of the report has them: "ours_us", "ours_range_us",
        "ours_build_us", "ours_stream_us" and "ours_stream_range_us" for "ours".
    """
    warm, started = 0, time.monotonic()
    while warm < WARM_UPS or time.monotonic() - started < WARM_SECONDS:
        for build in builds.values():
            time_of_eval(build)
        warm += 1
    evals: dict[str, list[Time]] = {name: [] for name in builds}
    streams: dict[str, list[float]] = {name: [] for name in builds}
    for _ in range(clock.repeats):
        for name, build in builds.items():
            evals[name].append(time_of_eval(build))
    for _ in range(clock.streams):
        for name, build in builds.items():
            streams[name].append(time_of_stream(build, clock.evals))
    row: dict[str, Any] = {}
    for name in builds:
        whole = [each.whole for each in evals[name]]
        row[f"{name}_build_us"] = statistics.median(each.build for each in evals[name])
        row |= _summed_up(name, whole) | _summed_up(f"{name}_stream", streams[name])
    return row


def _summed_up(name: str, times: list[float]) -> dict[str, Any]:
    return {
        f"{name}_us": statistics.median(times),
        f"{name}_range_us": [min(times), max(times)],
    }


def measured_bandwidth(nbytes: int, repeats: int) -> float:
    """Returns the bytes a microsecond that negating a large array reads and writes."""
    array = mx.zeros(nbytes // 2, mx.float16)
    mx.eval(array)

    def copies() -> list[mx.array]:
        return [-array for _ in range(4)]

    time_of_eval(copies)
    times = [time_of_eval(copies).whole for _ in range(repeats)]
    return 2 * array.nbytes / statistics.median(times)
