"""What MLX would send to the GPU for one call of a custom kernel.

MLX writes the kernel's signature, picks address spaces and instantiates templates. It
does so without a GPU while a function is exported, and hands the result to a callback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Size = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """One dispatch, as MLX has written it.

    Attributes:
        kernel: Name of the function in `text`.
        text: Metal source: header, signature and body, instantiation.
        grid: Threads in x, y and z.
        threadgroup: Threads of a threadgroup in x, y and z, as asked for.
        info: For each input whether its shape, strides and rank are parameters too.
        ensure_row_contiguous: Whether strided inputs are copied first.
    """

    kernel: str
    text: str
    grid: Size
    threadgroup: Size
    info: tuple[tuple[bool, bool, bool], ...]
    ensure_row_contiguous: bool

    @property
    def clamped_threadgroup(self) -> Size:
        """Threads of a threadgroup that is not cut off: never more than the grid."""
        (a, b, c), (x, y, z) = self.threadgroup, self.grid
        return min(a, x), min(b, y), min(c, z)

    @property
    def threadgroups(self) -> int:
        """How many threadgroups there are, cut off ones included."""
        sizes = zip(self.grid, self.clamped_threadgroup, strict=True)
        return math.prod(-(-threads // size) for threads, size in sizes)


def record(call: Callable[..., Any], inputs: Sequence[mx.array]) -> Dispatch:
    """Records `call(*inputs)`, which makes exactly one custom kernel.

    Args:
        call: Calls the kernel on its arguments and returns the outputs.
        inputs: Arrays of the right shapes and dtypes; their values are not read.

    Returns:
        The dispatch.
    """
    dispatches: list[list[Any]] = []

    def keep(node: dict[str, Any]) -> None:
        if node.get("name") == "CustomKernel":
            dispatches.append(node["arguments"])

    blanks = [mx.zeros(array.shape, array.dtype) for array in inputs]
    mx.export_function(keep, call, *blanks)
    (arguments,) = dispatches
    kernel, text, *sizes = arguments[:8]
    return Dispatch(
        kernel=kernel,
        text=text,
        grid=(sizes[0], sizes[1], sizes[2]),
        threadgroup=(sizes[3], sizes[4], sizes[5]),
        info=tuple(arguments[8]),
        ensure_row_contiguous=arguments[9],
    )
