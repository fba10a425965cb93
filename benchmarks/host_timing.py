"""Times short calls that take turns on a busy machine.

The clock is the thread's own, which other processes do not move; that they share the
caches and the cores' clock rate, it cannot tell.
"""

import gc
import random
import time
from collections.abc import Callable, Mapping

QUANTILE = 0.1
"""Of a call's samples, which one counts: a busy machine only adds time, and the least
is as rare as an interruption."""


def in_turn(
    calls: Mapping[str, Callable[[], object]], loops: int, rounds: int
) -> dict[str, float]:
    """Returns the microseconds of each call.

    The order is drawn for each round, and Python's garbage collector is off.

    Args:
        calls: The calls, by their names.
        loops: Repetitions in a sample.
        rounds: Samples of each call.
    """

    def sample(call: Callable[[], object]) -> float:
        start = time.thread_time()
        for _ in range(loops):
            call()
        return (time.thread_time() - start) / loops * 1e6

    return sampled({name: lambda f=f: sample(f) for name, f in calls.items()}, rounds)


def sampled(
    samples: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, float]:
    """Returns the quantile that counts of functions that return a sample."""
    found: dict[str, list[float]] = {name: [] for name in samples}
    order = [*samples]
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            random.shuffle(order)
            for name in order:
                found[name].append(samples[name]())
    finally:
        gc.enable()
    return {name: sorted(each)[int(rounds * QUANTILE)] for name, each in found.items()}
