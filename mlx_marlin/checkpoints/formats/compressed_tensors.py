"""Reads checkpoints of compressed-tensors, whose formats are named `*pack-quantized`.

Layout of pack-quantized: `weight_packed` int32 [n, ceil(k * bits / 32)], a stream of
bits along k, low bits first, of codes plus 2^(bits - 1); `weight_scale` [n, groups];
`weight_zero_point` int32 [ceil(n * bits / 32), groups], a stream along n of the same
kind; `weight_g_idx` int32 [k]; `weight_shape` (n, k).

Before version 0.18 no code crosses a word: each holds 32 // bits codes, and its highest
bits are not used. Versions up to 0.9 may have zero points that are not packed, int8 [n,
groups], without 2^(bits - 1).

`formats.floating` has the layouts of nvfp4-pack-quantized and mxfp4-pack-quantized.
"""

from typing import Any, cast

import mlx.core as mx

from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.formats import floating
from mlx_marlin.checkpoints.formats.integers import (
    WHOLE_ROW,
    Scheme,
    columns_of_padded_words,
    columns_of_words,
    integer_weight,
    layer_of,
)
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.products.reference.weight import LARGEST_NVFP4
from mlx_marlin.regular_files import quoted, short
from mlx_marlin.weights.bit_streams import words_of_codes

INTEGERS, NVFP4, MXFP4 = (
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
FLOATS = {
    NVFP4: {"group_size": 16, "strategy": "tensor_group"},
    MXFP4: {"group_size": 32, "strategy": "group"},
}
"""What the config says of weights in these formats, beside 4 bits of a float."""
WIDTHS = (2, 3, 4, 5, 6, 7, 8)


def read(folder: Folder, layer: str, settings: dict[str, Any]) -> StoredWeight:
    """Reads the weight of a layer."""
    known = schemes(settings)
    format, global_scale = INTEGERS, f"{layer}.weight_global_scale"
    if folder.arrays[f"{layer}.weight_packed"].dtype == "U8":
        is_scaled = global_scale in folder.arrays or not known[MXFP4]
        format = NVFP4 if is_scaled else MXFP4
    if not known[format]:
        raise ValueError(
            f"weight_packed of {'words' if format == INTEGERS else 'bytes'}, but no "
            f"group of the config has format={format!r}"
        )
    if format == INTEGERS:
        return _integers(folder, layer, known[INTEGERS])
    packed = folder.read(f"{layer}.weight_packed")
    scales = folder.read(f"{layer}.weight_scale")
    if format == MXFP4:
        return floating.weight(packed, scales, "mxfp4")
    divisor = floating.factor(folder.read(global_scale), "weight_global_scale")
    return floating.weight(packed, scales, "nvfp4", LARGEST_NVFP4 / divisor)


def schemes(settings: dict[str, Any]) -> dict[str, list[Scheme]]:
    """Returns the schemes of the config's groups by their formats."""
    usual = settings.get("format")
    usual = None if usual == "mixed-precision" else usual
    known: dict[str, list[Scheme]] = {INTEGERS: [], NVFP4: [], MXFP4: []}
    for group_name, group in (settings.get("config_groups") or {}).items():
        name = short(group_name)
        weights = group.get("weights")
        format = group.get("format") or usual
        if format not in (None, "dense", *known):
            raise ValueError(
                f"{name}: format={quoted(format)}, expected one of {[*known]}"
            )
        if weights is None or format == "dense":
            continue
        number, bits = weights.get("type", "int"), weights.get("num_bits")
        if format is None and number == "float":
            format = MXFP4 if weights.get("group_size") == 32 else NVFP4
        if format in FLOATS:
            _check_float(name, format, weights)
            known[format].append(Scheme(bits=4, symmetric=True))
        elif number != "int":
            raise ValueError(
                f"{name}: type={quoted(number)}, expected 'int' for {INTEGERS}"
            )
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
        f"{name}: strategy={quoted(strategy)} with group_size={quoted(size)}, "
        f"expected 'group' with a size, 'channel' or 'tensor'"
    )


def _is_reordered(name: str, weights: dict[str, Any]) -> bool:
    """Returns whether columns are not in the order of their groups."""
    order = weights.get("actorder")
    if order not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise ValueError(
            f"{name}: actorder={quoted(order)}, expected 'group' or 'weight'"
        )
    return order in (True, "group", "dynamic")  # "weight" reorders while calibrating


def _check_float(name: str, format: str, weights: dict[str, Any]) -> None:
    usual = {"num_bits": 4, "type": "float", "symmetric": True, "actorder": None}
    for key, value in {**usual, **FLOATS[format]}.items():
        given = weights.get(key, value)
        if given != value or type(given) is not type(value):
            raise ValueError(
                f"{name}: {key}={quoted(given)}, expected {value!r} for {format}"
            )


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
        widths=[(b, k) for b in WIDTHS if packed.shape[1] in _words(b, k)],
        groups=groups,
    )
    bits = own.bits
    unpack = columns_of_words
    if packed.shape[1] != _words(bits, k)[0]:
        unpack = columns_of_padded_words
    codes = unpack(packed, bits, k)
    zeros = None
    if own.zeros is not None:
        stored = folder.read(own.zeros)
        if stored.dtype == mx.int8:
            zeros = _zeros_of_int8(stored, bits)
        else:
            zeros = unpack(mx.contiguous(stored.T), bits, n).T.astype(mx.int32)
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


def _words(bits: int, count: int) -> tuple[int, int]:
    """Returns the words of a stream of codes, and of codes that cross no word."""
    return -(-count * bits // 32), -(-count // (32 // bits))


def _zeros_of_int8(stored: mx.array, bits: int) -> mx.array:
    middle = 2 ** (bits - 1)
    zeros: mx.array = stored.astype(mx.int32) + middle
    if not mx.all((zeros >= 0) & (zeros < 2 * middle)):
        raise ValueError(
            f"zero points from {stored.min().item()} to {stored.max().item()}, "
            f"expected {-middle} to {middle - 1} for {bits} bits"
        )
    return zeros


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
