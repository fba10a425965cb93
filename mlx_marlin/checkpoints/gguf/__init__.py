"""GGUF files: weights, configuration and tokenizer.

`Container` opens a file, `tensors_of` lists its tensors under mlx-lm's names,
`config_of` and `tokenizer_files` are what else mlx-lm needs. `read` is both of the
first.
"""

from mlx_marlin.checkpoints.gguf.configuration.config import config_of
from mlx_marlin.checkpoints.gguf.container import Container
from mlx_marlin.checkpoints.gguf.reading import read, tensors_of
from mlx_marlin.checkpoints.gguf.tokenizer import tokenizer_files

__all__ = [
    "Container",
    "config_of",
    "read",
    "tensors_of",
    "tokenizer_files",
]
