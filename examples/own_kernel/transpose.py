"""A Metal kernel of your own: the transpose of a matrix."""

from pathlib import Path
from typing import Any

import mlx.core as mx

SOURCE = (Path(__file__).parent / "transpose.metal").read_text(encoding="utf-8")
LAST_BARRIER = (
    "threadgroup_barrier(mem_flags::mem_threadgroup);  // the tile has been read"
)
WITH_RACE = SOURCE.replace(LAST_BARRIER, "")
KERNEL: dict[str, Any] = {
    "name": "transpose",
    "input_names": ["x"],
    "output_names": ["y"],
}


def launch(rows: int, columns: int, pitch: int = 33) -> dict[str, Any]:
    """Returns the arguments of a call, except its inputs.

    Args:
        rows: Rows of x.
        columns: Columns of x.
        pitch: Floats from one row of a tile to the next in threadgroup memory.
    """
    return {
        "template": [("ROWS", rows), ("COLUMNS", columns), ("PITCH", pitch)],
        "grid": (-(-columns // 32) * 32, 8, 1),
        "threadgroup": (32, 8, 1),
        "output_shapes": [(columns, rows)],
        "output_dtypes": [mx.float32],
    }


def transpose(x: mx.array, *, pitch: int = 33, source: str = SOURCE) -> mx.array:
    """Returns the transpose of a float32 matrix, computed by the kernel."""
    kernel = mx.fast.metal_kernel(**KERNEL, source=source)
    (y,) = kernel(inputs=[x], **launch(*x.shape, pitch=pitch))
    return y
