"""What `mlx-marlin doctor` reports."""
