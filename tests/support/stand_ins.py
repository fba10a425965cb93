"""Small files that take the places of those that the documents name."""

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import copyfile
from unittest.mock import patch

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from support import foreign_models, gguf_cases, head_models, quantized_folder
from support.gguf_files import Written, random_tensor, write_gguf
from support.gguf_models import random_model, written_model
from support.gguf_vocabularies import byte_pairs

SUPER_BLOCK = 256
VOCABULARY = 1024
"""Tokens of the demo's tokenizer."""
KERNEL = "y[thread_position_in_grid.x] = T(2) * x[thread_position_in_grid.x];\n"
LIBRARY = """
constant int n [[function_constant(0)]];
constant int factor [[function_constant(1)]];

kernel void f(
    device const float* x, device float* y, uint i [[thread_position_in_grid]]) {
  y[i] = n * x[i];
}

template <typename T>
kernel void times(
    device const T* x, device T* y, uint i [[thread_position_in_grid]]) {
  y[i] = factor * x[i];
}

template [[host_name("times_float4")]] kernel void times<float4>(
    device const float4* x, device float4* y, uint i);
"""
PROGRAM = """
import mlx.core as mx
import mlx_marlin

mx.random.seed(0)
for rows, n, k, transpose in ((3, 64, 128, True), (2, 64, 64, False)):
    w = mx.quantize(mx.random.normal((n, k)))
    x = mx.random.normal((rows, k))
    mx.eval(mlx_marlin.quantized_matmul(x, *w, transpose=transpose))
"""


def _quantized(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    quantized_folder.write(file)


def _gguf(file: Path) -> None:
    example = quantized_folder.MODEL.parents[1] / "import_weights" / "gguf_file.py"
    spec = importlib.util.spec_from_file_location("gguf_file", example)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write(quantized_folder.MODEL, file)


def _without_kernels(file: Path) -> None:
    """Writes a small model whose widest weights have a type that needs --requantize."""
    with patch.object(gguf_cases, "HIDDEN", SUPER_BLOCK):
        case = gguf_cases.CASES["qwen3"]
        tensors = [_drawn(each) for each in written_model(case, random_model(case))]
        write_gguf(file, case.metadata | byte_pairs("qwen2"), tensors)


def _drawn(tensor: Written) -> Written:
    if len(tensor.shape) < 2 or tensor.shape[-1] % SUPER_BLOCK:
        return tensor
    random = np.random.default_rng(0)
    return random_tensor(tensor.name, "IQ2_XS", tensor.shape, random)


def _foreign(format: str, file: Path) -> None:
    foreign_models.write(file, format, vocab_size=VOCABULARY)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(quantized_folder.MODEL / name, file / name)


def _with_head(file: Path, original: bool = True) -> None:
    """Writes a model with its head, or a conversion to MLX's format, which has none."""
    model = head_models.trunk("qwen3_5", vocab_size=VOCABULARY)
    sizes = head_models.stored_config("qwen3_5") | {"vocab_size": VOCABULARY}
    if not original:
        sizes["quantization"] = format = {"group_size": 32, "bits": 4}
        nn.quantize(model, **format)
    weights = dict(tree_flatten(model.parameters()))
    head = head_models.stored("qwen3_5") if original else {}
    head_models.write(file, weights | head, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(quantized_folder.MODEL / name, file / name)


def _text(text: str, file: Path) -> None:
    file.write_text(text, encoding="utf-8")


FILES: dict[str, Callable[[Path], None]] = {
    "mlx-community/Qwen3-4B-4bit": _quantized,
    "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit": _quantized,
    "mlx-community/Qwen3.5-4B-MLX-4bit": partial(_with_head, original=False),
    "Qwen/Qwen3.5-4B": _with_head,
    "Qwen3-8B-Q4_K_M.gguf": _gguf,
    "Qwen3-8B-IQ2_XS.gguf": _without_kernels,
    "Qwen3-8B-GPTQ-Int4": partial(_foreign, "gptq"),
    "Qwen3-8B-AWQ": partial(_foreign, "awq"),
    "Qwen3-8B": partial(_foreign, "plain"),
    "sample.txt": partial(_text, "def main():\n    pass\n" * 20),
    "double.metal": partial(_text, KERNEL),
    "kernels.metal": partial(_text, LIBRARY),
    "many.metal": partial(_text, LIBRARY),
    "my_program.py": partial(_text, PROGRAM),
}
"""Writes what a page names, by its name. A folder's name is also one on the hub."""
ARGUMENTS = {
    "8080": "0",
    "8x4096x14336": "8x128x256",
    "8x4096x11008": "8x128x256",
    "4096x11008": "128x256",
    "4096x4096": "128x128",
}
"""Arguments that replace those of commands that time or serve: any free port, and
shapes for which the emulator takes less than minutes."""


def write(folder: Path, text: str) -> None:
    """Writes everything that a text names to a folder."""
    for name, make in FILES.items():
        if name in text:
            make(folder / name)
