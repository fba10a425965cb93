"""The configuration of mlx-lm's model, from a GGUF file's metadata."""

from mlx_marlin.checkpoints.gguf.configuration.config import config_of

__all__ = ["config_of"]
