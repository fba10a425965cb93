"""Reads GPTQ checkpoints, versions 1 and 2.

Layout (AutoGPTQ, GPTQModel): `qweight` int32 [k * bits / 32, n], `qzeros` int32
[groups, n * bits / 32], `scales` [groups, n], `g_idx` int32 [k]; integers are streams
of bits, low bits first, along k and n. Version 1 stores zero points minus one.
"""

from typing import Any

import mlx.core as mx

from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.formats.integers import columns_of_words, integer_weight
from mlx_marlin.checkpoints.stored_weight import StoredWeight

WIDTHS = (2, 3, 4, 8)


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
        stored = columns_of_words(folder.read(f"{layer}.qzeros"), bits, n)
        zeros = (stored.astype(mx.int32) + _least_zero(settings)).T
    name = f"{layer}.g_idx"
    return integer_weight(
        qweight.view(mx.uint32).T,
        mx.contiguous(scales.T),
        zeros,
        bits=bits,
        k=k,
        group_of_column=folder.read(name) if name in folder.arrays else None,
    )


def _least_zero(settings: dict[str, Any]) -> int:
    """Returns the zero point that is stored as 0."""
    known = {"gptq": 1, "gptq_v2": 0}
    version = settings.get("checkpoint_format", "gptq")
    if not isinstance(version, str) or version not in known:
        raise ValueError(f"checkpoint_format={version!r}, expected one of {[*known]}")
    return known[version]


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
