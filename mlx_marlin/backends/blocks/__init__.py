"""Kernels of a decoder block that are no products."""
