"""The parts of `mlx-marlin demo`."""
