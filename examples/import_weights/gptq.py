"""Writes a model as a GPTQ checkpoint with act-order, rounded to nearest.

A real one comes from GPTQModel or AutoGPTQ, which choose the order of the columns by
their importance and round better. The files look the same.
"""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np

BITS, GROUP = 4, 64


def write(source: Path, folder: Path) -> None:
    """Writes the linear layers of a model in `source` with 4 bits to a new folder."""
    folder.mkdir()
    arrays: dict[str, mx.array] = {}
    for name, array in mx.load(str(source / "model.safetensors")).items():
        if "_proj" in name:
            w = np.array(array.astype(mx.float32))
            arrays |= _layer(name.removesuffix(".weight"), w)
        else:
            arrays[name] = array
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": BITS,
        "group_size": GROUP,
        "desc_act": True,
        "sym": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    for file in source.glob("tokenizer*.json"):
        shutil.copy(file, folder)


def _layer(name: str, w: np.ndarray) -> dict[str, mx.array]:
    n, k = w.shape
    order = np.argsort(-np.square(w).sum(0))  # the largest columns first
    groups = w[:, order].reshape(n, -1, GROUP)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    scales = ((high - low) / (2**BITS - 1)).astype(np.float16)
    steps = scales.astype(np.float32)
    zeros = np.rint(-low / steps)
    codes = np.rint(groups / steps[..., None]) + zeros[..., None]
    codes = np.clip(codes, 0, 2**BITS - 1).reshape(n, k)
    stored, g_idx = np.empty((n, k)), np.empty(k)
    stored[:, order] = codes
    g_idx[order] = np.arange(k) // GROUP
    return {
        f"{name}.qweight": _words(stored.T, axis=0),
        f"{name}.qzeros": _words(zeros.T, axis=1),
        f"{name}.scales": mx.array(scales.T),
        f"{name}.g_idx": mx.array(g_idx.astype(np.int32)),
    }


def _words(values: np.ndarray, axis: int) -> mx.array:
    """Packs eight neighbours along an axis into an int32, the first one lowest."""
    eights = np.moveaxis(values, axis, -1).astype(np.uint32)
    eights = eights.reshape(*eights.shape[:-1], -1, 8)
    words = (eights << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    return mx.array(np.moveaxis(words, -1, axis).view(np.int32))
