"""Scales of whole tensors, which llama.cpp stores as tensors of their own.

llama.cpp multiplies a product by "NAME.scale" whatever the type of "NAME.weight" is
(the last pass of `load_tensors` in src/llama-model.cpp). Its conversion writes them for
NVFP4 only, the one format whose weights have a place for them.
"""

import re
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_marlin.checkpoints.gguf.blocks import read_plain
from mlx_marlin.checkpoints.gguf.container import Container, TensorInfo
from mlx_marlin.products.reference.weight import LARGEST_NVFP4

if TYPE_CHECKING:
    import numpy as np

SCALES = re.compile(r"(.*)\.(scale|input_scale)")
"""Names of scales: of the weight, and of activations that are quantized too."""


_SCALED = re.compile(
    r"(blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down)(_exps|_shexp)?)|output)\."
)
"""Names of the layers whose products llama.cpp scales."""
_SIDES = (float("-inf"), float("inf"))


def check_scale(container: Container, weight: TensorInfo, scale: TensorInfo) -> None:
    """Refuses a scale that would be lost: other than 1, of no NVFP4 weight.

    Those of activations have a use only in products of NVFP4 with quantized
    activations, which mlx-lm does not compute.
    """
    if not _SCALED.match(scale.name):
        raise ValueError("llama.cpp scales no such layer")
    if scale.name != _name(weight):
        return
    if weight.type.name != "NVFP4" and not (_values(container, weight) == 1).all():
        raise ValueError(
            f"a scale other than 1, which only an NVFP4 weight can have, but "
            f"{weight.name!r} is {weight.type.name}"
        )


def global_scale(container: Container, weight: TensorInfo) -> mx.array | None:
    """Returns the global scale of an NVFP4 weight as MLX means it; None if it is 1.

    A scale for which no float32 stands raises a ValueError.
    """
    import numpy as np

    name = _name(weight)
    if name not in container.tensors:
        return None
    scale = _values(container, weight)
    if not np.isfinite(scale).all():
        raise ValueError(f"its scale {name!r} is NaN or infinite")
    if (scale == 1).all():
        return None
    unit = np.float32(LARGEST_NVFP4)
    largest = np.multiply(scale, unit, dtype=np.float32)
    for candidate in (largest, *(np.nextafter(largest, side) for side in _SIDES)):
        largest = np.where(candidate / unit == scale, candidate, largest)
    if not (largest / unit == scale).all():
        raise ValueError(
            f"its scale {name!r} is no float32 divided by "
            f"{LARGEST_NVFP4:.0f}, which is how MLX stores the global scale"
        )
    return mx.array(largest)


def _name(weight: TensorInfo) -> str:
    return weight.name.removesuffix("weight") + "scale"


def _values(container: Container, weight: TensorInfo) -> "np.ndarray":
    import numpy as np

    info = container.tensors[_name(weight)]
    experts = weight.shape[0] if len(weight.shape) == 3 else 1
    if info.type.name != "F32" or info.shape != (experts,):
        raise ValueError(
            f"its scale {info.name!r} is {info.type.name} {info.shape}, "
            f"expected F32 ({experts},)"
        )
    return np.array(read_plain(container.data(info), info.type, info.shape))
