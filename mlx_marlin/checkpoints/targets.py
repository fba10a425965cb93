"""The arrays that a quantized weight becomes in a checkpoint, and their record."""

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx

from mlx_marlin.checkpoints.stored_weight import TILES, PackedLayer, StoredWeight
from mlx_marlin.weights.formats import MODE_DEFAULTS, format_of
from mlx_marlin.weights.packed_weight import PackedWeight

DECODED_BYTES = 32_000_000
"""Bytes of decoded weights that are in memory at a time to compute an error."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Written:
    """A quantized layer's part of a checkpoint."""

    arrays: dict[str, mx.array]  # Arrays by the last part of their name
    record: dict[str, Any]  # What config.json says about the layer
    # Relative Frobenius error of the weight, 0 if nothing is rounded
    error: float = 0.0


def packed_target(weight: StoredWeight | PackedLayer) -> Written:
    """Returns a weight in our packed layout, exactly."""
    packed = weight.packed()
    arrays = {"words": packed.words, "packed_scales": packed.scales}
    if packed.global_scale is not None:
        arrays["global_scale"] = packed.global_scale
    if weight.input_order is not None:
        arrays["input_order"] = weight.input_order
    return Written(arrays=arrays, record=record_of(packed))


def record_of(packed: PackedWeight) -> dict[str, Any]:
    """Returns what config.json says about a packed layer."""
    return {
        "layout": TILES,
        "n": packed.n,
        "k": packed.k,
        "group_size": packed.group_size,
        "bits": packed.bits,
        "mode": packed.mode,
    }


def mlx_target(weight: StoredWeight | PackedLayer) -> Written:
    """Returns a weight in MLX's layout, for `mlx_lm.load`.

    Zero points become biases, and super-blocks get float32 scales. A bias is rounded if
    the product of scale and zero point has more digits than the scales' dtype.
    """
    if isinstance(weight, PackedLayer):
        weight = weight.stored()
    weight = weight.with_float_scales()
    if weight.input_order is not None:
        raise ValueError("MLX's layers take columns in the order of x (act-order)")
    if weight.global_scale is not None and len(weight.shape) == 2:
        raise ValueError("MLX's linear layers have no global scale")
    if weight.codebook is not None:
        raise ValueError("MLX has no codebooks")
    mode = weight.mode if weight.mode in MODE_DEFAULTS else "affine"
    sizes = format_of(mode, weight.bits).group_sizes
    if weight.group_size not in sizes:
        raise ValueError(
            f"MLX has no {mode} weights in groups of {weight.group_size}, but {sizes}"
        )
    arrays = {"weight": weight.codes, "scales": weight.scales}
    biases, error = _biases(weight)
    if biases is not None:
        arrays["biases"] = biases
    record: dict[str, Any] = {
        "group_size": weight.group_size,
        "bits": weight.bits,
        "mode": mode,
    }
    if weight.global_scale is not None:  # one for each expert
        arrays["global_scale"] = weight.global_scale
        record["global_scale"] = True
    return Written(arrays=arrays, record=record, error=error)


def _biases(weight: StoredWeight) -> tuple[mx.array | None, float]:
    """Returns the biases of affine codes, and the relative error of rounding them."""
    if weight.mode in MODE_DEFAULTS:
        return weight.biases, 0.0
    zeros: mx.array | float = 2.0 ** (weight.bits - 1)
    if weight.biases is not None:
        zeros = weight.biases.astype(mx.float32)
    scales = weight.scales.astype(mx.float32)
    exact = -scales * zeros
    biases = exact.astype(weight.scales.dtype)
    change = biases.astype(mx.float32) - exact
    if not mx.any(change):
        return biases, 0.0
    return biases, _relative(weight, change)


def _relative(weight: StoredWeight, change: mx.array) -> float:
    """Returns the Frobenius norm of a change of biases relative to the weight's.

    The weight is decoded in float32, so many rows at a time that this takes
    `DECODED_BYTES`.
    """
    flat = {
        name: array.reshape(-1, array.shape[-1])
        for name in ("codes", "scales", "biases")
        if (array := getattr(weight, name)) is not None
    }
    rows = max(1, DECODED_BYTES // (4 * weight.shape[-1]))
    total = 0.0
    for first in range(0, len(flat["codes"]), rows):
        own = {name: array[first : first + rows] for name, array in flat.items()}
        values = replace(weight, **own).decoded()
        total += float(cast(float, mx.square(values).sum().item()))
    changed = float(cast(float, mx.square(change).sum().item())) * weight.group_size
    return math.sqrt(changed / total) if total else 0.0
