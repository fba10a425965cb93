"""Conversion of mlx-lm models: `optimize` and `restore`."""
