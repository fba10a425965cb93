"""A model of stock MLX on Apple GPUs, and when it should serve a call."""
