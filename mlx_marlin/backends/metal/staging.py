"""The stages of `gemm_staged`: their bytes, and the order of loading and multiplying.

Metal has no copy that runs by itself, so a stage is loaded into registers, decoded and
written to threadgroup memory by simdgroups; a barrier is what makes it readable. With b
buffers, stage s lies in buffer s % b. While stage s is multiplied, stage s + b - 1 is
loaded, into the buffer whose stage was multiplied just before; with one buffer there
is a barrier between the two:

    3 buffers        phase 0   phase 1   phase 2   phase 3
    loaded           0, 1      2         3         4
    into buffer      0, 1      2         0         1
    multiplied                 0         1         2
    out of buffer              0         1         2

`shaders/lib/gemm_staged.metal` uses the same names for the same things.
"""

from collections.abc import Iterator
from dataclasses import dataclass

BUFFERS = (1, 2, 3)
"""Buffers that there may be; four of 64 x 64 x 32 halves would fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What happens between two barriers.

    Attributes:
        loads: Stages that are loaded.
        multiplies: The stage that is multiplied, if any.
    """

    loads: tuple[int, ...] = ()
    multiplies: int | None = None


def buffer_bytes(m: int, n: int, k: int, element: int) -> int:
    """Returns the bytes of a buffer: m rows of x and n of w, k values of each.

    Args:
        m: Rows of x.
        n: Rows of w.
        k: Values of each row.
        element: Bytes of a value.
    """
    return (m + n) * k * element


def barriers(stages: int, buffers: int) -> int:
    """Returns how many barriers `phases` has."""
    return stages * (2 if buffers == 1 else 1) + (buffers > 1)


def phases(stages: int, buffers: int) -> Iterator[Phase]:
    """Yields what happens for a split, phase by phase; a barrier ends each.

    Args:
        stages: Stages of the split, at least 1.
        buffers: How many threadgroup memory holds.
    """
    ahead = buffers - 1
    if ahead:
        yield Phase(loads=tuple(range(min(ahead, stages))))
    for stage in range(stages):
        loads = (stage + ahead,) if stage + ahead < stages else ()
        if ahead:
            yield Phase(loads=loads, multiplies=stage)
        else:
            yield Phase(loads=loads)
            yield Phase(multiplies=stage)
