"""Meetings with other libraries: mlx-lm."""
