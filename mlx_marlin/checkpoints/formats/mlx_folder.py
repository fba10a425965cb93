"""Reads MLX's own checkpoints: `weight`, `scales` and `biases` of a quantized layer."""

from typing import Any

import mlx.core as mx

from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.weights.formats import MODE_DEFAULTS


def read(folder: Folder, layer: str, settings: dict[str, Any]) -> StoredWeight:
    """Reads the weight of a layer, or a batch of them.

    Args:
        folder: The checkpoint.
        layer: Name of the layer.
        settings: The checkpoint's `quantization`, which may have settings of single
            layers.

    Raises:
        ValueError: If settings or tensors are malformed or do not fit each other.
    """
    own = settings.get(layer)
    own = own if isinstance(own, dict) else {}
    group_size, bits, mode = _format({**settings, **own})
    codes = folder.read(f"{layer}.weight")
    scales = folder.read(f"{layer}.scales")
    biases = global_scale = None
    if f"{layer}.biases" in folder.arrays:
        biases = folder.read(f"{layer}.biases")
    if f"{layer}.global_scale" in folder.arrays:
        global_scale = folder.read(f"{layer}.global_scale")
    _check(codes, scales, biases, group_size, bits, mode)
    return StoredWeight(
        codes=codes,
        scales=scales,
        biases=biases,
        group_size=group_size,
        bits=bits,
        mode=mode,
        global_scale=global_scale,
    )


def _format(settings: dict[str, Any]) -> tuple[int, int, str]:
    mode = settings.get("mode", "affine")
    if not isinstance(mode, str) or mode not in MODE_DEFAULTS:
        raise ValueError(f"mode={mode!r}, expected one of {[*MODE_DEFAULTS]}")
    group_size, bits = MODE_DEFAULTS[mode]
    given = settings.get("group_size", group_size), settings.get("bits", bits)
    if not all(type(number) is int and number > 0 for number in given):
        raise ValueError(
            f"group_size={given[0]!r} and bits={given[1]!r}, expected integers from 1"
        )
    return *given, mode


def _check(
    codes: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    group_size: int,
    bits: int,
    mode: str,
) -> None:
    is_affine = mode == "affine"
    if codes.dtype != mx.uint32 or codes.ndim < 2 or not codes.size:
        raise ValueError(
            f"weight {codes.dtype} {codes.shape}, expected uint32 [n, ...]"
        )
    k = codes.shape[-1] * 32 // bits
    expected = (*codes.shape[:-1], k // group_size)
    if scales.shape != expected or k % group_size:
        raise ValueError(
            f"scales {scales.shape}, expected {expected} for weight {codes.shape} with "
            f"bits={bits} and group_size={group_size}"
        )
    if (biases is not None) != is_affine:
        raise ValueError(f"biases for mode={mode!r}: {biases is not None}")
    if is_affine == (scales.dtype == mx.uint8):
        raise ValueError(f"scales are {scales.dtype} for mode={mode!r}")
    if biases is not None and (biases.shape, biases.dtype) != (
        scales.shape,
        scales.dtype,
    ):
        raise ValueError(
            f"biases {biases.dtype} {biases.shape}, expected {scales.dtype} "
            f"{scales.shape}"
        )
