"""The parts of `mlx-marlin emulate`."""
