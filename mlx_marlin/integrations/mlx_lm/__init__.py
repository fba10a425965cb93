"""Conversion of mlx-lm models."""
