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
from mlx_marlin.checkpoints.formats.integers import (
    WHOLE_ROW,
    Scheme,
    columns_of_words,
    integer_weight,
    layer_of,
)
from mlx_marlin.checkpoints.stored_weight import StoredWeight, check_finite
from mlx_marlin.products.reference.weight import LARGEST_NVFP4
from mlx_marlin.weights.bit_streams import words_of_codes

INTEGERS, NVFP4 = "pack-quantized", "nvfp4-pack-quantized"
WIDTHS = (2, 3, 4, 5, 6, 7, 8)


def read(folder: Folder, layer: str, settings: dict[str, Any]) -> StoredWeight:
    """Reads the weight of a layer.

    Args:
        folder: The checkpoint.
        layer: Name of the layer.
        settings: The checkpoint's `quantization_config`.

    Raises:
        ValueError: If the format is another, the layer's tensors are malformed or do
            not fit each other, or the config contradicts them.
    """
    known = schemes(settings)
    is_float = folder.arrays[f"{layer}.weight_packed"].dtype == "U8"
    if not known[NVFP4 if is_float else INTEGERS]:
        raise ValueError(
            f"weight_packed of {'bytes' if is_float else 'words'}, but no group of the "
            f"config has format={NVFP4 if is_float else INTEGERS!r}"
        )
    if is_float:
        return _nvfp4(folder, layer)
    return _integers(folder, layer, known[INTEGERS])


def schemes(settings: dict[str, Any]) -> dict[str, list[Scheme]]:
    """Returns the schemes of the config's groups by their formats.

    Raises:
        ValueError: If there is no group, a format is not known, or a value is of
            another type, out of range or contradicts another one.
    """
    usual = settings.get("format")
    usual = None if usual == "mixed-precision" else usual
    known: dict[str, list[Scheme]] = {INTEGERS: [], NVFP4: []}
    for name, group in (settings.get("config_groups") or {}).items():
        weights = group.get("weights")
        format = group.get("format") or usual
        if format not in (None, "dense", *known):
            raise ValueError(f"{name}: format={format!r}, expected one of {[*known]}")
        if weights is None or format == "dense":
            continue
        number, bits = weights.get("type", "int"), weights.get("num_bits")
        if format == NVFP4 or (format is None and number == "float"):
            _check_nvfp4(name, weights)
            known[NVFP4].append(Scheme(bits=4, group_size=16, symmetric=True))
        elif number != "int":
            raise ValueError(f"{name}: type={number!r}, expected 'int' for {INTEGERS}")
        else:
            scheme = Scheme(
                bits=bits,
                group_size=_group_size(name, weights),
                symmetric=weights.get("symmetric", True),
                act_order=_is_reordered(name, weights),
            )
            known[INTEGERS].append(scheme)
    if not any(known.values()):
        raise ValueError("config_groups has no quantized weights, expected a group")
    return known


def _group_size(name: str, weights: dict[str, Any]) -> Any:
    """Returns the group size that a strategy implies; None if nothing is said."""
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy is None or (strategy == "group" and size not in (None, WHOLE_ROW)):
        return size
    if strategy in ("channel", "tensor") and size in (None, WHOLE_ROW):
        return WHOLE_ROW
    raise ValueError(
        f"{name}: strategy={strategy!r} with group_size={size!r}, expected 'group' "
        f"with a size, 'channel' or 'tensor'"
    )


def _is_reordered(name: str, weights: dict[str, Any]) -> bool:
    """Returns whether columns are not in the order of their groups."""
    order = weights.get("actorder")
    if order not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise ValueError(f"{name}: actorder={order!r}, expected 'group' or 'weight'")
    return order in (True, "group", "dynamic")  # "weight" reorders while calibrating


def _check_nvfp4(name: str, weights: dict[str, Any]) -> None:
    expected = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": 16,
        "strategy": "tensor_group",
        "actorder": None,
    }
    for key, value in expected.items():
        if (given := weights.get(key, value)) != value or type(given) is not type(
            value
        ):
            raise ValueError(f"{name}: {key}={given!r}, expected {value!r} for {NVFP4}")


def _integers(folder: Folder, layer: str, known: list[Scheme]) -> StoredWeight:
    packed = folder.read(f"{layer}.weight_packed")
    scales = folder.read(f"{layer}.weight_scale")
    if packed.dtype != mx.int32 or packed.ndim != 2 or scales.ndim > 2:
        raise ValueError(
            f"weight_packed {packed.dtype} {packed.shape} with weight_scale "
            f"{scales.shape}, expected int32 [n, words] and [n, groups]"
        )
    n, k = _shape(folder, layer, packed)
    if scales.size == 1:
        scales = mx.broadcast_to(scales.reshape(1, 1), (n, 1))
    groups = scales.shape[-1]
    own = layer_of(
        folder,
        known,
        zeros=f"{layer}.weight_zero_point",
        order=f"{layer}.weight_g_idx",
        widths=[(b, k) for b in WIDTHS if -(-k * b // 32) == packed.shape[1]],
        groups=groups,
    )
    bits = own.bits
    codes = columns_of_words(packed, bits, k)
    zeros = None
    if own.zeros is not None:
        stored = mx.contiguous(folder.read(own.zeros).T)
        zeros = columns_of_words(stored, bits, n).T.astype(mx.int32)
        if own.symmetric:
            own.check_zeros(zeros, 2 ** (bits - 1))
            zeros = None
    if bits == 7:  # kernels read no such codes: they are stored in 8
        zeros = mx.full(scales.shape, 64, mx.int32) if zeros is None else zeros
        bits = 8
    if k * bits % 32:
        raise ValueError(f"k={k}, expected a multiple of 32")
    return integer_weight(
        words_of_codes(codes, bits),
        scales,
        zeros,
        bits=bits,
        k=k,
        order=own.column_order(folder, groups),
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
