"""The parts of `mlx-marlin doctor`."""
