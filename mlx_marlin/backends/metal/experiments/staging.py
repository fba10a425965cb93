"""The pipeline stages of `gemm_staged`: their bytes and their schedule.

Metal has no asynchronous copy, so simdgroups load a stage into registers, decode it and
write it to threadgroup memory; a barrier makes it readable. With b buffers, stage s
uses buffer s % b. While stage s is multiplied, stage s + b - 1 is loaded into the
buffer of the previous stage. With one buffer, loading and multiplying alternate, with a
barrier between them. For three buffers:

    3 buffers        phase 0   phase 1   phase 2   phase 3
    loaded           0, 1      2         3         4
    into buffer      0, 1      2         0         1
    multiplied                 0         1         2
    out of buffer              0         1         2

`shaders/lib/gemm_staged.metal` uses the same names.
"""

BUFFERS = (1, 2, 3)
"""Supported numbers of buffers; four of 64 x 64 x 32 halves would fill the memory."""


def buffer_bytes(m: int, n: int, k: int, element: int) -> int:
    """Returns the bytes of a buffer.

    `element`: bytes of a value.
    """
    return (m + n) * k * element


def barriers(stages: int, buffers: int) -> int:
    """Returns the number of phases of a split, each of which ends with a barrier."""
    return stages * (2 if buffers == 1 else 1) + (buffers > 1)
