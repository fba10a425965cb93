"""The parts of `mlx-marlin plan`."""
