"""The configuration of mlx-lm's model, from a GGUF file's metadata."""
