"""Marlin-style quantized matrix products for MLX on Apple GPUs."""
