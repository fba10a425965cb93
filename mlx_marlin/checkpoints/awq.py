"""Reads AWQ checkpoints in AutoAWQ's GEMM layout.

Layout: `qweight` int32 [k, n / 8], `qzeros` int32 [groups, n / 8], `scales` [groups,
n]. Nibble i of a word belongs to column `COLUMN_OF_NIBBLE[i]` of its eight columns.
"""

from typing import Any

import mlx.core as mx

from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.integers import integer_weight
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.weights.bit_streams import codes_of_words, words_of_codes

BITS = 4
COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


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
    codes = _in_order(folder.read(f"{layer}.qweight"))
    scales = folder.read(f"{layer}.scales")
    zeros = None
    if f"{layer}.qzeros" in folder.arrays:
        zeros = _in_order(folder.read(f"{layer}.qzeros")).T
    k = codes.shape[0]
    if k % 8 or scales.ndim != 2:
        raise ValueError(f"codes of shape {codes.shape} with scales {scales.shape}")
    return integer_weight(
        words_of_codes(mx.contiguous(codes.T), BITS),
        mx.contiguous(scales.T),
        zeros,
        bits=BITS,
        k=k,
    )


def _in_order(words: mx.array) -> mx.array:
    """Returns the integers of words in the order of columns, uint8 [rows, columns]."""
    if words.ndim != 2 or words.dtype != mx.int32:
        raise ValueError(f"{words.dtype} {words.shape}, expected int32 [rows, words]")
    nibbles = codes_of_words(words.view(mx.uint32), BITS)
    nibbles = nibbles.reshape(*words.shape, 8)
    return nibbles[..., list(NIBBLE_OF_COLUMN)].reshape(words.shape[0], -1)
