"""A GGUF file as a model of mlx-lm's."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from mlx_marlin import regular_files
from mlx_marlin.checkpoints import gguf
from mlx_marlin.checkpoints.location import check_location, gguf_file, projectors
from mlx_marlin.checkpoints.quantization import Quantization, check_nothing_asked
from mlx_marlin.lm.checkpoints.folder_source import FolderSource
from mlx_marlin.lm.checkpoints.model_source import ModelSource, Value
from mlx_marlin.lm.module_tree import natural_key
from mlx_marlin.warn_once import warn_once

PLAIN = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
"""Dtypes of plain tensors, by llama.cpp's names."""


class GgufSource(ModelSource):
    """A GGUF file.

    Weights of types without kernels are refused unless `requantize` says how to
    quantize them anew.
    """

    def __init__(self, path: Path, requantize: Quantization | None = None) -> None:
        self.path = path
        self._container = gguf.Container(path)
        self.config = gguf.config_of(self._container)
        tensors = gguf.tensors_of(self._container, requantize)
        self._tensors = sorted(tensors, key=lambda tensor: natural_key(tensor.name))

    def plain_matrices(self) -> list[str]:
        """Returns the names of arrays of floats of several axes."""
        return [
            tensor.name
            for tensor in self._tensors
            if tensor.format in PLAIN and len(tensor.shape) > 1
        ]

    def stored_parameters(self) -> Iterator[tuple[str, Value]]:
        """Yields the name and the value of each parameter."""
        self.drop_absent_layers(self._tensors)
        dtype = self._dtype()
        for tensor in self._tensors:
            value = tensor.read()
            if isinstance(value, mx.array):
                value = _narrowed(value, dtype)
            yield tensor.name, value

    def _dtype(self) -> mx.Dtype:
        """Returns the dtype of activations: that of the scales, or of plain weights."""
        matrices = {t.format for t in self._tensors if len(t.shape) > 1}
        plain = [PLAIN[format] for format in matrices if format in PLAIN]
        return plain[0] if len(plain) == len(matrices) == 1 else mx.float16

    def copy_other_files(self, folder: Path) -> None:
        """Writes the tokenizer that the metadata describe."""
        for name, text in gguf.tokenizer_files(self._container).items():
            regular_files.write(folder / name, text)


def _narrowed(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Returns an array in another dtype if that rounds nothing, else the array itself.

    llama.cpp stores norms and biases in float32 whatever dtype the model had. Without
    this conversion all activations would be float32.
    """
    narrow = array.astype(dtype)
    same = mx.all(narrow.astype(mx.float32) == array.astype(mx.float32))
    return narrow if same else array


def open_source(
    path: str | Path, requantize: Quantization | None = None
) -> ModelSource:
    """Opens a checkpoint: a folder, or a GGUF file, which may be alone in a folder."""
    check_location(Path(path))
    file = gguf_file(Path(path))
    if file is None:
        check_nothing_asked(path, requantize)
        return FolderSource(Path(path))
    for projector in projectors(file):
        warn_once(f"ignored: {projector}", f"{projector} is ignored: it is for images")
    return GgufSource(file, requantize)
