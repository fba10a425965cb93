"""Quantized products on arrays."""
