"""Times calls and compares the times with bounds."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Timer = Callable[[], float]


@dataclass(frozen=True)
class Bound:
    """Seconds that a call may take."""

    name: str
    seconds: float


def measure(
    bound: Bound,
    call: Callable[[], object],
    repeats: int = 5,
    calls: int = 1,
    timer: Timer = time.perf_counter,
) -> bool:
    """Prints how long a call takes, and returns whether it is within its bound.

    The least of the samples counts: a busy machine only adds time. Where the median is
    much larger, the machine was busy.

    Args:
        bound: The bound of a call.
        call: What is timed.
        repeats: Number of samples.
        calls: Calls in a sample.
        timer: The clock, in seconds.
    """
    samples = []
    for _ in range(repeats):
        start = timer()
        for _ in range(calls):
            call()
        samples.append((timer() - start) / calls)
    least, median = min(samples), statistics.median(samples)
    is_kept = least <= bound.seconds
    print(
        f"  {bound.name}: {_text(least)} (median {_text(median)}), at most "
        f"{_text(bound.seconds)}{'' if is_kept else ': MISSED'}"
    )
    return is_kept


def _text(seconds: float) -> str:
    """Returns a time in the largest unit of which it has at least one."""
    for unit, factor in (("s", 1), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
