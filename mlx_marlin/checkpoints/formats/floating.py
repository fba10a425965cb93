"""Weights of small floats in the containers that tools write.

Codes of E2M1 numbers, 4 bits each, are uint8 [n, k / 2], the even column in the low
nibble. Of nvfp4, scales are E4M3 [n, k / 16], with a float32 for the whole weight:
compressed-tensors divides by it (`weight_global_scale`), NVIDIA's ModelOpt multiplies
(`weight_scale_2`), and MLX multiplies by it and divides by 2688. Of mxfp4, scales are
E8M0 [n, k / 32].

Originals of fp8 have E4M3 numbers [..., n, k] and NAME_scale_inv, which multiplies:
floats or E8M0, one for each block of the config's `weight_block_size`, or of a shape
that is broadcast, such as one number for the weight.
"""

from typing import Any

import mlx.core as mx

from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.stored_weight import StoredWeight, check_finite
from mlx_marlin.products.reference.weight import LARGEST_NVFP4
from mlx_marlin.regular_files import quoted
from mlx_marlin.weights.formats import MODE_DEFAULTS

MODELOPT = ("nvfp4", "w4a16_nvfp4")
"""Values of ModelOpt's `quant_algo` that are read; activations are not quantized."""


def read_modelopt(folder: Folder, layer: str, settings: dict[str, Any]) -> StoredWeight:
    """Reads the weight of a layer of ModelOpt's."""
    check_modelopt(settings)
    scale = factor(folder.read(f"{layer}.weight_scale_2"), "weight_scale_2")
    codes, scales = (
        folder.read(f"{layer}.{part}") for part in ("weight", "weight_scale")
    )
    return weight(codes, scales, "nvfp4", LARGEST_NVFP4 * scale)


def check_modelopt(settings: dict[str, Any]) -> None:
    """Raises a ValueError if ModelOpt's settings are of another format than nvfp4."""
    algorithm, size = settings.get("quant_algo"), settings.get("group_size")
    if str(algorithm).lower() not in MODELOPT:
        raise ValueError(
            f"quant_algo={quoted(algorithm)}, expected one of {[*MODELOPT]}: start "
            f"from the model's plain weights"
        )
    if size is not None and (type(size) is not int or size != 16):
        raise ValueError(f"group_size={quoted(size)}, expected 16 for {algorithm}")


def factor(array: mx.array, name: str) -> mx.array:
    """Returns the factor of a weight, float32 [1]."""
    number = array.astype(mx.float32)
    if number.size != 1:
        raise ValueError(f"{name} {number.shape}, expected one number")
    check_finite(number)
    if not mx.all(number > 0):
        raise ValueError(f"{name}={number.item()}, expected above 0")
    return number.reshape(1)


def weight(
    codes: mx.array, scales: mx.array, mode: str, global_scale: mx.array | None = None
) -> StoredWeight:
    """Returns a weight of nvfp4 or mxfp4.

    `global_scale`: float32 [1], as MLX means it.
    """
    group_size, _ = MODE_DEFAULTS[mode]
    groups = 2 * codes.shape[-1] // group_size
    is_whole = codes.ndim == 2 and groups * group_size == 2 * codes.shape[-1]
    if codes.dtype != mx.uint8 or not is_whole:
        raise ValueError(
            f"codes {codes.dtype} {codes.shape}, expected uint8 [n, k / 2] with k a "
            f"multiple of {group_size}"
        )
    expected = codes.shape[0], groups
    if scales.dtype != mx.uint8 or scales.shape != expected:
        raise ValueError(
            f"scales {scales.dtype} {scales.shape}, expected bytes {expected} for "
            f"{mode}"
        )
    return StoredWeight(
        codes=codes.view(mx.uint32),
        scales=scales,
        group_size=group_size,
        bits=4,
        mode=mode,
        global_scale=global_scale,
    )


def fp8(codes: mx.array, scales: mx.array, settings: dict[str, Any]) -> mx.array:
    """Returns a weight of an original of fp8 in bfloat16, rounded once, as mlx-lm
    does."""
    factors = scales.astype(mx.float32)
    if scales.dtype == mx.uint8:
        factors = mx.power(2.0, factors - 127)
    *batch, n, k = codes.shape if codes.ndim > 1 else (1, codes.size)
    shape = (1,) * (codes.ndim - scales.ndim) + scales.shape
    pairs = zip(shape, codes.shape, strict=False)
    if len(shape) == codes.ndim and all(own in (1, size) for own, size in pairs):
        values = mx.from_fp8(codes, mx.bfloat16) * factors
        return values.astype(mx.bfloat16)
    height, width = block_of(settings) or (n, k)
    rows, columns = -(-n // height), -(-k // width)
    if scales.shape != (*batch, rows, columns):
        raise ValueError(
            f"scale_inv {scales.shape} for codes {codes.shape}, expected one number or "
            f"{(*batch, rows, columns)}: the config says weight_block_size="
            f"{quoted(settings.get('weight_block_size'))}"
        )
    ends = [(0, rows * height - n), (0, columns * width - k)]
    padded = mx.pad(codes, [(0, 0)] * len(batch) + ends)
    blocks = mx.from_fp8(padded, mx.bfloat16)
    blocks = blocks.reshape(*batch, rows, height, columns, width)
    values = (blocks * factors[..., :, None, :, None]).astype(mx.bfloat16)
    return values.reshape(*batch, rows * height, columns * width)[..., :n, :k]


def block_of(settings: dict[str, Any]) -> tuple[int, int] | None:
    """Returns rows and columns that share a scale; None if nothing is said."""
    match settings.get("weight_block_size"):
        case None:
            return None
        case [int(rows), int(columns)] if min(rows, columns) > 0:
            return rows, columns
        case said:
            raise ValueError(
                f"weight_block_size={quoted(said)}, expected two integers from 1"
            )
