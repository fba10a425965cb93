"""The parts of `mlx-marlin render`."""
