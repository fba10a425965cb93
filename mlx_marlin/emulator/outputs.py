"""What trace mode finds in the outputs of a launch that has ended without a fault."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_marlin.emulator.arrays import raw_array
from mlx_marlin.emulator.engine import Placed
from mlx_marlin.emulator.errors import EmulatorError, EmulatorWarning
from mlx_marlin.emulator.tracing import Memory

if TYPE_CHECKING:
    import numpy.typing as npt

_UNSET = {
    # As it is, and from bfloat.
    mx.float16: ("uint16", (0xFFFF, 0xFFF8)),
    mx.bfloat16: ("uint16", (0xFFFF,)),
    # As it is, from half and from bfloat.
    mx.float32: ("uint32", (0xFFFFFFFF, 0xFFFFE000, 0xFFFF0000)),
}
"""What private variables hold before they are set, NaNs that arithmetic keeps.

Other NaNs are not of these bits: those of a division of zeros, NAN and MLX's.
"""


def check_outputs(
    name: str,
    inputs: Sequence[mx.array],
    outputs: Sequence[tuple[Placed, mx.Dtype]],
    memories: Sequence[Memory],
) -> None:
    """Checks that every element of the outputs has a value.

    Args:
        name: Of the kernel.
        inputs: Its inputs.
        outputs: Its outputs with their dtypes.
        memories: What trace mode knows of the outputs.

    Raises:
        EmulatorError: If an element comes from a private variable that was never set.

    Warns:
        EmulatorWarning: If no thread has written an element.
    """
    given = any(_unset(raw_array(array), array.dtype).any() for array in inputs)
    for (placed, dtype), memory in zip(outputs, memories, strict=True):
        if memory.unwritten:
            _warn(name, placed.argument.name, dtype.size, memory)
        elif placed.argument.size and not given:
            _refuse_unset(name, placed, dtype)


def _warn(name: str, output: str, size: int, memory: Memory) -> None:
    count, total = -(-memory.unwritten // size), memory.bytes // size
    warnings.warn(
        f"kernel {name}: {count} of {total} elements of output {output!r} were never "
        f"written, the first is element {memory.first_unwritten // size}",
        EmulatorWarning,
        stacklevel=5,  # the caller of the kernel
    )


def _refuse_unset(name: str, placed: Placed, dtype: mx.Dtype) -> None:
    unset = _unset(placed.contents(), dtype)
    if unset.any():
        raise EmulatorError(
            f"kernel {name}: element {unset.argmax()} of output "
            f"{placed.argument.name!r} comes from a private variable that was never set"
        )


def _unset(values: npt.NDArray[Any], dtype: mx.Dtype) -> npt.NDArray[Any]:
    """Where values have the bits of a variable that was never set, in one row."""
    import numpy as np

    unsigned, patterns = _UNSET.get(dtype, ("uint8", ()))
    bits = np.ascontiguousarray(values).reshape(-1).view(unsigned)
    return np.isin(bits, patterns)
