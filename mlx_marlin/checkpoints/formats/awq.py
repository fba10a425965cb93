"""Reads AWQ checkpoints in AutoAWQ's GEMM layout.

Layout: `qweight` int32 [k, n / 8], `qzeros` int32 [groups, n / 8], `scales` [groups,
n]. Nibbles 0 to 7 of a word belong to columns 0, 2, 4, 6, 1, 3, 5, 7 of its eight.
"""

from typing import Any

import mlx.core as mx

from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.formats.integers import integer_weight
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.weights.bit_streams import words_of_codes

BITS = 4
NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of each of the eight columns."""


def read(folder: Folder, layer: str, settings: dict[str, Any]) -> StoredWeight:
    """Reads the weight of a layer.

    Args:
        folder: The checkpoint.
        layer: Name of the layer.
        settings: The checkpoint's `quantization_config`.

    Raises:
        ValueError: If the variant is not GEMM with 4 bits, or the layer's tensors are
            malformed or do not fit each other.
    """
    version = str(settings.get("version", "gemm")).lower()
    bits = settings.get("bits", settings.get("w_bit", BITS))
    if version != "gemm" or bits != BITS:
        raise ValueError(f"AWQ version {version!r}, {bits} bits; expected 'gemm', 4")
    codes = _rows(folder.read(f"{layer}.qweight"))
    scales = folder.read(f"{layer}.scales")
    zeros = None
    if f"{layer}.qzeros" in folder.arrays:
        zeros = _rows(folder.read(f"{layer}.qzeros"))
    k = codes.shape[1]
    if k % 8 or scales.ndim != 2:
        raise ValueError(f"codes of shape {codes.shape} with scales {scales.shape}")
    return integer_weight(
        words_of_codes(codes, BITS),
        mx.contiguous(scales.T),
        zeros,
        bits=BITS,
        k=k,
    )


def _rows(words: mx.array) -> mx.array:
    """Returns the integers of words [k, n / 8] as uint8 [n, k]."""
    if words.ndim != 2 or words.dtype != mx.int32:
        raise ValueError(f"{words.dtype} {words.shape}, expected int32 [rows, words]")
    turned = mx.contiguous(words.view(mx.uint32).T)
    columns = [
        (turned >> BITS * nibble & 0xF).astype(mx.uint8) for nibble in NIBBLE_OF_COLUMN
    ]
    return mx.stack(columns, axis=1).reshape(-1, words.shape[0])
