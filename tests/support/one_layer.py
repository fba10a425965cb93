"""Checkpoints of one layer [32, 128], in each format of a folder."""

from typing import Any

import mlx.core as mx
import numpy as np

from support import foreign_checkpoints as foreign

LAYER = "model.layers.0.mlp.up_proj"


def drawn(bits: int, **options: Any) -> foreign.IntegerWeight:
    rng = np.random.default_rng(0)
    return foreign.drawn_weight(rng, 32, 128, 64, bits, **options)


def settings_of(folder: foreign.Folder) -> dict:
    return folder.config.get("quantization_config") or folder.config["quantization"]


def gptq(**said: Any) -> foreign.Folder:
    """Version 2; in version 1 the zero points mean others, which all tools read."""
    weight = drawn(4, act_order=True)
    weight.zeros = weight.zeros.clip(0, 14)
    config = foreign.gptq_config(4, 2)
    config["quantization_config"] |= said
    return foreign.Folder(config, foreign.gptq_arrays(LAYER, weight, 2))


def awq() -> foreign.Folder:
    return foreign.Folder(foreign.awq_config(), foreign.awq_arrays(LAYER, drawn(4)))


def compressed() -> foreign.Folder:
    arrays = foreign.compressed_arrays(LAYER, drawn(3, act_order=True), symmetric=False)
    return foreign.Folder(foreign.compressed_config(3), arrays)


def _floats(group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns 4-bit floats, two a byte, and scales that are numbers above 0."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (32, 64), np.uint8)
    return codes, rng.integers(1, 0x7E, (32, 128 // group_size), np.uint8)


def nvfp4(divisor: float = 512) -> foreign.Folder:
    codes, scales = _floats(16)
    arrays = {
        f"{LAYER}.weight_packed": codes,
        f"{LAYER}.weight_scale": scales,
        f"{LAYER}.weight_global_scale": np.array([divisor], np.float32),
    }
    return foreign.Folder(foreign.nvfp4_config(), arrays)


def mxfp4() -> foreign.Folder:
    codes, scales = _floats(32)
    arrays = {f"{LAYER}.weight_packed": codes, f"{LAYER}.weight_scale": scales}
    return foreign.Folder(foreign.mxfp4_config(), arrays)


def modelopt(**said: Any) -> foreign.Folder:
    codes, scales = _floats(16)
    arrays = {
        f"{LAYER}.weight": codes,
        f"{LAYER}.weight_scale": scales,
        f"{LAYER}.weight_scale_2": np.array([2**-9], np.float32),
    }
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    config = {"model_type": "llama", "quantization_config": settings | said}
    return foreign.Folder(config, arrays)


def auto_round() -> foreign.Folder:
    folder = gptq()
    settings = settings_of(folder)
    for key in ("checkpoint_format", "desc_act", "quant_method"):
        del settings[key]
    packing = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    settings |= packing | {"extra_config": {"c": {"bits": 16}, LAYER: {"bits": 4}}}
    return folder


def stock() -> foreign.Folder:
    w = mx.random.normal((32, 128), key=mx.random.key(0)).astype(mx.float16)
    names = ("weight", "scales", "biases")
    parts = zip(names, mx.quantize(w, 64, 4), strict=True)
    arrays = {f"{LAYER}.{name}": np.array(part) for name, part in parts}
    own = {"bits": 4, "group_size": 64, "mode": "affine"}
    return foreign.Folder({"quantization": {**own, LAYER: dict(own)}}, arrays)
