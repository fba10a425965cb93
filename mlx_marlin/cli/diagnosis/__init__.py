"""Collection of the facts that `mlx-marlin doctor` reports."""
