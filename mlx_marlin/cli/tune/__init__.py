"""The parts of `mlx-marlin tune`."""
