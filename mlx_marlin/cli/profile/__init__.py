"""The parts of `mlx-marlin profile`."""
