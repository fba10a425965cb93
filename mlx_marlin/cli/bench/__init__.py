"""The parts of `mlx-marlin bench`."""
