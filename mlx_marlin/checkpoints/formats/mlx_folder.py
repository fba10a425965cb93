"""Reads MLX's own checkpoints: `weight`, `scales` and `biases` of a quantized layer.

mlx-lm gives a layer that `quantization` names what stands there and nothing else. For
the others it infers the format from the shapes, of which k is the model's: without
mlx-lm's model bits times group size is all that the shapes tell, and they have the
usual format if it fits.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.regular_files import quoted
from mlx_marlin.weights.formats import FORMATS, MODE_DEFAULTS

PARTS = ("weight", "scales", "biases", "global_scale")
Format = tuple[int, int, str]
"""Group size, bits and mode."""


def read(folder: Folder, layer: str, settings: dict[str, Any]) -> StoredWeight:
    """Reads the weight of a layer, or a batch of them."""
    arrays = {
        part: folder.read(f"{layer}.{part}")
        for part in PARTS
        if part in PARTS[:2] or f"{layer}.{part}" in folder.arrays
    }
    entry = _entry(settings, layer)
    k = folder.columns.get(layer) if entry is None else None
    return stored_weight(arrays, settings, entry, k)


def stored_weight(
    arrays: Mapping[str, mx.array],
    settings: dict[str, Any],
    entry: object,
    k: int | None = None,
) -> StoredWeight:
    """Returns the weight that arrays by their parts stand for.

    `entry`: what it says of the layer; None for nothing.
    """
    codes, scales = arrays["weight"], arrays["scales"]
    if codes.dtype != mx.uint32 or codes.ndim < 2 or not codes.size:
        raise ValueError(
            f"weight {codes.dtype} {codes.shape}, expected uint32 [n, ...]"
        )
    if scales.shape[:-1] != codes.shape[:-1] or not scales.size:
        raise ValueError(f"scales {scales.shape} for weight {codes.shape}")
    usual = _format(settings)
    if isinstance(entry, dict):
        format = _format(entry)
    elif entry is False:
        raise ValueError("scales, but the config says that it is not quantized")
    elif entry is True or (k is None and _fits(codes, scales, usual)):
        format = usual
    else:
        format = _inferred(codes, scales, k)
    group_size, bits, mode = format
    if not _fits(codes, scales, format, k):
        raise ValueError(
            f"scales {scales.dtype} {scales.shape} and weight {codes.shape}, expected "
            f"those of k={'any' if k is None else k} with mode={mode!r}, bits={bits} "
            f"and group_size={group_size}"
        )
    biases, global_scale = arrays.get("biases"), arrays.get("global_scale")
    _check_companions(scales, biases, global_scale, mode, entry)
    return StoredWeight(
        codes=codes,
        scales=scales,
        biases=biases,
        group_size=group_size,
        bits=bits,
        mode=mode,
        global_scale=global_scale,
    )


def _entry(settings: dict[str, Any], layer: str) -> object:
    """Returns what settings say of a layer; None for nothing.

    They have the names of a model's layers, of which the names in a file are a part, or
    the other way round, if the model is a part of a larger one.
    """
    if layer in settings:
        return settings[layer]
    similar = [
        value
        for name, value in settings.items()
        if name.endswith(f".{layer}") or layer.endswith(f".{name}")
    ]
    return similar[0] if len(similar) == 1 else None


def _format(settings: Mapping[str, Any]) -> Format:
    """Returns the format that an object says, with the defaults of its own mode."""
    mode = settings.get("mode", "affine")
    if not isinstance(mode, str) or mode not in MODE_DEFAULTS:
        raise ValueError(f"mode={quoted(mode)}, expected one of {[*MODE_DEFAULTS]}")
    group_size, bits = MODE_DEFAULTS[mode]
    given = settings.get("group_size", group_size), settings.get("bits", bits)
    if not all(type(number) is int and number > 0 for number in given):
        raise ValueError(
            f"group_size and bits {quoted(given)}, expected integers from 1"
        )
    return *given, mode


def _fits(
    codes: mx.array, scales: mx.array, format: Format, k: int | None = None
) -> bool:
    """Returns whether a weight may have a format; k is not known if it is None."""
    group_size, bits, mode = format
    columns = scales.shape[-1] * group_size
    return (
        (scales.dtype == mx.uint8) == (mode != "affine")
        and k in (None, columns)
        and codes.shape[-1] * 32 == columns * bits
    )


def _inferred(codes: mx.array, scales: mx.array, k: int | None) -> Format:
    """Returns the one format of MLX's that a weight may have."""
    fitting = [
        (group_size, bits, mode)
        for (mode, bits), known in FORMATS.items()
        if mode in MODE_DEFAULTS
        for group_size in known.group_sizes
        if _fits(codes, scales, (group_size, bits, mode), k)
    ]
    if len(fitting) != 1:
        raise ValueError(
            f"scales {scales.dtype} {scales.shape} and weight {codes.shape} fit "
            f"{fitting or 'no format'} (group size, bits, mode), expected one: the "
            f"config does not name the layer"
        )
    return fitting[0]


def _check_companions(
    scales: mx.array,
    biases: mx.array | None,
    global_scale: mx.array | None,
    mode: str,
    entry: object,
) -> None:
    if (biases is not None) != (mode == "affine"):
        raise ValueError(f"biases for mode={mode!r}: {biases is not None}")
    of_scales = scales.shape, scales.dtype
    if biases is not None and (biases.shape, biases.dtype) != of_scales:
        raise ValueError(
            f"biases {biases.dtype} {biases.shape}, expected {scales.dtype} "
            f"{scales.shape}"
        )
    said = entry.get("global_scale") if isinstance(entry, dict) else None
    if type(said) not in (bool, type(None)):
        raise ValueError(f"global_scale={quoted(said)}, expected true or false")
    if said is not None and said != (global_scale is not None):
        raise ValueError(
            f"the config says global_scale={said}, and the tensor 'global_scale' is "
            f"{'missing' if said else 'there'}"
        )
