"""Cost model of stock MLX on Apple GPUs, and the decision when it serves a call."""
