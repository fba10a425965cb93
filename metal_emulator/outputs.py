"""Checks of the outputs of a traced launch that ended without a fault."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from metal_emulator import modes
from metal_emulator.arrays import raw_array
from metal_emulator.errors import EmulatorError, EmulatorWarning
from metal_emulator.memory import MappedArgument
from metal_emulator.tracing import Memory

if TYPE_CHECKING:
    import numpy.typing as npt

_UNSET = {
    # The pattern itself, and converted from bfloat.
    mx.float16: ("uint16", (0xFFFF, 0xFFF8)),
    mx.bfloat16: ("uint16", (0xFFFF,)),
    # The pattern itself, and converted from half and from bfloat.
    mx.float32: ("uint32", (0xFFFFFFFF, 0xFFFFE000, 0xFFFF0000)),
}
"""Bit patterns of uninitialized private variables: NaNs that arithmetic preserves.

0 / 0, NAN and MLX's NaN have other bit patterns.
"""


def check_outputs(
    name: str,
    inputs: Sequence[mx.array],
    outputs: Sequence[tuple[MappedArgument, mx.Dtype]],
    memories: Sequence[Memory],
) -> None:
    """Checks that every element of the outputs has a value."""
    # An input with these bit patterns may be copied to an output.
    ambiguous = any(_unset(raw_array(array), array.dtype).any() for array in inputs)
    for (buffer, dtype), memory in zip(outputs, memories, strict=True):
        if memory.unwritten:
            message = _unwritten(name, buffer.argument.name, dtype.size, memory)
            if modes.options.get().complete:
                raise EmulatorError(message)
            warnings.warn(message, EmulatorWarning, stacklevel=5)  # the caller
        elif buffer.argument.size and not ambiguous:
            _check_set(name, buffer, dtype)


def _unwritten(name: str, output: str, size: int, memory: Memory) -> str:
    count, total = -(-memory.unwritten // size), memory.bytes // size
    return (
        f"kernel {name}: {count} of {total} elements of output {output!r} were never "
        f"written, the first is element {memory.first_unwritten // size}"
    )


def _check_set(name: str, buffer: MappedArgument, dtype: mx.Dtype) -> None:
    unset = _unset(buffer.contents(), dtype)
    if unset.any():
        raise EmulatorError(
            f"kernel {name}: element {unset.argmax()} of output "
            f"{buffer.argument.name!r} comes from a private variable that was never set"
        )


def _unset(values: npt.NDArray[Any], dtype: mx.Dtype) -> npt.NDArray[Any]:
    """Returns, flattened, which values have the bits of an uninitialized variable."""
    import numpy as np

    unsigned, patterns = _UNSET.get(dtype, ("uint8", ()))
    bits = np.ascontiguousarray(values).reshape(-1).view(unsigned)
    return np.isin(bits, patterns)
