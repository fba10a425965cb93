"""The demo's model as mlx-lm writes it, quantized by MLX."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils

MODEL = Path(__file__).parents[2] / "examples" / "tiny_llama" / "model"


def write(folder: Path, dtype: mx.Dtype = mx.float16) -> Path:
    """Writes the demo's model to a new folder in a format of MLX's, and returns it."""
    group_size, bits = 64, 4
    model, config = utils.load_model(MODEL)
    model.set_dtype(dtype)
    nn.quantize(model, group_size=group_size, bits=bits)
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL / name, folder / name)
    format = {"group_size": group_size, "bits": bits}
    (folder / "config.json").write_text(json.dumps(config | {"quantization": format}))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder
