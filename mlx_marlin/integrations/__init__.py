"""Integrations with other libraries: mlx-lm."""
