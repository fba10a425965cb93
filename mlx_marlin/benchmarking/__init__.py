"""Benchmarks: times of our kernels and of stock MLX, and the files that hold them."""
