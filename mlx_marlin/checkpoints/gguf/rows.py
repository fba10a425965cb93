"""Rows and scales of a tensor in a file, as llama.cpp's conversion leaves them.

It permutes rows for its kernels, and joins some projections. What it did is a rule
here, by the name that `architectures` uses; facts are from its conversion/llama.py and
conversion/qwen.py at commit 03173d5e.

Scales of whole tensors are tensors of their own: llama.cpp multiplies a product by
"NAME.scale" whatever the type of "NAME.weight" is (the last pass of `load_tensors` in
src/llama-model.cpp). Its conversion writes them for NVFP4 only, the one format whose
weights have a place for them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_marlin.checkpoints.gguf.blocks import read_plain
from mlx_marlin.checkpoints.gguf.container import Container, TensorInfo
from mlx_marlin.products.reference.weight import LARGEST_NVFP4

Index: TypeAlias = npt.NDArray[np.int64]
Rule: TypeAlias = Callable[[Container, int], Index]


@dataclass(frozen=True, slots=True)
class LinearHeads:
    """Heads of linear attention (gated delta nets)."""

    keys: int  # heads of queries and keys
    values: int  # heads of values, a multiple of `keys`
    key_dim: int  # features of a head of keys
    value_dim: int  # features of a head of values


def linear_heads(container: Container) -> LinearHeads:
    """Returns the heads of linear attention that the metadata say."""
    prefix = f"{container.text('general.architecture')}.ssm."
    keys, values, key_dim, inner = (
        container.integer(prefix + key)
        for key in ("group_count", "time_step_rank", "state_size", "inner_size")
    )
    if not keys or not values or values % keys:
        raise container.refusal(f"{prefix}group_count", f"does not divide {values}")
    if not inner or inner % values:
        raise container.refusal(
            f"{prefix}inner_size", f"is not whole heads of {values}"
        )
    return LinearHeads(keys, values, key_dim, inner // values)


def _in_pairs(key: str) -> Rule:
    """Of a head's rows, row i of each half are stored next to each other."""

    def index(container: Container, rows: int) -> Index:
        prefix = f"{container.text('general.architecture')}.attention."
        heads = container.integer(f"{prefix}head_count")
        heads = container.integer(f"{prefix}{key}", heads)
        if heads == 0 or rows % (2 * heads):
            raise ValueError(
                f"{rows} rows cannot be divided into pairs of {heads} heads"
            )
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    return index


def _half(which: int) -> Rule:
    def index(_: Container, rows: int) -> Index:
        if rows % 2:
            raise ValueError(f"{rows} rows are not those of two projections")
        half = rows // 2
        return np.arange(which * half, (which + 1) * half)

    return index


def _grouped(container: Container, rows: int) -> Index:
    """Puts heads of values that have one head of keys next to each other.

    They are the last rows. In the file there is one for each head of keys, and so on.
    """
    heads = linear_heads(container)
    first = max(0, rows - heads.values * heads.value_dim)
    width, rest = divmod(rows - first, heads.values)
    if not width or rest:
        raise ValueError(f"{rows} rows are not those of {heads.values} heads")
    values = np.arange(first, rows).reshape(-1, heads.keys, width).swapaxes(0, 1)
    return np.concatenate([np.arange(first), values.reshape(-1)])


def _of_key_heads(which: int) -> Rule:
    """Each head of keys has the betas of its heads of values, and then the alphas."""

    def index(container: Container, rows: int) -> Index:
        heads = linear_heads(container)
        if rows != 2 * heads.values:
            raise ValueError(f"{rows} rows, expected two for {heads.values} heads")
        return np.arange(rows).reshape(heads.keys, 2, -1)[:, which].reshape(-1)

    return index


RULES: dict[str, Rule] = {
    "pairs of queries": _in_pairs("head_count"),
    "pairs of keys": _in_pairs("head_count_kv"),
    "gate": _half(0),
    "up": _half(1),
    "grouped": _grouped,
    "betas": _of_key_heads(0),
    "alphas": _of_key_heads(1),
}


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


def _values(container: Container, weight: TensorInfo) -> np.ndarray:
    info = container.tensors[_name(weight)]
    experts = weight.shape[0] if len(weight.shape) == 3 else 1
    if info.type.name != "F32" or info.shape != (experts,):
        raise ValueError(
            f"its scale {info.name!r} is {info.type.name} {info.shape}, "
            f"expected F32 ({experts},)"
        )
    return np.array(read_plain(container.data(info), info.type, info.shape))
