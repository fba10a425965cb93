"""Small Metal kernels on the emulator, for the emulator's own tests."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_emulator import metal_kernel

Array = npt.NDArray[Any]
Size = tuple[int, int, int]

HALVES = mx.arange(64).astype(mx.float16)
FLOATS = mx.arange(64).astype(mx.float32)


def to_numpy(array: mx.array) -> Array:
    """bfloat16 becomes float32, which holds all of its values."""
    if array.dtype == mx.bfloat16:
        array = array.astype(mx.float32)
    return np.array(array)


def run(
    source: str,
    *inputs: Any,
    shape: Sequence[int] = (32,),
    dtype: mx.Dtype = mx.float32,
    grid: int | Size = 32,
    threadgroup: int | Size = 32,
    name: str = "test",
    **more: Any,
) -> Array:
    """Runs a kernel with inputs `a`, `b`, ... and one output `out`."""
    call = {key: more.pop(key) for key in ("template", "init_value") if key in more}
    kernel = metal_kernel(
        name=name,
        input_names=list("abcdefgh"[: len(inputs)]),
        output_names=["out"],
        source=source,
        **more,
    )
    (out,) = kernel(
        inputs=list(inputs),
        output_shapes=[shape],
        output_dtypes=[dtype],
        grid=_size(grid),
        threadgroup=_size(threadgroup),
        **call,
    )
    return to_numpy(out)


def each_thread(expression: str, *inputs: Any, **options: Any) -> Array:
    """Runs `out[i] = expression`, with i the thread's position in the grid."""
    source = f"uint i = thread_position_in_grid.x;\nout[i] = {expression};"
    return run(source, *inputs, **options)


def _size(size: int | Size) -> Size:
    return (size, 1, 1) if isinstance(size, int) else size
