"""Reads GPTQ checkpoints, versions 1 and 2.

Layout (AutoGPTQ, GPTQModel): `qweight` int32 [k * bits / 32, n], `qzeros` int32
[groups, n * bits / 32], `scales` [groups, n], `g_idx` int32 [k]; integers are streams
of bits, low bits first, along k and n. Version 1 stores zero points minus one.

Tools read a zero point that version 1 stores as 2^bits - 1 as 2^bits, as 0, or as 0
with a carry into its neighbour. It is only read if GPTQModel wrote the file, whose
subtraction is known; otherwise it becomes 2^bits, which `StoredWeight.checked` refuses.
"""

import re
from typing import Any

import mlx.core as mx

from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.formats.integers import columns_of_words, integer_weight
from mlx_marlin.checkpoints.stored_weight import StoredWeight

WIDTHS = (2, 3, 4, 8)
WHOLE_WIDTHS = (2, 4, 8)
"""Widths of which a word holds whole numbers."""


def read(folder: Folder, layer: str, settings: dict[str, Any]) -> StoredWeight:
    """Reads the weight of a layer.

    Args:
        folder: The checkpoint.
        layer: Name of the layer, such as "model.layers.0.mlp.up_proj".
        settings: The checkpoint's `quantization_config`.

    Raises:
        ValueError: If the layer's tensors are malformed or do not fit each other.
    """
    qweight = folder.read(f"{layer}.qweight")
    scales = folder.read(f"{layer}.scales")
    if scales.ndim != 2 or qweight.ndim != 2 or qweight.dtype != mx.int32:
        raise ValueError(
            f"qweight {qweight.dtype} {qweight.shape} and scales {scales.shape}, "
            f"expected int32 [words, n] and [groups, n]"
        )
    k, bits = _size(folder, layer, settings, qweight)
    n = scales.shape[1]
    zeros = None
    if f"{layer}.qzeros" in folder.arrays:
        zeros = _zero_points(folder.read(f"{layer}.qzeros"), bits, n, settings).T
    name = f"{layer}.g_idx"
    return integer_weight(
        qweight.view(mx.uint32).T,
        mx.contiguous(scales.T),
        zeros,
        bits=bits,
        k=k,
        group_of_column=folder.read(name) if name in folder.arrays else None,
    )


def _zero_points(
    words: mx.array, bits: int, n: int, settings: dict[str, Any]
) -> mx.array:
    """Returns the zero points of packed ones, int32 [groups, n]."""
    stored = columns_of_words(words, bits, n)
    if _least_zero(settings) == 0:
        return stored.astype(mx.int32)
    if bits in WHOLE_WIDTHS and _is_from_gptqmodel(settings):
        # It subtracts from whole words, so that a zero point of 0 borrows from the next
        # one. The sum wraps around, which undoes that.
        ones = sum(1 << shift for shift in range(0, 32, bits))
        restored = columns_of_words(words.view(mx.uint32) + ones, bits, n)
        return restored.astype(mx.int32)
    return stored.astype(mx.int32) + 1


def _least_zero(settings: dict[str, Any]) -> int:
    """Returns the zero point that is stored as 0."""
    known = {"gptq": 1, "gptq_v2": 0}
    version = settings.get("checkpoint_format", "gptq")
    if not isinstance(version, str) or version not in known:
        raise ValueError(f"checkpoint_format={version!r}, expected one of {[*known]}")
    return known[version]


def _is_from_gptqmodel(settings: dict[str, Any]) -> bool:
    """Returns whether GPTQModel 0.9 or later wrote the checkpoint."""
    meta = settings.get("meta")
    tools = meta.get("quantizer") if isinstance(meta, dict) else None
    for tool in tools if isinstance(tools, list) else [tools]:
        found = re.match(r"gptqmodel:(\d+)\.(\d+)", str(tool).lower())
        if found and (int(found[1]), int(found[2])) >= (0, 9):
            return True
    return False


def _size(
    folder: Folder, layer: str, settings: dict[str, Any], qweight: mx.array
) -> tuple[int, int]:
    """Returns k and the bits of a code.

    `g_idx` tells k, and so the bits also of layers that `dynamic` makes exceptions.
    """
    g_idx = folder.arrays.get(f"{layer}.g_idx")
    bits = settings.get("bits")
    if g_idx is not None and g_idx.shape and g_idx.shape[0]:
        bits = qweight.shape[0] * 32 / g_idx.shape[0]
    if bits not in WIDTHS:
        raise ValueError(f"{bits} bits, expected one of {WIDTHS}")
    bits = int(bits)
    return qweight.shape[0] * 32 // bits, bits
