"""Reads checkpoints of compressed-tensors: `pack-quantized`, `nvfp4-pack-quantized`.

Layout of pack-quantized: `weight_packed` int32 [n, ceil(k * bits / 32)], a stream of
bits along k, low bits first, of codes plus 2^(bits - 1); `weight_scale` [n, groups];
`weight_zero_point` int32 [ceil(n * bits / 32), groups], a stream along n of the same
kind; `weight_g_idx` int32 [k]; `weight_shape` (n, k).

Layout of nvfp4-pack-quantized: `weight_packed` uint8 [n, k / 2], low nibble first;
`weight_scale` E4M3 [n, k / 16]; `weight_global_scale`, by which scales are divided.
"""

from typing import Any, cast

import mlx.core as mx

from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.formats.integers import columns_of_words, integer_weight
from mlx_marlin.checkpoints.stored_weight import StoredWeight, check_finite
from mlx_marlin.products.reference.weight import LARGEST_NVFP4
from mlx_marlin.weights.bit_streams import words_of_codes

WIDTHS = (2, 3, 4, 5, 6, 7, 8)


def read(folder: Folder, layer: str, settings: dict[str, Any]) -> StoredWeight:
    """Reads the weight of a layer.

    Args:
        folder: The checkpoint.
        layer: Name of the layer.
        settings: The checkpoint's `quantization_config`.

    Raises:
        ValueError: If the format is another, or the layer's tensors are malformed or do
            not fit each other.
    """
    if f"{layer}.weight_global_scale" in folder.arrays:
        return _nvfp4(folder, layer)
    return _integers(folder, layer, settings)


def _integers(folder: Folder, layer: str, settings: dict[str, Any]) -> StoredWeight:
    packed = folder.read(f"{layer}.weight_packed")
    scales = folder.read(f"{layer}.weight_scale")
    if packed.dtype != mx.int32 or packed.ndim != 2 or scales.ndim > 2:
        raise ValueError(
            f"weight_packed {packed.dtype} {packed.shape} with weight_scale "
            f"{scales.shape}, expected int32 [n, words] and [n, groups]"
        )
    n, k = _shape(folder, layer, packed)
    bits = _bits(settings, packed, k)
    codes = columns_of_words(packed, bits, k)
    if scales.size == 1:
        scales = mx.broadcast_to(scales.reshape(1, 1), (n, 1))
    zeros = None
    if f"{layer}.weight_zero_point" in folder.arrays:
        stored = folder.read(f"{layer}.weight_zero_point")
        zeros = columns_of_words(mx.contiguous(stored.T), bits, n).T.astype(mx.int32)
    elif bits == 7:
        zeros = mx.full(scales.shape, 64, mx.int32)
    # Kernels read no codes of 7 bits: they are stored in 8, with their zero points.
    bits = 8 if bits == 7 else bits
    if k * bits % 32:
        raise ValueError(f"k={k}, expected a multiple of 32")
    name = f"{layer}.weight_g_idx"
    return integer_weight(
        words_of_codes(codes, bits),
        scales,
        zeros,
        bits=bits,
        k=k,
        group_of_column=folder.read(name) if name in folder.arrays else None,
    )


def _shape(folder: Folder, layer: str, packed: mx.array) -> tuple[int, int]:
    shape = folder.read(f"{layer}.weight_shape")
    if shape.size != 2 or not mx.issubdtype(shape.dtype, mx.integer):
        raise ValueError(
            f"weight_shape {shape.dtype} {shape.shape}, expected the integers n and k"
        )
    n, k = (cast(int, shape.flatten()[axis].item()) for axis in (0, 1))
    if n != packed.shape[0] or k < 1:
        raise ValueError(f"weight_shape {n}, {k} for weight_packed {packed.shape}")
    return n, k


def _bits(settings: dict[str, Any], packed: mx.array, k: int) -> int:
    """Returns the width that the config names and the size of the codes fits."""
    groups = settings.get("config_groups")
    schemes = groups.values() if isinstance(groups, dict) else ()
    named = {
        str(scheme["weights"].get("num_bits"))
        for scheme in schemes
        if isinstance(scheme, dict) and isinstance(scheme.get("weights"), dict)
    }
    words = packed.shape[1]
    fitting = [
        bits for bits in WIDTHS if str(bits) in named and -(-k * bits // 32) == words
    ]
    if len(fitting) != 1:
        raise ValueError(
            f"{words} words for k={k} and num_bits={sorted(named)} of "
            f"config_groups, expected ceil(k * num_bits / 32) for one of {WIDTHS}"
        )
    return fitting[0]


def _nvfp4(folder: Folder, layer: str) -> StoredWeight:
    packed = folder.read(f"{layer}.weight_packed")
    scales = folder.read(f"{layer}.weight_scale")
    divisor = folder.read(f"{layer}.weight_global_scale").astype(mx.float32)
    if packed.dtype != mx.uint8 or packed.ndim != 2 or packed.shape[1] % 8:
        raise ValueError(
            f"weight_packed {packed.dtype} {packed.shape}, expected uint8 [n, k / 2] "
            f"with k a multiple of 16"
        )
    expected = packed.shape[0], packed.shape[1] // 8
    if scales.dtype != mx.uint8 or scales.shape != expected or divisor.size != 1:
        raise ValueError(
            f"weight_scale {scales.dtype} {scales.shape} and weight_global_scale "
            f"{divisor.shape}, expected E4M3 {expected} and one number"
        )
    check_finite(divisor)
    if not mx.all(divisor > 0):
        raise ValueError(f"weight_global_scale={divisor.item()}, expected above 0")
    return StoredWeight(
        codes=packed.view(mx.uint32),
        scales=scales,
        group_size=16,
        bits=4,
        mode="nvfp4",
        global_scale=(LARGEST_NVFP4 / divisor).reshape(1),
    )
