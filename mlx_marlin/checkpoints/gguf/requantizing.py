"""Types without kernels of their own: decoded once, and quantized anew.

The package `gguf`, which is llama.cpp's own, decodes them.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_marlin.checkpoints.gguf.block_types import BlockType
from mlx_marlin.checkpoints.gguf.blocks import LAYOUTS, PLAIN
from mlx_marlin.checkpoints.quantization import Quantization, rows_at_a_time
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.weights.formats import FORMATS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from mlx_marlin.checkpoints.gguf.rows import Index

DECODED = ("IQ", "TQ")
"""Beginnings of the names of types that the package `gguf` decodes."""


def quantization_of(bits: int | None) -> Quantization | None:
    """Returns how `requantize=bits` quantizes: affine codes in groups of 64."""
    if bits is None:
        return None
    known = [width for mode, width in FORMATS if mode == "affine"]
    if isinstance(bits, bool) or bits not in known:
        raise ValueError(f"requantize={bits!r}, expected one of {known}")
    return Quantization(bits=bits)


def check_nothing_asked(path: str | Path, quantization: Quantization | None) -> None:
    """Raises a ValueError if weights of a folder are to be quantized anew."""
    if quantization is not None:
        raise ValueError(
            f"{path}: requantize={quantization.bits}, which is for GGUF files only; "
            f"`mlx-marlin convert --bits` quantizes plain weights"
        )


def check_decoder(name: str, quantization: Quantization | None) -> None:
    """Checks that a type without kernels can be quantized anew."""
    if not name.startswith(DECODED):
        read = ", ".join([*LAYOUTS, *PLAIN])
        raise ValueError(f"{name} is not one of the types that are read: {read}")
    if quantization is None:
        raise ValueError(
            f"{name} has no kernels; `mlx-marlin convert --requantize 4`, or "
            f"requantize=4 in Python, decodes it once and quantizes it anew, with an "
            f"error that the table of `convert` shows"
        )
    _decoder(name)


def requantized(
    data: memoryview,
    block: BlockType,
    shape: tuple[int, ...],
    quantization: Quantization,
    rows: "Index | None" = None,
) -> StoredWeight:
    """Decodes a weight [..., n, k] a few rows at a time, and quantizes it anew.

    Scales become float16. `rows` are those of each matrix that are read, in this order.
    """
    import numpy as np

    octets = np.frombuffer(data, np.uint8)
    octets = octets.reshape(*shape[:-1], shape[-1] // block.elements * block.nbytes)
    if rows is not None:
        octets = octets[..., rows, :]
        shape = (*shape[:-2], len(rows), shape[-1])
    decoded = _decoded(octets.reshape(-1, octets.shape[-1]), block, shape[-1])
    weight, error = quantization.apply_to_rows(decoded, shape, mx.float16)
    return replace(weight, original=block.name, error=error)


def _decoded(
    octets: "npt.NDArray[np.uint8]", block: BlockType, k: int
) -> Iterator[mx.array]:
    """Yields rows in float32, as many at a time as are quantized together."""
    import numpy as np

    decode, number = _decoder(block.name)
    step = rows_at_a_time(k)
    for first in range(0, len(octets), step):
        with np.errstate(all="ignore"):  # numbers that are not finite are refused later
            yield mx.array(decode(octets[first : first + step], number))


def _decoder(name: str) -> tuple[Any, Any]:
    """Returns the function that decodes rows of bytes, and its name of a type."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise ImportError(
            f"decoding {name} needs the package gguf: pip install gguf", name=error.name
        ) from error
    return quants.dequantize, GGMLQuantizationType[name]
