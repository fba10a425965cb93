"""Scales of whole NVFP4 tensors, which llama.cpp stores as tensors of their own."""

import re

import mlx.core as mx

from mlx_marlin.checkpoints.gguf.blocks import read_plain
from mlx_marlin.checkpoints.gguf.container import Container, TensorInfo
from mlx_marlin.products.reference.weight import LARGEST_NVFP4

SCALES = re.compile(r"(.*)\.(scale|input_scale)")
"""Names of scales: of the weight, and of activations that are quantized too."""


def global_scale(container: Container, weight: TensorInfo) -> mx.array | None:
    """Returns the global scale of an NVFP4 weight as MLX means it, or None if it is 1.

    Args:
        container: The file.
        weight: The weight "NAME.weight"; its scale is "NAME.scale".

    Raises:
        ValueError: If the scale is not finite, or if no float32 stands for it.
    """
    import numpy as np

    info = container.tensors.get(weight.name.removesuffix("weight") + "scale")
    if info is None:
        return None
    experts = weight.shape[0] if len(weight.shape) == 3 else 1
    if info.type.name != "F32" or info.shape != (experts,):
        raise ValueError(
            f"its scale {info.name!r} is {info.type.name} {info.shape}, "
            f"expected F32 ({experts},)"
        )
    scale = np.array(read_plain(container.data(info), info.type, info.shape))
    if not np.isfinite(scale).all():
        raise ValueError(f"its scale {info.name!r} is NaN or infinite")
    if (scale == 1).all():
        return None
    unit = np.float32(LARGEST_NVFP4)
    largest = np.multiply(scale, unit, dtype=np.float32)
    for candidate in (largest, *(np.nextafter(largest, side) for side in _SIDES)):
        largest = np.where(candidate / unit == scale, candidate, largest)
    if not (largest / unit == scale).all():
        raise ValueError(
            f"its scale {info.name!r} is no float32 divided by "
            f"{LARGEST_NVFP4:.0f}, which is how MLX stores the global scale"
        )
    return mx.array(largest)


_SIDES = (float("-inf"), float("inf"))
