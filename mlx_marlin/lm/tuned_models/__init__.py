"""The settings of `optimize` that `mlx-marlin tune MODEL` found, and where they are."""
