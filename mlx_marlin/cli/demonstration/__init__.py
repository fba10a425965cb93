"""What `mlx-marlin demo` computes and prints."""
