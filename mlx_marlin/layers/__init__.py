"""Layers whose products run on our kernels."""
