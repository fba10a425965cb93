"""Layers that multiply through our kernels."""
