"""Checkpoints as models of mlx-lm: loading, saving and conversion."""
